"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): grade-school word problems as parquet files for training.

A row is {"prompt": question and how to end the answer, "ground_truth": "1234", "response": the whole solution,
"data_source": "gsm8k", "extra_info": {"index": 0, "split": "train"}}. `response` makes the same file serve supervised
training. Command: `posttrain data gsm8k [--from FOLDER] [--out FOLDER]`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from posttrain.data.recipes import recipe
from posttrain.data.recipes.recipe import Recipe, Row, Split, text_of
from posttrain.data.rows import DataError, RowTable

INSTRUCTION = "Think step by step and end with a line `#### N`, where N is the answer as a number."
COLUMNS = "question and answer"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def gsm8k_rows(table: RowTable, split: str) -> Iterator[Row]:
    """Convert rows with `question` and `answer`."""
    for number in range(len(table)):
        question, answer = (text_of(table, number, COLUMNS, name) for name in ("question", "answer"))
        yield {
            "prompt": f"{question.strip()}\n{INSTRUCTION}",
            "ground_truth": _final_number(answer, table.where(number)),
            "response": answer,
            "data_source": "gsm8k",
            "extra_info": {"index": number, "split": split},
        }


def _final_number(answer: str, where: str) -> str:
    # The number after the last `####`, thousands separators removed.
    _, mark, end = answer.rpartition("####")
    number = end.strip().replace(",", "")
    if not mark or not _NUMBER.fullmatch(number):
        raise DataError(f"The answer of {where} does not end in `#### N` with a number N: {answer[-40:]!r}.")
    return number


RECIPE = Recipe(
    name="gsm8k",
    sentence="grade-school word problems, with solutions (also for SFT); scored by number",
    splits=(Split("train"), Split("test")),
    columns=COLUMNS,
    rows=gsm8k_rows,
    hub_id="openai/gsm8k",
    hub_config="main",
    hub_file="main/{split}-00000-of-00001.parquet",
)


def prepare(source: str | os.PathLike[str] | None = None, out: str | os.PathLike[str] | None = None) -> dict[Path, int]:
    """Write `train.parquet` and `test.parquet` into `out`; return path -> row count. Without `source`: the hub."""
    return {made.path: made.rows for made in recipe.prepare(RECIPE, source, out)}

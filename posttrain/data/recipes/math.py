"""Word problems and mathematics: GSM8K, MATH and MATH-500.

GSM8K (Cobbe et al. 2021, arXiv 2110.14168) has grade-school word problems. A row is {"prompt": question and how to end
the answer, "ground_truth": "1234", "response": the whole solution, "data_source": "gsm8k", "extra_info": {"index": 0,
"split": "train"}}. `response` makes the same file serve supervised training.

MATH (Hendrycks et al. 2021, arXiv 2103.03874) has competition problems with answers in `\\boxed{}`. A row is {"prompt":
problem and how to end the answer, "ground_truth": "\\frac{1}{2}", "response": the solution, "data_source": "math" or
"math500", "extra_info": {"index", "split", "subject", "level"}}.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from posttrain.data.recipes.recipe import Recipe, Row, SkippedRow, Split, text_of
from posttrain.data.rows import DataError, RowTable

NUMBER_INSTRUCTION = "Think step by step and end with a line `#### N`, where N is the answer as a number."
GSM8K_COLUMNS = "question and answer"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
BOXED_INSTRUCTION = "Think step by step and put your final answer within \\boxed{}."
MATH_COLUMNS = "problem, solution and (where there is one) answer"


def gsm8k_rows(table: RowTable, split: str) -> Iterator[Row]:
    """Convert rows with `question` and `answer`."""
    for number in range(len(table)):
        question, answer = (text_of(table, number, GSM8K_COLUMNS, name) for name in ("question", "answer"))
        yield {
            "prompt": f"{question.strip()}\n{NUMBER_INSTRUCTION}",
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


GSM8K = Recipe(
    name="gsm8k",
    sentence="grade-school word problems, with solutions (also for SFT); scored by number",
    splits=(Split("train"), Split("test")),
    columns=GSM8K_COLUMNS,
    rows=gsm8k_rows,
    hub_id="openai/gsm8k",
    hub_config="main",
    hub_file="main/{split}-00000-of-00001.parquet",
)


def _rows(table: RowTable, split: str, source: str) -> Iterator[Row | SkippedRow]:
    for number, row in enumerate(table.rows):
        problem, solution = (text_of(table, number, MATH_COLUMNS, name) for name in ("problem", "solution"))
        answer = row.get("answer") or last_boxed(solution)
        if not answer:
            yield SkippedRow("the solution boxes no answer")
            continue
        subject, level = row.get("subject") or row.get("type"), row.get("level")
        yield {
            "prompt": f"{problem.strip()}\n{BOXED_INSTRUCTION}",
            "ground_truth": str(answer),
            "response": solution,
            "data_source": source,
            "extra_info": {"index": number, "split": split, "subject": str(subject or ""), "level": str(level or "")},
        }


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{}` (braces may nest) or `\\boxed `; None without one."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start + (6 if text.startswith("\\boxed", start) else 5) :]
    if not rest.lstrip().startswith("{"):
        return (rest.split("$")[0].split() or [""])[0] or None  # `\boxed 3$`
    depth = 0
    for place, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if char == "}" and depth == 0:
            return rest[: place + 1].strip()[1:-1].strip() or None
    return None


MATH = Recipe(
    name="math",
    sentence="competition mathematics (MATH: 7,500 and 5,000 problems); scored by the boxed answer",
    splits=(Split("train"), Split("test")),
    columns=MATH_COLUMNS,
    rows=lambda table, split: _rows(table, split, "math"),
    hub_id="DigitalLearningGmbH/MATH-lighteval",
)
MATH500 = Recipe(
    name="math500",
    sentence="500 problems of MATH's test set, for evaluation; scored by the boxed answer",
    splits=(Split("test", files=("math500.jsonl",)),),
    columns=MATH_COLUMNS,
    rows=lambda table, split: _rows(table, split, "math500"),
    hub_id="HuggingFaceH4/MATH-500",
)

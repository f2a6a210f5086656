"""MBPP (Austin et al. 2021, arXiv 2108.07732) and HumanEval (Chen et al. 2021, arXiv 2107.03374): programs by tests.

`ground_truth` is a JSON text with the tests, which the code scorer runs in the sandbox. MBPP's prompt shows the first
test, which names the function; a program cannot pass the others by repeating it. `response` is the data set's own
program in a fenced block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from posttrain.data.recipes.recipe import Recipe, Row, Split, text_of
from posttrain.data.rows import DataError, RowTable

INSTRUCTION = "Answer with one Python program in a ```python block."
MBPP_COLUMNS = "task_id, prompt (or text), code, test_list"
HUMANEVAL_COLUMNS = "task_id, prompt, entry_point, canonical_solution, test"
# Last task of each split, by the data set's own division of its 974 tasks.
MBPP_LAST = {"prompt": 10, "test": 510, "validation": 600, "train": 974}


def mbpp_rows(table: RowTable, split: str) -> Iterator[Row]:
    """Convert the tasks of this split: one file may hold all of them."""
    for number, row in enumerate(table.rows):
        task, tests = row.get("task_id"), row.get("test_list")
        if not isinstance(task, int) or not isinstance(tests, list) or not tests:
            raise DataError(f"The task_id or test_list of {table.where(number)} is missing; columns: {MBPP_COLUMNS}.")
        if split != next((name for name, last in MBPP_LAST.items() if task <= last), None):
            continue
        text = text_of(table, number, MBPP_COLUMNS, "prompt", "text").strip()
        setup = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
        yield {
            "prompt": f"{text}\nYour program must pass tests such as:\n```python\n{tests[0]}\n```\n{INSTRUCTION}",
            "ground_truth": json.dumps({"test_list": tests, "test_imports": [line for line in setup if line]}),
            "response": _fence(text_of(table, number, MBPP_COLUMNS, "code")),
            "data_source": "mbpp",
            "extra_info": {"index": number, "split": split, "task_id": str(task)},
        }


def humaneval_rows(table: RowTable, split: str) -> Iterator[Row]:
    names = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    for number in range(len(table)):
        task, prompt, entry, solution, test = (text_of(table, number, HUMANEVAL_COLUMNS, name) for name in names)
        yield {
            "prompt": f"Complete this function.\n```python\n{prompt.rstrip()}\n```\n{INSTRUCTION}",
            "ground_truth": json.dumps({"test": test, "entry_point": entry, "prompt": prompt}),
            "response": _fence(prompt + solution),
            "data_source": "humaneval",
            "extra_info": {"index": number, "split": split, "task_id": task},
        }


def _fence(program: str) -> str:
    return f"```python\n{program.strip()}\n```"


_MBPP_FILES = ("sanitized-mbpp.json", "mbpp.jsonl")
MBPP = Recipe(
    name="mbpp",
    sentence="short Python tasks with tests (sanitized MBPP), divided by task number; scored in the sandbox",
    splits=tuple(Split(name, files=_MBPP_FILES, optional=True) for name in ("train", "validation", "test", "prompt")),
    columns=MBPP_COLUMNS,
    rows=mbpp_rows,
    hub_id="google-research-datasets/mbpp",
    hub_config="sanitized",
)
HUMANEVAL = Recipe(
    name="humaneval",
    sentence="164 Python functions to complete, for evaluation; scored in the sandbox",
    splits=(Split("test", files=("HumanEval.jsonl.gz", "HumanEval.jsonl")),),
    columns=HUMANEVAL_COLUMNS,
    rows=humaneval_rows,
    hub_id="openai/openai_humaneval",
    hub_config="openai_humaneval",
)

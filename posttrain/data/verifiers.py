"""Rows of the package verifiers: `data.train_files=verifiers:NAME?size=1000`, the tasks of a taskset.

Behind `?` come settings of the taskset, `size` (the most rows, 1,000 unless given) and `python`, the interpreter that
has the package: verifiers does not fit together with many others. A row says which task it is, and the environment
(`environment=verifiers:NAME`) plays it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.data.named import parse_name
from posttrain.errors import UserError
from posttrain.external import find_missing

VERIFIERS = "verifiers:"
_SIZE = 1000
# Started by its path: another interpreter runs it, and has no posttrain.
_WORKER = Path(__file__).parents[1] / "conversations" / "verifiers_worker.py"


def read_rows(name: str, setting: str, limit: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered rows of a taskset; UserError where verifiers, the taskset or a setting of it is not there."""
    taskset, settings = parse_name(name, setting)
    size, python = settings.pop("size", _SIZE), settings.pop("python", None)
    if problem := find_problem(name):
        raise UserError(f"{setting}={name} {problem[0]}.\n  to do:  {problem[1]}")
    wanted = json.dumps({"id": taskset, **settings})
    command = [
        python or sys.executable,
        "-P",
        str(_WORKER),
        "rows",
        wanted,
        str(size if limit is None else min(size, limit)),
    ]
    made = subprocess.run(command, capture_output=True, text=True)
    answer: dict[str, Any]
    try:
        answer = json.loads(made.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (made.stderr.strip().splitlines() or [f"exit code {made.returncode}"])[-1]
        answer = {"error": last}
    if "error" in answer:
        raise UserError(f"{setting}={name}: verifiers cannot load the taskset: {answer['error']}")
    for place, task in enumerate(answer["tasks"]):
        # Where the environment opens the conversation itself there is no prompt; a row has one nevertheless.
        prompt = task["prompt"] or task["system"] or f"task {task['number']}"
        if task["prompt"] and task["system"]:
            rest = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = [{"role": "system", "content": task["system"]}, *rest]
        row = {"prompt": prompt, "ground_truth": "" if task["answer"] is None else str(task["answer"])}
        yield place + 1, row | {"data_source": taskset, "taskset": wanted, "task_number": task["number"]}


def find_problem(name: str) -> tuple[str, str] | None:
    """(why there are no such rows, what to do) if the interpreter or its package is not there."""
    why = find_missing(parse_name(name, "data.train_files")[1].get("python"), "verifiers")
    plain = name.partition("?")[0]
    do = f"python -m venv OWN && OWN/bin/pip install verifiers, and {plain}?python=OWN/bin/python"
    return (f"cannot be read: {why}", do) if why else None

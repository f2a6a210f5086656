"""Rows of the package reasoning-gym: `data.train_files=reasoning_gym:leg_counting?max_animals=5&size=1000`.

Behind `?` come settings of the task, `size` (1,000 rows unless given), `seed`, and `level`, which makes it harder. The
package makes the rows in a process of its own, so that nothing of it is imported into the trainer.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from posttrain.data.named import parse_name
from posttrain.errors import UserError
from posttrain.spelling import closest

REASONING_GYM = "reasoning_gym:"
_SIZE = 1000
# Item n of a data set is drawn with seed + n: seeds so far apart have no item in common.
_SEEDS = {"data.val_files": 1_000_000_000}
_ASK = "\n\nWrite your final answer between <answer> and </answer>."


def read_rows(name: str, setting: str, limit: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered rows of a task; UserError for a task or a setting that the package does not have."""
    task, settings = parse_name(name, setting)
    settings.setdefault("seed", _SEEDS.get(setting, 0))
    size = settings.setdefault("size", _SIZE)
    if limit is not None:
        settings["size"] = min(size, limit)
    if problem := find_problem(name):
        raise UserError(f"{setting}={name} {problem[0]}.\n  to do:  {problem[1]}")
    command = [sys.executable, "-m", "posttrain.rewards.scorers.reasoning_gym", task, json.dumps(settings)]
    made = subprocess.run(command, capture_output=True, text=True)
    try:
        answer = json.loads(made.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (made.stderr.strip().splitlines() or [f"exit code {made.returncode}"])[-1]
        raise UserError(f"{setting}={name}: reasoning-gym failed: {last}") from None
    if "error" in answer:
        near = closest(answer["name"], answer["known"])
        hint = f" Did you mean {near}?" if near else ""
        raise UserError(f"{setting}={name}: {answer['error']}{hint} Known: {', '.join(sorted(answer['known']))}.")
    for number, (question, truth) in enumerate(answer["items"]):
        # Tasks without a stored answer, such as graph_color, are scored all the same.
        row = {"prompt": question.strip() + _ASK, "ground_truth": "" if truth is None else str(truth)}
        row |= {"data_source": "reasoning_gym", "task": task, "task_settings": json.dumps(settings), "item": number}
        yield number + 1, row


def find_problem(name: str) -> tuple[str, str] | None:
    """(what is missing, what to do) if the package is not there."""
    if importlib.util.find_spec("reasoning_gym") is None:
        return "needs the package reasoning-gym", "pip install 'posttrain[reasoning-gym]'"
    return None

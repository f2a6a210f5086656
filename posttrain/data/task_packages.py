"""Rows that a package makes instead of a file: `data.train_files=SOURCE:NAME?KEY=VALUE&KEY=VALUE`.

reasoning_gym:leg_counting?max_animals=5&size=1000   a task of reasoning-gym, with settings of the task, `size` (1,000
    rows unless given), `seed`, and `level`, which makes it harder
verifiers:NAME?size=1000   the tasks of a taskset of verifiers, with settings of the taskset, `size` (the most rows,
    1,000 unless given) and `python`, the interpreter that has the package: verifiers does not fit together with many
    others. A row says which task it is, and the environment (`environment=verifiers:NAME`) plays it.

Each package makes its rows in a process of its own, so that nothing of it is imported into the trainer.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.config.values import parse_yaml
from posttrain.errors import UserError
from posttrain.external import find_missing
from posttrain.spelling import closest

_SIZE = 1000
# Item n of a data set is drawn with seed + n: seeds so far apart have no item in common.
_SEEDS = {"data.val_files": 1_000_000_000}
_ASK = "\n\nWrite your final answer between <answer> and </answer>."
# Started by its path: another interpreter runs it, and has no posttrain.
_WORKER = Path(__file__).parents[1] / "conversations" / "verifiers_worker.py"

Rows = Iterator[tuple[int, dict[str, Any]]]


class Source(NamedTuple):
    """A package that makes rows.

    `read_rows(name, setting, limit)` gives numbered rows; UserError for a task or a setting that the package does not
    have. `find_problem(name)` is (what is missing, what to do), or None.
    """

    read_rows: Callable[[str, str, int | None], Rows]
    find_problem: Callable[[str], tuple[str, str] | None]


def find_source(name: Any) -> Source | None:
    """The package that makes rows of this name; None for a file."""
    return SOURCES.get(str(name).partition(":")[0]) if ":" in str(name) else None


def _parse_name(name: str, setting: str) -> tuple[str, dict[str, Any]]:
    # (name within its source, settings behind `?`)
    source, _, rest = name.partition(":")
    task, _, rest = rest.partition("?")
    settings = dict[str, Any]()
    for part in filter(None, rest.split("&")):
        key, equals, value = part.partition("=")
        if not (key and equals):
            raise UserError(f"{setting}={name}: {part!r} is not KEY=VALUE.\n  to do:  {source}:{task}?size=1000&seed=1")
        settings[key] = parse_yaml(value)
    for key in ("size", "seed", "level"):
        if not isinstance(settings.get(key, 1), int) or settings.get(key, 1) < (key == "size"):
            raise UserError(f"{setting}={name}: {key} is {settings[key]!r}, no whole number that is large enough.")
    return task, settings


def _ask_process(name: str, setting: str, *command: str) -> tuple[Any, str]:
    # (what the process printed last, as JSON, or None; its last words otherwise)
    if problem := SOURCES[name.partition(":")[0]].find_problem(name):
        raise UserError(f"{setting}={name} {problem[0]}.\n  to do:  {problem[1]}")
    made = subprocess.run(command, capture_output=True, text=True)
    try:
        return json.loads(made.stdout.splitlines()[-1]), ""
    except (IndexError, ValueError):
        return None, (made.stderr.strip().splitlines() or [f"exit code {made.returncode}"])[-1]


def _reasoning_gym_rows(name: str, setting: str, limit: int | None) -> Rows:
    task, settings = _parse_name(name, setting)
    settings.setdefault("seed", _SEEDS.get(setting, 0))
    size = settings.setdefault("size", _SIZE)
    if limit is not None:
        settings["size"] = min(size, limit)
    module = "posttrain.rewards.scorers.reasoning_gym"
    answer, words = _ask_process(name, setting, sys.executable, "-m", module, task, json.dumps(settings))
    if answer is None:
        raise UserError(f"{setting}={name}: reasoning-gym failed: {words}")
    if "error" in answer:
        near = closest(answer["name"], answer["known"])
        hint = f" Did you mean {near}?" if near else ""
        raise UserError(f"{setting}={name}: {answer['error']}{hint} Known: {', '.join(sorted(answer['known']))}.")
    for number, (question, truth) in enumerate(answer["items"]):
        # Tasks without a stored answer, such as graph_color, are scored all the same.
        row = {"prompt": question.strip() + _ASK, "ground_truth": "" if truth is None else str(truth)}
        row |= {"data_source": "reasoning_gym", "task": task, "task_settings": json.dumps(settings), "item": number}
        yield number + 1, row


def _missing_reasoning_gym(name: str) -> tuple[str, str] | None:
    if importlib.util.find_spec("reasoning_gym") is None:
        return "needs the package reasoning-gym", "pip install 'posttrain[reasoning-gym]'"
    return None


def _verifiers_rows(name: str, setting: str, limit: int | None) -> Rows:
    taskset, settings = _parse_name(name, setting)
    size, python = settings.pop("size", _SIZE), settings.pop("python", None)
    wanted, most = json.dumps({"id": taskset, **settings}), str(size if limit is None else min(size, limit))
    command = (python or sys.executable, "-P", str(_WORKER), "rows", wanted, most)
    answer, words = _ask_process(name, setting, *command)
    if answer is None or "error" in answer:
        raise UserError(f"{setting}={name}: verifiers cannot load the taskset: {answer['error'] if answer else words}")
    for place, task in enumerate(answer["tasks"]):
        # Where the environment opens the conversation itself there is no prompt; a row has one nevertheless.
        prompt = task["prompt"] or task["system"] or f"task {task['number']}"
        if task["prompt"] and task["system"]:
            rest = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = [{"role": "system", "content": task["system"]}, *rest]
        row = {"prompt": prompt, "ground_truth": "" if task["answer"] is None else str(task["answer"])}
        yield place + 1, row | {"data_source": taskset, "taskset": wanted, "task_number": task["number"]}


def _missing_verifiers(name: str) -> tuple[str, str] | None:
    why = find_missing(_parse_name(name, "data.train_files")[1].get("python"), "verifiers")
    plain = name.partition("?")[0]
    do = f"python -m venv OWN && OWN/bin/pip install verifiers, and {plain}?python=OWN/bin/python"
    return (f"cannot be read: {why}", do) if why else None


SOURCES = {
    "reasoning_gym": Source(_reasoning_gym_rows, _missing_reasoning_gym),
    "verifiers": Source(_verifiers_rows, _missing_verifiers),
}

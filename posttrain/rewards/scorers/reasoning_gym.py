"""`reasoning_gym`: tasks of the package reasoning-gym, scored by the task itself.

The text between the last `<answer>` and `</answer>` goes to the task's own `score_answer`, which gives 0 to 1. The item
is made again from its task, its settings and its number (`data.train_files=reasoning_gym:TASK`), so that nothing of it
is lost in a file. Needs `pip install "posttrain[reasoning-gym]"`.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from importlib import import_module
from typing import Any

from posttrain.rewards.scorers import register_scorer
from posttrain.rewards.types import RewardError


@register_scorer("reasoning_gym")
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float | str]:
    """Return the task's score, and the answer that was read as `pred` (empty if there was none)."""
    info = extra_info if isinstance(extra_info, dict) else {}
    if not {"task", "task_settings", "item"} <= info.keys():
        raise RewardError("a row of reasoning_gym has no task, task_settings and item; read it as reasoning_gym:TASK")
    from reasoning_gym.utils import extract_answer  # pyright: ignore

    dataset = _dataset(info["task"], info["task_settings"])
    answer = extract_answer(solution_str)
    value = dataset.score_answer(answer, _item(info["task"], info["task_settings"], int(info["item"])))
    return {"score": float(value), "pred": "" if answer is None else str(answer)}


@functools.lru_cache(64)
def _dataset(task: str, settings: str) -> Any:
    return make_dataset(task, json.loads(settings))


@functools.lru_cache(4096)
def _item(task: str, settings: str, number: int) -> Any:
    return _dataset(task, settings)[number]


def make_dataset(task: str, settings: dict[str, Any]) -> Any:
    """The package's data set. `level` raises every attribute of the task's curriculum so many times."""
    reasoning_gym: Any = import_module("reasoning_gym")  # the package, of which this file has the name

    settings = dict(settings)
    level = settings.pop("level", 0)
    if not level:
        return reasoning_gym.create_dataset(task, **settings)
    from reasoning_gym.factory import create_curriculum  # pyright: ignore

    curriculum = create_curriculum(task)
    for name in curriculum.attributes:
        for _ in range(level):
            curriculum.increment_attr_level(name)
    made = vars(curriculum.generate_configuration())
    return reasoning_gym.create_dataset(task, **{**made, **settings})


def make_items(task: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What `posttrain.data` reads from a process of this module: (question, answer) of each item, or an error with the
    name that is wrong and those that are known."""
    from reasoning_gym.factory import DATASETS  # pyright: ignore

    if task not in DATASETS:
        return {"error": f"there is no task {task}.", "name": task, "known": list(DATASETS)}
    known = ["level", *inspect.signature(DATASETS[task][1]).parameters]
    for key in settings:
        if key not in known:
            return {"error": f"the task {task} has no setting {key}.", "name": key, "known": known}
    dataset = make_dataset(task, settings)
    return {"items": [(item["question"], item["answer"]) for item in (dataset[n] for n in range(settings["size"]))]}


if __name__ == "__main__":
    print(json.dumps(make_items(sys.argv[1], json.loads(sys.argv[2]))))

"""How a desk is spoiled: the settings, rows, templates, rewards and files of the mistakes in mistakes.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.doctor.desk import Desk

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass
class Mistake:
    """`make` spoils the desk (and the machine, by monkeypatch); one finding must hold every one of `words`."""

    name: str
    words: list[str]
    make: Callable[[Desk, pytest.MonkeyPatch], object]


def setting(**pairs: object) -> Callable[[Desk, pytest.MonkeyPatch], object]:
    """Settings with `__` for a dot, and A, R, M for the three long sections."""
    long = {"A": A, "R": R, "M": M}

    def key(short: str) -> str:
        first, *rest = short.split("__")
        return ".".join([long.get(first, first), *rest])

    return lambda desk, patch: desk.settings.update({key(name): value for name, value in pairs.items()})


def rows(change: Callable[[int, dict], dict | None]) -> Callable[[Desk, pytest.MonkeyPatch], object]:
    """Training rows, each changed; None leaves one out."""

    def make(desk: Desk, patch: pytest.MonkeyPatch) -> None:
        changed = [change(i, dict(row)) for i, row in enumerate(desk.train)]
        desk.train = [row for row in changed if row is not None]

    return make


def reward(body: str) -> Callable[[Desk, pytest.MonkeyPatch], object]:
    source = "import random, time\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    text = source + "".join(f"    {line}\n" for line in body.splitlines())
    return lambda desk, patch: setattr(desk, "reward", text)


def template(text: str) -> Callable[[Desk, pytest.MonkeyPatch], object]:
    return lambda desk, patch: setattr(desk, "template", text)


def afterwards(change: Callable[[Desk], None]) -> Callable[[Desk, pytest.MonkeyPatch], object]:
    """A change to the files once they lie there."""
    return lambda desk, patch: desk.spoil.append(change)


def together(*makers: Callable) -> Callable[[Desk, pytest.MonkeyPatch], object]:
    return lambda desk, patch: [make(desk, patch) for make in makers]


def supervised(program: str, change: Callable[[int, dict], dict], **settings: object) -> Callable:
    def make(desk: Desk, patch: pytest.MonkeyPatch) -> None:
        desk.program, desk.reward = program, None
        desk.train = [change(i, dict(row)) for i, row in enumerate(desk.train)]
        desk.val = [change(i, dict(row)) for i, row in enumerate(desk.val)]
        setting(**settings)(desk, patch)

    return make


def answered(i: int, row: dict) -> dict:
    return {"prompt": row["prompt"], "response": row["ground_truth"]}


def paired(i: int, row: dict) -> dict:
    return {"prompt": row["prompt"], "chosen": row["ground_truth"], "rejected": str(int(row["ground_truth"]) + 1)}


def talked(i: int, row: dict) -> dict:
    asked = [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": "<think>hm</think>" + row["ground_truth"]},
    ]
    return {
        "messages": [
            *asked,
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "<think>hm</think>Yes."},
        ]
    }


def no_space(desk: Desk, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**5, 10**5))


def a_file_in_the_way(desk: Desk) -> None:
    (desk.folder / "outputs").write_text("not a folder")


def half_the_weights(desk: Desk) -> None:
    from safetensors.torch import load_file, save_file

    path = desk.model / "model.safetensors"
    weights = load_file(path)
    kept = {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}
    save_file(kept, path, metadata={"format": "pt"})


def another_run(desk: Desk) -> None:
    there = desk.folder / "outputs" / "posttrain" / "first"
    there.mkdir(parents=True)
    (there / "metrics.jsonl").write_text('{"step": 1}\n')
    (there / "config.yaml").write_text("{}\n")


def without_package(name: str) -> Callable[[Desk, pytest.MonkeyPatch], object]:
    def make(desk: Desk, patch: pytest.MonkeyPatch) -> None:
        import importlib.util

        real = importlib.util.find_spec
        patch.setattr(
            importlib.util, "find_spec", lambda wanted, *more: None if wanted == name else real(wanted, *more)
        )
        setting(trainer__logger=f"[console,{name}]")(desk, patch)

    return make

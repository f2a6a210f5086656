"""A process killed at any moment of a save leaves a run that continues from a good checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from posttrain.checkpoint import CheckpointManager, verify

pytestmark = pytest.mark.slow

STAGES = ["fsync", "rename", "replace", "mkdir", "rmdir", "unlink"]


def save(manager: CheckpointManager, step: int, value: float) -> None:
    tensors = {"actor": {"w": torch.full((64,), value)}, "critic": {"w": torch.full((8,), value)}}
    manager.save(step, tensors=tensors, state={"value": value}, rng={"r": torch.tensor([step])})


def value_of(manager: CheckpointManager, path: Path) -> float:
    into = {"w": torch.zeros(64)}
    manager.load_tensors(path, "actor", into)
    value = manager.load_state(path)["value"]
    assert into["w"].unique().tolist() == [value]
    return value


def killed_at(call: int, work) -> bool:
    """Run `work` in a forked child that is killed before its `call`-th call of STAGES; False if it came through."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(real):
            def stage(*args, **kwargs):
                nonlocal count
                count += 1
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return stage

        for name in STAGES:
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("case", ["next step", "same step again", "next step, old one pruned"])
def test_killed_at_every_stage_of_a_save_the_run_goes_on(tmp_path, case):
    keep = 1 if "pruned" in case else None
    step = 5 if "same" in case else 6
    seen = set()
    save(CheckpointManager(tmp_path / "saved"), 5, 1.0)
    for call in range(1, 200):
        folder = shutil.copytree(tmp_path / "saved", tmp_path / str(call))
        was_killed = killed_at(call, lambda folder=folder: save(CheckpointManager(folder, keep=keep), step, 2.0))

        notes: list[str] = []
        manager = CheckpointManager(folder, on_note=notes.append)
        newest = manager.newest()
        assert newest is not None and notes == [], f"killed at call {call}: {notes}"
        value = value_of(manager, newest)
        assert value == (2.0 if newest.name == "global_step_6" else value)
        seen.add(value)
        assert [n for n in os.listdir(folder) if n.startswith((".writing", ".replaced"))] == []
        assert all(verify(manager.path_of(each)) == [] for each in manager.steps())  # also of what was being removed
        save(manager, step, 3.0)  # and it can be saved again
        assert value_of(manager, folder / f"global_step_{step}") == 3.0
        if not was_killed:
            break
    assert not was_killed and call > 12 and seen == {1.0, 2.0}


def test_killed_in_the_middle_of_writing_tensors(tmp_path, forked):
    save(CheckpointManager(tmp_path), 1, 1.0)
    script = (
        "import os, signal, torch\n"
        "from posttrain.checkpoint import CheckpointManager\n"
        "def half(folder):\n"
        "    (folder / 'big.bin').write_bytes(b'x' * 1000)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "tensors = {'actor': {'w': torch.ones(9)}}\n"
        f"CheckpointManager({str(tmp_path)!r}).save(2, tensors=tensors, state={{}}, rng={{}}, extra=half)\n"
    )
    assert forked.run(script).returncode == -signal.SIGKILL
    assert len([n for n in os.listdir(tmp_path) if n.startswith(".writing")]) == 1
    manager = CheckpointManager(tmp_path)
    assert manager.newest() == tmp_path / "global_step_1"
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".writing")]


def test_a_living_writer_is_left_alone(tmp_path):
    seen = []

    def look(folder: Path) -> None:
        CheckpointManager(tmp_path)  # for example a second program that resumes from this run
        seen.append(folder.is_dir())

    CheckpointManager(tmp_path).save(1, tensors={}, state={}, rng={}, extra=look)
    assert seen == [True]

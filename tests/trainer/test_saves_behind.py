"""Checkpoints of a run are written while the next steps are computed, and none is lost or half by it."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest
from runs import metrics_of, run

from posttrain.checkpoint import parts, verify
from posttrain.errors import UserError
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
from posttrain.trainer.ppo.recorder import Recorder

SAVED = {"trainer__save_freq": 1, "trainer__total_training_steps": 3}


class Writers:
    """Threads that wrote tensors; each waits until `opened`, and fails with `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: dict[str, None] = {}
        self.opened, self.error = threading.Event(), None
        write = parts._HashingStream.write

        def watched(stream, data):
            self.threads[threading.current_thread().name] = None
            assert self.opened.wait(30), "training waited for the writer"
            if self.error is not None:
                raise self.error
            return write(stream, data)

        monkeypatch.setattr(parts._HashingStream, "write", watched)


@pytest.fixture
def writers(monkeypatch):
    made = Writers(monkeypatch)
    yield made
    made.opened.set()


def at_step(step: int, act, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `act` called when this step is about to be trained."""
    update = RayPPOTrainer._update

    def acting(self, batch, number):
        if number == step:
            act()
        return update(self, batch, number)

    monkeypatch.setattr(RayPPOTrainer, "_update", acting)


def checkpoint_files(path: Path) -> dict[str, bytes]:
    folder = path / "checkpoints"
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_goes_on_while_its_checkpoint_is_written_and_gives_the_same_files(
    tiny_model, sums, tmp_path, writers, monkeypatch
):
    finish = Recorder.finish_step

    def finished(self, step, *rest):
        finish(self, step, *rest)
        if step == 2:
            assert list(writers.threads) == ["checkpoint"] and not self.checkpoints.steps()
            writers.opened.set()  # after two steps: the first one's checkpoint was held until here

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "finish_step", finished)
        behind = run(tiny_model, sums, tmp_path / "behind", **SAVED)
    assert list(writers.threads) == ["checkpoint", "MainThread"], "of the last step nothing is copied"
    writers.threads.clear()
    waited = run(tiny_model, sums, tmp_path / "waited", trainer__async_save=False, **SAVED)
    assert list(writers.threads) == ["MainThread"]
    ours, theirs = checkpoint_files(behind.path), checkpoint_files(waited.path)
    assert ours.keys() == theirs.keys() and len(ours) == 16
    assert [name for name in ours if ours[name] != theirs[name]] == []
    lines = metrics_of(behind.path, times=True)
    assert ["timing_s/save_checkpoint" in line for line in lines] == [False, True, True]
    assert lines[1]["timing_s/step"] >= lines[1]["timing_s/save_checkpoint"] > 0
    assert lines[2]["perf/time_of_background_save"] > lines[1]["timing_s/save_checkpoint"]
    assert not any("perf/time_of_background_save" in line for line in metrics_of(waited.path, times=True))
    spans = [json.loads(line)["stages"] for line in (behind.path / "timeline.jsonl").read_text().splitlines()]
    # Cut at the end of each step; the last checkpoint is no work beside the loop.
    parts = [span for step in spans for span in step if span[3:] == ["disk"]]
    assert {part[0] for part in parts} == {"save_checkpoint"}
    saved = ["", parts[0][1], sum(part[2] for part in parts)]
    assert saved[2] >= lines[1]["timing_s/save_checkpoint"]
    updates = [span for span in spans[1] if span[0] == "update_actor"]
    assert saved[1] < updates[0][1] and saved[1] + saved[2] > sum(updates[0][1:3])  # it overlaps step 2
    assert {span[3] for step in spans for span in step if len(span) > 3} == {"disk", "rewards"}


def test_a_full_disk_behind_the_loop_ends_the_run_and_the_same_command_goes_on(
    tiny_model, sums, tmp_path, writers, monkeypatch
):
    writers.opened.set()

    def fill() -> None:
        writers.error = OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        at_step(2, fill, patch)  # the checkpoint of step 1 may be complete by then, that of step 2 cannot
        with pytest.raises(UserError, match=r"global_step_\d failed: No space left on device.*max_ckpt_to_keep"):
            run(tiny_model, sums, tmp_path, **SAVED)
    writers.error = None
    folder = tmp_path / "test" / "run" / "checkpoints"
    assert not [name for name in os.listdir(folder) if "step_2" in name or name.startswith(".")]
    assert run(tiny_model, sums, tmp_path, **SAVED).steps == 3 and verify(folder / "global_step_2") == []


def test_an_error_in_the_loop_loses_no_checkpoint_that_is_being_written(
    tiny_model, sums, tmp_path, writers, monkeypatch
):
    def fail() -> None:
        writers.opened.set()
        raise UserError("an error in the loop")

    at_step(2, fail, monkeypatch)
    with pytest.raises(UserError, match="an error in the loop"):
        run(tiny_model, sums, tmp_path, **SAVED)
    folder = tmp_path / "test" / "run" / "checkpoints"
    assert verify(folder / "global_step_1") == [] and not [n for n in os.listdir(folder) if n.startswith(".")]


def test_a_run_that_is_left_at_once_does_not_wait_for_its_checkpoint(tiny_model, sums, tmp_path, writers, monkeypatch):
    def leave() -> None:
        raise KeyboardInterrupt

    at_step(2, leave, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_model, sums, tmp_path, **SAVED)
    assert not writers.opened.is_set() and os.listdir(tmp_path / "test" / "run" / "checkpoints") == []


def test_what_an_update_waits_for_a_save_is_time_of_the_save(tiny_model, sums, tmp_path, monkeypatch):
    """Longer than the update, so that all of its time is: no clock decides this test."""
    waits = []
    monkeypatch.setattr(parts.HostCopies, "take_waited", lambda self: waits.pop() if waits else 0.0)
    at_step(2, lambda: waits.append(float("inf")), monkeypatch)
    path = run(tiny_model, sums, tmp_path, **SAVED).path
    lines = metrics_of(path, times=True)
    assert waits == [] and [line["timing_s/update_actor"] == 0.0 for line in lines] == [False, True, False]
    assert not any("waited_for_save" in name for line in lines for name in line)
    assert lines[1]["timing_s/save_checkpoint"] < lines[1]["timing_s/step"]

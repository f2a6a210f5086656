"""Samples are written while the next step is computed, and nothing is lost or silent by it."""

from __future__ import annotations

import json
import threading

import pytest
from runs import run

from posttrain.errors import UserError
from posttrain.tracking.safe_files import Background
from posttrain.trainer.ppo import recorder


def test_pieces_run_one_at_a_time_in_order_and_an_error_is_raised_once():
    behind, go, done = Background("test"), threading.Event(), []

    def fail():
        raise OSError("no space left")

    behind.run(lambda: (go.wait(30), done.append("first")))
    assert done == [] and threading.active_count() > 1
    threading.Timer(0.05, go.set).start()
    behind.run(lambda: done.append("second"))
    behind.wait()
    assert done == ["first", "second"]
    behind.run(fail)
    with pytest.raises(OSError, match="no space left"):
        behind.run(lambda: done.append("never"))
    behind.wait()
    assert done == ["first", "second"], "what follows an error is not begun"


def test_a_step_does_not_wait_for_its_samples(tiny_model, sums, tmp_path, monkeypatch):
    events, write = [], recorder.write_step
    finish = recorder.Recorder.finish_step
    logged = threading.Event()

    def slow(folder, step, table):
        assert logged.wait(30), "the step waited for its samples"
        events.append(f"wrote {step}")
        return write(folder, step, table)

    def finished(self, step, *rest):
        logged.clear()
        finish(self, step, *rest)
        events.append(f"finished {step}")
        logged.set()

    monkeypatch.setattr(recorder, "write_step", slow)
    monkeypatch.setattr(recorder.Recorder, "finish_step", finished)
    result = run(tiny_model, sums, tmp_path)
    assert [event for event in events if event.endswith("1")] == ["finished 1", "wrote 1"]
    assert sorted(path.name for path in (result.path / "samples").iterdir()) == ["step_1.parquet", "step_2.parquet"]


def test_what_is_saved_has_the_samples_of_its_step(tiny_model, sums, tmp_path, monkeypatch):
    from posttrain.checkpoint.manager import CheckpointManager

    there, save, write = [], CheckpointManager.save, recorder.write_step

    def slow(folder, step, table):
        threading.Event().wait(0.3)
        return write(folder, step, table)

    def watched(self, step, **rest):
        there.append((self.folder.parent / "samples" / f"step_{step}.parquet").exists())
        return save(self, step, **rest)

    monkeypatch.setattr(recorder, "write_step", slow)
    monkeypatch.setattr(CheckpointManager, "save", watched)
    run(tiny_model, sums, tmp_path, trainer__save_freq=1)
    assert there == [True, True]


def test_samples_that_cannot_be_written_end_the_run(tiny_model, sums, tmp_path, monkeypatch):
    def full(folder, step, table):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "write_step", full)
    with pytest.raises(UserError, match="No space left"):
        run(tiny_model, sums, tmp_path, trainer__total_training_steps=1)
    (status,) = tmp_path.rglob("status.json")
    assert json.loads(status.read_text())["status"] == "failed"

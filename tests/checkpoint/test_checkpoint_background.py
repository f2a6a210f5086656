"""Saves in the background: the copy is what is written, nothing is published early, and no error is lost."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from posttrain.checkpoint import CheckpointError, CheckpointManager, parts, verify
from posttrain.checkpoint.parts import HostCopies, RolePart


class Engine:
    """Two tensors that training changes in place."""

    def __init__(self, value: float) -> None:
        self.tensors = {"weight": torch.full((3, 400), value), "view": torch.full((100,), value)[10:20]}
        self.copies = HostCopies()

    def train(self, value: float) -> None:
        for tensor in self.tensors.values():
            tensor.fill_(value)

    def save(self, folder: Path) -> None:
        RolePart(folder, self.tensors).save()

    def begin_save(self, folder: Path) -> str | None:
        return RolePart(folder, self.tensors, copies=self.copies).begin()


class Gate:
    """Holds every writer before its first byte until it is opened; then writers may be made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached, self.error = threading.Event(), threading.Event(), None
        write = parts._HashingStream.write

        def held(stream, data):
            self.reached.set()
            assert self.opened.wait(30)
            if self.error is not None:
                raise self.error
            return write(stream, data)

        monkeypatch.setattr(parts._HashingStream, "write", held)


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def begin(manager: CheckpointManager, step: int, engine: Engine, **more) -> Path:
    tensors = {"actor": engine.begin_save}
    return manager.save(step, tensors=tensors, state={}, rng={}, background=True, **more)


def saved_before(folder: Path, value: float = 1.0) -> CheckpointManager:
    manager = CheckpointManager(folder, keep=1)
    manager.save(1, tensors={"actor": Engine(value).save}, state={}, rng={})
    return manager


def value_of(manager: CheckpointManager, path: Path) -> set[float]:
    into = Engine(-1.0).tensors
    manager.load_tensors(path, "actor", into)
    return set(torch.cat([tensor.flatten() for tensor in into.values()]).tolist())


def names_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("latest"))


def test_what_is_written_is_the_copy_and_it_appears_when_it_is_complete(tmp_path, monkeypatch):
    engine, said = Engine(2.0), []
    blocking = CheckpointManager(tmp_path / "blocking")
    blocking.save(2, tensors={"actor": engine.save}, state={}, rng={})
    manager = saved_before(tmp_path / "background")
    gate = Gate(monkeypatch)
    path = begin(manager, 2, engine, on_saved=said.append)
    assert gate.reached.wait(30)
    engine.train(3.0)  # while the writer is held
    manager.raise_failure()
    assert manager.steps() == [1] and not said, "the old one stays until the new one is complete"
    assert CheckpointManager(manager.folder).newest() == manager.path_of(1), "a second program leaves the writer alone"
    gate.opened.set()
    manager.wait()
    assert manager.steps() == [2] and said == [path] and verify(path) == []
    assert value_of(manager, path) == {2.0}
    for file in (file for file in blocking.path_of(2).rglob("*") if file.is_file()):
        assert (path / file.relative_to(blocking.path_of(2))).read_bytes() == file.read_bytes(), file.name


def test_hashes_are_taken_while_writing(tmp_path, monkeypatch):
    """A checkpoint's tensors are not read again: their files could be unreadable."""
    read = []
    monkeypatch.setattr("posttrain.checkpoint.folders.sha256_of", lambda path: read.append(path.name) or "0" * 64)
    manager = CheckpointManager(tmp_path)
    begin(manager, 1, Engine(1.0))
    manager.wait()
    assert sorted(read) == ["rng.safetensors", "state.json"]


def test_the_next_save_waits_for_the_last(tmp_path, gate):
    manager, engine = CheckpointManager(tmp_path), Engine(1.0)
    begin(manager, 1, engine)
    second = threading.Thread(target=begin, args=(manager, 2, engine))
    second.start()
    assert gate.reached.wait(30)
    assert not [name for name in os.listdir(tmp_path) if "global_step_2" in name]
    gate.opened.set()
    second.join()
    manager.wait()
    assert manager.steps() == [1, 2]


@pytest.mark.parametrize("door", ["wait", "raise_failure", "save"])
def test_a_full_disk_is_raised_once_and_the_old_checkpoint_stays(tmp_path, gate, door):
    gate.opened.set()
    manager = saved_before(tmp_path)
    gate.error = OSError(errno.ENOSPC, "No space left on device")
    begin(manager, 2, Engine(2.0))
    while manager._writing.is_busy:
        pass
    gate.error = None
    with pytest.raises(CheckpointError, match=r"global_step_2 failed: No space left.*max_ckpt_to_keep"):
        manager.save(3, tensors={}, state={}, rng={}) if door == "save" else getattr(manager, door)()
    assert names_in(tmp_path) == ["global_step_1"] and value_of(manager, tmp_path / "global_step_1") == {1.0}
    assert begin(manager, 2, Engine(2.0)) and manager.wait() is None and manager.steps() == [2]


def test_a_save_that_is_abandoned_leaves_nothing(tmp_path, gate):
    manager = saved_before(tmp_path) if gate.opened.set() is None else None
    gate.opened.clear()
    assert manager is not None and not manager.abandon()
    begin(manager, 2, Engine(2.0))
    assert gate.reached.wait(30) and manager.abandon()
    gate.opened.set()
    manager.wait()
    assert names_in(tmp_path) == ["global_step_1"]


def test_without_memory_for_a_copy_the_loop_waits_and_the_user_reads_why(tmp_path, monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr(parts, "free_memory", lambda: 1000)
    manager = CheckpointManager(tmp_path, on_note=notes.append)
    for step in (1, 2):
        assert begin(manager, step, Engine(float(step))).is_dir(), "it is complete when the call returns"
    assert len(notes) == 1 and "written while training waits: a copy in host memory takes" in notes[0]
    assert value_of(manager, tmp_path / "global_step_2") == {2.0}


def test_a_writer_that_stops_growing_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "STALLED_S", 0.0)
    manager = saved_before(tmp_path)
    manager.save(2, tensors={"actor": lambda folder: folder.mkdir()}, state={}, rng={}, background=True)
    with pytest.raises(CheckpointError, match=r"nothing was written into .*actor for 0 s"):
        manager.wait()
    assert names_in(tmp_path) == ["global_step_1"]

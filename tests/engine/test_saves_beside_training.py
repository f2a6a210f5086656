"""A save's copy is taken while training goes on: what changes the state, or gives its memory back, waits for it.

The copy is held until something waits for it (`HeldCopies`), so that a missing wait gives a wrong checkpoint.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_tools import HeldCopies, objective, ragged_batch

from posttrain.checkpoint import CheckpointError, CheckpointManager, parts, verify
from posttrain.engine.torch_engine import TorchEngine

State = dict[str, torch.Tensor]


def train(engine: TorchEngine, seed: int) -> None:
    loss, dtype = objective(), engine.optimizer.masters[0].dtype  # pyright: ignore
    engine.update(loss.prepare(ragged_batch(8, dtype, seed)), loss)


def state_of(engine: TorchEngine) -> State:
    return {name: tensor.clone() for name, tensor in engine.state.tensors().items()}


def begin(manager: CheckpointManager, step: int, engine: TorchEngine) -> Path:
    return manager.save(step, tensors={"actor": engine.begin_save}, state={}, rng={}, background=True)


def saved(manager: CheckpointManager, path: Path, like: State) -> State:
    manager.wait()
    assert verify(path) == []
    into = {name: torch.full_like(tensor, -1) for name, tensor in like.items()}
    manager.load_tensors(path, "actor", into)
    return into


def assert_same(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def changed(one: State, other: State) -> set[str]:
    return {name.split(".")[0] for name in one if not torch.equal(one[name], other[name])}


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["masters", "own masters"])
def engine(make_engine, request) -> TorchEngine:
    made = make_engine(request.param)
    train(made, 0)
    return made


def test_the_optimizer_step_behind_a_save_waits_for_its_copy(engine, tmp_path):
    manager, before = CheckpointManager(tmp_path), state_of(engine)
    with HeldCopies(engine.state.copies):
        path = begin(manager, 1, engine)
        assert engine.take_save_wait() == 0.0
        train(engine, 1)
        assert engine.take_save_wait() > 0.0 and engine.take_save_wait() == 0.0
    assert changed(before, state_of(engine)) == {"model", "optim"}
    assert_same(saved(manager, path, before), before)


def test_passes_without_a_step_do_not_wait(engine, tmp_path):
    manager, loss = CheckpointManager(tmp_path), objective()
    batch = loss.prepare(ragged_batch(8, torch.float32, 1))
    with HeldCopies(engine.state.copies) as held:
        begin(manager, 1, engine)
        engine.trial_pass(batch, loss)
        engine.log_probs(batch)
        dict(engine.export_weights())
        engine.update(batch, lambda micro, out: out["log_probs"].sum() * float("inf"))  # a step that is skipped
        assert [gate.is_set() for gate in held.gates] == [False] and not engine.state.copies.is_idle.is_set()
    manager.wait()


def test_loading_waits_for_the_copy(engine, tmp_path):
    manager, before = CheckpointManager(tmp_path), state_of(engine)
    train(engine, 1)
    manager.save(2, tensors={"actor": engine.save}, state={}, rng={})
    engine.load(_folder_of(before, tmp_path / "other"))
    with HeldCopies(engine.state.copies):
        path = begin(manager, 3, engine)
        engine.load(manager.role_folder(manager.path_of(2), "actor"))
    assert changed(before, state_of(engine)) == {"model", "optim"}
    assert_same(saved(manager, path, before), before)


def _folder_of(state: State, folder: Path) -> Path:
    path = CheckpointManager(folder).save(1, tensors={"actor": state}, state={}, rng={})
    return path / "actor"


@pytest.mark.parametrize("what", ["param_offload", "optimizer_offload"])
def test_offloading_waits_for_the_copy(engine, tmp_path, monkeypatch, what):
    """On a device the memory that is given back gets other content; here moving gives it that."""
    manager, before, state = CheckpointManager(tmp_path), state_of(engine), engine.state

    def spoil(*_: object) -> None:
        for tensor in state.tensors().values():
            tensor.fill_(7)

    monkeypatch.setattr(state, "settings", replace(state.settings, **{what: True}))
    monkeypatch.setattr(state.movable, "to", spoil)
    monkeypatch.setattr(state.optimizer, "move", spoil)
    with HeldCopies(state.copies):
        path = begin(manager, 1, engine)
        engine.offload()
    assert_same(saved(manager, path, before), before)


def test_offloading_nothing_does_not_wait(engine, tmp_path):
    manager = CheckpointManager(tmp_path)
    with HeldCopies(engine.state.copies) as held:
        begin(manager, 1, engine)
        with engine.on_device(optimizer=True):
            pass
        assert not held.gates[0].is_set()
    manager.wait()


def test_moving_the_state_back_leaves_what_is_being_copied(engine, tmp_path):
    """`onload` gives the tensors other memory and does not wait."""
    manager, before, state = CheckpointManager(tmp_path), state_of(engine), engine.state
    with HeldCopies(state.copies) as held:
        path = begin(manager, 1, engine)
        for weight in engine.module.parameters():  # as `module.to` does on a device
            weight.data = weight.data.clone().fill_(7)
        assert not held.gates[0].is_set()
    assert_same(saved(manager, path, before), before)


def test_the_next_save_waits_for_the_copy_of_one_that_was_given_up(engine, tmp_path):
    """Both copy into the same memory on a device, and the end of one must not be taken for that of the other."""
    manager = CheckpointManager(tmp_path)
    with HeldCopies(engine.state.copies) as held:
        begin(manager, 1, engine)
        assert manager.abandon()
        (writer,) = [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
        train_without_waiting(engine)
        before = state_of(engine)
        path = begin(manager, 2, engine)
        held.gates[0].set()
        writer.join()
        train(engine, 2)
    assert_same(saved(manager, path, before), before)


def train_without_waiting(engine: TorchEngine) -> None:
    with torch.no_grad():
        for master in engine.optimizer.masters:  # pyright: ignore
            master.add_(1)


@pytest.mark.parametrize("how", ["the copy fails", "no thread starts"])
def test_a_copy_that_fails_is_reported_and_holds_nothing_up(engine, tmp_path, monkeypatch, how):
    manager, before = CheckpointManager(tmp_path), state_of(engine)
    manager.save(1, tensors={"actor": engine.save}, state={}, rng={})

    def fail(*_: object) -> None:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(*((parts, "_copy", fail) if how == "the copy fails" else (threading.Thread, "start", fail)))
        with pytest.raises(CheckpointError, match=r"global_step_2 failed: .*can't allocate memory"):
            begin(manager, 2, engine)
            manager.wait()
    train(engine, 1)
    assert engine.take_save_wait() >= 0.0 and manager.steps() == [1]
    assert_same(saved(manager, manager.path_of(1), before), before)
    after = state_of(engine)
    assert_same(saved(manager, begin(manager, 2, engine), after), after)


def test_a_copy_ends_early_when_its_save_is_given_up(tmp_path):
    copies, large = parts.HostCopies(), torch.ones(2**18)
    copying = copies.begin({0: large, 1: large})
    with pytest.raises(parts.GivenUp):
        copying.run(tmp_path / "removed")
    copies.wait()


def test_ctrl_c_while_a_step_waits_leaves_the_state_as_it_was(engine, tmp_path, monkeypatch):
    manager, before = CheckpointManager(tmp_path), state_of(engine)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.optimizer, "before_change", interrupted)
        path = begin(manager, 1, engine)
        with pytest.raises(KeyboardInterrupt):
            train(engine, 1)
    assert_same(saved(manager, path, before), before)
    assert_same(state_of(engine), before)

"""Roles of a user's own trainer: which methods can be called, how, which declarations are rejected, and their state in
checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from runs import metrics_of, parity_reward, settings

from posttrain.checkpoint.folders import CheckpointError
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.config import load_config
from posttrain.config.root import PPOConfig
from posttrain.controller.group import all_of, register, to_all
from posttrain.controller.pool import LocalWorkers, RolePool
from posttrain.errors import UserError
from posttrain.protocol import DataProto
from posttrain.trainer.ppo.own_roles import OwnRole, pools_of_roles
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
from posttrain.trainer.ppo.runner import opened_training


class Base:
    @register(to_all, all_of)
    def name(self) -> str:
        return "base"

    def doubled(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"twice": self._twice(data.batch["x"])})

    def _twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Mine(Base):
    def __init__(self, config: Any) -> None:
        self.seed = config.trainer.seed

    def name(self) -> str:  # as the one that it overrides: of all, not of rows
        return "mine"

    def doubled(self, data: DataProto) -> DataProto:
        return super().doubled(data).union(DataProto.from_dict({"seed": torch.full((len(data),), self.seed)}))


def rows() -> DataProto:
    tensors = {"x": torch.arange(4), "attention_mask": torch.ones(4, 3)}
    return DataProto.from_dict(tensors, {"uid": ["a", "a", "b", "b"]})


def test_public_methods_of_a_plain_class_take_rows_and_marked_ones_stay_as_they_are():
    group: Any = LocalWorkers().create("judge", OwnRole(Mine, n_workers=0).marked(), PPOConfig())
    found = group.doubled(rows())
    assert found.batch["twice"].tolist() == [0, 2, 4, 6] and found.batch["seed"].tolist() == [1] * 4
    assert group.name() == ["mine"]
    with pytest.raises(AttributeError):
        group._twice(rows())
    future = group.doubled.later(rows())
    assert group.wait(future).batch["twice"].tolist() == [0, 2, 4, 6]


def test_several_workers_get_whole_groups():
    group: Any = SimpleNamespace(world_size=2)
    calls = OwnRole(Mine).marked().doubled.spread(group, rows())  # pyright: ignore
    assert sorted(map(list, calls.rows)) == [[0, 1], [2, 3]]


def test_each_role_asks_for_the_processes_that_it_names():
    roles = {"judge": OwnRole(Mine, n_workers=3), "here": OwnRole(Mine, n_workers=0), "one": OwnRole(Mine)}
    assert pools_of_roles(roles, "Loop") == [
        RolePool("judge", 3, "Loop.own_roles['judge'].n_workers"),
        RolePool("one", 1, "Loop.own_roles['one'].n_workers"),
    ]


@pytest.mark.parametrize("name", ["actor", "rollout", "critic", "reference", "reward_model", "rank", "two words", ""])
def test_a_name_that_a_role_has_already_or_that_is_no_word_is_rejected(name):
    with pytest.raises(UserError, match=r"Loop\.own_roles: .* is no name for a role of your own"):
        pools_of_roles({name: OwnRole(Mine)}, "Loop")


NOT_A_CLASS: Any = Mine(PPOConfig())
HALF: Any = 1.5


@pytest.mark.parametrize("role", [OwnRole(Mine, -1), OwnRole(Mine, HALF), OwnRole(NOT_A_CLASS)])
def test_a_role_without_a_class_or_a_number_is_rejected(role):
    with pytest.raises(UserError, match=r"Loop\.own_roles\['judge'\] is OwnRole\(.*give a class and a whole number"):
        pools_of_roles({"judge": role}, "Loop")


def test_a_class_without_its_number_of_workers_is_rejected():
    roles: Any = {"judge": Mine}
    with pytest.raises(UserError, match=r"Loop\.own_roles\['judge'\] is .*Mine.*: give OwnRole\(CLASS"):
        pools_of_roles(roles, "Loop")


class Odd:
    def mean(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"mean": data.batch["x"].double().mean()[None]})

    def twice(self, data: DataProto) -> DataProto:
        return DataProto.concat([data, data])

    def nothing(self, data: DataProto) -> None:
        pass


@pytest.mark.parametrize("workers, given", [(1, 4), (2, 2)])
@pytest.mark.parametrize("method, what", [("mean", "1 rows"), ("twice", "{} rows"), ("nothing", "a NoneType")])
def test_a_method_that_gives_no_row_for_each_is_rejected(method, what, workers, given):
    mark: Any = getattr(OwnRole(Odd).marked(), method)
    calls = mark.spread(SimpleNamespace(world_size=workers), rows())
    results = [mark(Odd(), *arguments) for arguments in calls.arguments]
    with pytest.raises(
        UserError, match=rf"Odd\.{method} of an own role gave {what.format(2 * given)} for {given} rows"
    ):
        mark.join(results, calls)


# -- state in checkpoints ---------------------------------------------------------------------------------------------


class Forgetful:
    """Rewards of a step depend on those of all steps before."""

    def __init__(self, config: Any) -> None:
        self.seen = torch.zeros(())

    def bonus(self, data: DataProto) -> DataProto:
        scores = data.batch["token_level_scores"]
        self.seen = 0.5 * self.seen + scores.sum()
        return DataProto.from_dict({"bonus": scores * self.seen})


class Remembering(Forgetful):
    def save(self, folder: Path) -> None:
        torch.save(self.seen, folder / "seen.pt")

    def load(self, folder: Path) -> None:
        self.seen = torch.load(folder / "seen.pt")


class Rewarding(RayPPOTrainer):
    own_roles: ClassVar[dict[str, OwnRole]] = {"judge": OwnRole(Remembering, n_workers=0)}

    def _score(self, batch: DataProto) -> DataProto:
        batch = super()._score(batch)
        batch.union(self.own_wg["judge"].bonus(batch))
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] + batch.batch["bonus"]
        return batch


class WithoutState(Rewarding):
    own_roles: ClassVar[dict[str, OwnRole]] = {"judge": OwnRole(Forgetful, n_workers=0)}


def ran(given: dict[str, Any], trainer: type[RayPPOTrainer]) -> Path:
    with opened_training(load_config(given), reward=parity_reward, trainer_class=trainer) as opened:
        return opened.fit().path


def weights(path: Path) -> dict[str, torch.Tensor]:
    manager = CheckpointManager(path / "checkpoints")
    newest = manager.path_of(4)
    into = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in manager.describe(newest, "actor").items()}
    manager.load_tensors(newest, "actor", into)
    return into


@pytest.fixture(scope="module")
def four_steps(tiny_model, sums, tmp_path_factory):
    """`four_steps(name, trainer, begun)`: a run in the folder `name`; `begun` is one whose first two steps it continues
    from."""
    folder, four = tmp_path_factory.mktemp("own"), {"trainer__total_training_steps": 4, "trainer__save_freq": 2}

    def make(name: str, trainer: type[RayPPOTrainer], begun: Path | None = None) -> Path:
        if begun is not None:
            copied = shutil.copytree(begun, folder / name / "test" / "run")
            shutil.rmtree(copied / "checkpoints" / "global_step_4")
        return ran(settings(tiny_model, sums, folder / name, **four), trainer)

    return make


@pytest.fixture(scope="module")
def straight(four_steps):
    return four_steps("straight", Rewarding)


def test_a_resumed_run_has_the_state_of_a_role_and_no_bit_changes(four_steps, straight):
    resumed = four_steps("resumed", Rewarding, straight)
    assert metrics_of(resumed) == metrics_of(straight)
    ours, theirs = weights(resumed), weights(straight)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    state = Path("checkpoints", "global_step_4", "own_roles", "judge", "worker_0", "seen.pt")
    assert torch.load(resumed / state) == torch.load(straight / state) != 0


def test_a_role_without_these_methods_begins_anew_and_has_nothing_in_a_checkpoint(four_steps):
    begun = four_steps("forgets", WithoutState)
    assert metrics_of(four_steps("forgot", WithoutState, begun)) != metrics_of(begun)
    saved = begun / "checkpoints" / "global_step_2"
    assert not (saved / "own_roles").exists() and "own_roles" not in CheckpointManager(saved.parent).load_state(saved)


def test_a_checkpoint_without_the_state_that_a_role_wants_is_rejected(four_steps):
    begun = four_steps("began", WithoutState)
    with pytest.raises(
        CheckpointError, match=r"no state of the role 'judge', which Rewarding\.own_roles\['judge'\] needs"
    ):
        four_steps("wants", Rewarding, begun)


def test_a_checkpoint_of_another_number_of_workers_is_rejected(straight, four_steps, monkeypatch):
    monkeypatch.setattr("posttrain.trainer.ppo.own_roles.RoleStates.sizes", lambda self: {"judge": 2})
    begun = four_steps("two", Rewarding)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"state of 2 worker\(s\) of the role 'judge', but this run has 1"):
        four_steps("one", Rewarding, begun)


class OnlyLoads(Forgetful):
    def load(self, folder: Path) -> None: ...


def test_a_class_that_can_only_load_is_rejected():
    with pytest.raises(UserError, match=r"OnlyLoads has load\(folder\) but no save\(folder\)"):
        pools_of_roles({"judge": OwnRole(OnlyLoads)}, "Loop")

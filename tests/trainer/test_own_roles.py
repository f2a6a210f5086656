"""Roles of a user's own trainer: which methods can be called, how, and which declarations are rejected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.config.root import PPOConfig
from posttrain.controller.group import all_of, register, to_all
from posttrain.controller.pool import LocalWorkers, RolePool
from posttrain.errors import UserError
from posttrain.protocol import DataProto
from posttrain.trainer.ppo.own_roles import OwnRole, pools_of_roles


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

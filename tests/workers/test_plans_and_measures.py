"""Updates are planned in one place: which rows make a step, who computes them, and how what they measured is joined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from posttrain.controller.group import Calls
from posttrain.protocol import DataProto
from posttrain.workers.measures import ROW, Measures, TokenStats, join_token_stats, reduce_over_ranks, reduce_over_steps
from posttrain.workers.update_plan import Schedule, in_row_order, mini_batches, reporting_ranks, split_rows


def batch_of(*groups: int) -> DataProto:
    """Groups of so many rows; a row's tensor is its number."""
    uids = [str(number) for number, size in enumerate(groups) for _ in range(size)]
    return DataProto.from_dict({"row": torch.arange(len(uids))}, {"uid": uids}, {"step": 1})


def rows_of(batch: DataProto, **schedule) -> list[list[int]]:
    minis = mini_batches(batch, Schedule(**{"prompts": 2, "epochs": 1, "shuffle": False, "seed": 1, **schedule}))
    return [mini.batch["row"].tolist() for mini in minis]


def test_a_mini_batch_holds_whole_groups_however_many_rows_they_have():
    assert rows_of(batch_of(1, 3, 2, 4, 1)) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
    assert rows_of(batch_of(2, 2), prompts=1, epochs=2) == [[0, 1], [2, 3]] * 2


def test_shuffled_rows_are_all_there_in_every_pass_in_as_many_steps():
    once, again = rows_of(batch_of(2, 2, 2, 2), shuffle=True, epochs=2), rows_of(batch_of(2, 2, 2, 2), shuffle=True)
    assert once[:2] == again and [len(rows) for rows in once] == [4] * 4
    assert sorted(once[0] + once[1]) == sorted(once[2] + once[3]) == list(range(8)) and once[:2] != once[2:]


def test_every_step_is_shuffled_in_an_order_of_its_own():
    orders = []
    for step in (1, 2, 3):
        batch = batch_of(*[2] * 16)
        batch.meta_info["step"] = step
        orders.append(rows_of(batch, shuffle=True, epochs=2))
    assert orders[0] != orders[1] != orders[2] != orders[0]
    again = batch_of(*[2] * 16)
    assert rows_of(again, shuffle=True, epochs=2) == orders[0] != rows_of(again, shuffle=True, epochs=2, seed=2)


def test_ranks_get_whole_groups_and_even_tokens():
    uids, tokens = list("aabbccddee"), [100, 100, 1, 1, 50, 50, 60, 40, 2, 2]
    rows = split_rows(uids, tokens, 2)
    assert rows == [[0, 1, 8, 9], [2, 3, 4, 5, 6, 7]]  # 200 + 4 against 100 + 100 + 2
    assert split_rows(["a"], [5], 3) == [[0], [], []]


@pytest.mark.parametrize(
    ("pipeline", "sequence", "ranks"), [(1, 1, [0, 1, 2, 3]), (1, 2, [0, 2]), (2, 1, [2, 3]), (2, 2, [2])]
)
def test_of_ranks_that_compute_the_same_rows_one_reports(pipeline, sequence, ranks):
    facts = SimpleNamespace(pipeline=pipeline, sequence_parallel=sequence)
    assert reporting_ranks(cast("Any", SimpleNamespace(world_size=4, once=lambda name: facts))) == ranks


def test_what_ranks_give_comes_back_in_the_order_of_the_callers_rows():
    rows = [[1, 3], [], [0, 2]]
    parts = [DataProto.from_dict({"x": torch.tensor(own)}) if own else DataProto() for own in rows]
    assert in_row_order(parts, Calls([], rows)).batch["x"].tolist() == [0, 1, 2, 3]


def test_metrics_are_reduced_as_they_say():
    def step(rank: int, number: int) -> Measures:
        made = Measures()
        for share in (0.25, 0.5):  # two passes
            made.add("loss", share * (rank + 1))
            made.add("gap", share, steps="first")
        made.most("worst", 10.0 * rank + number)
        made.tell("norm", 3.0 + number)
        made.tell("skipped", 1.0, steps="sum")
        return made

    steps = [reduce_over_ranks([step(0, number), step(1, number)]) for number in range(2)]
    assert reduce_over_steps(steps) == pytest.approx(
        {"loss": 2.25, "gap": 1.5, "worst": 10.5, "norm": 3.5, "skipped": 2.0}
    )


def test_skipped_updates_and_steps_of_a_batch_are_counted_and_other_numbers_averaged():
    engine = cast("Any", SimpleNamespace(take_save_wait=lambda: 0.0))

    def step(norm: float, skipped: float) -> Measures:
        made = Measures()
        made.tell_update("actor", engine, {"grad_norm": norm, "lr": 0.5, "skipped": skipped})
        return made

    assert reduce_over_steps([step(1.0, 1.0), step(2.0, 0.0), step(6.0, 1.0)]) == {
        "actor/grad_norm": 3.0, "actor/lr": 0.5, "actor/bad_steps": 2.0, "actor/optimizer_steps": 3.0,
    }  # fmt: skip


def test_a_step_waits_for_a_save_as_long_as_its_slowest_rank_and_a_batch_as_long_as_all_its_steps():
    def step(waited: float) -> Measures:
        made, engine = Measures(), cast("Any", SimpleNamespace(take_save_wait=lambda: waited))
        made.tell_update("critic", engine, {"grad_norm": 1.0, "lr": 0.5, "skipped": 0.0})
        return made

    steps = [reduce_over_ranks([step(2.0), step(3.0)]), reduce_over_ranks([step(0.0), step(0.5)]), step(0.0)]
    assert reduce_over_steps(steps)["critic/waited_for_save"] == 3.5


def test_a_metric_of_some_ranks_or_steps_only_is_that_of_those():
    one, other = Measures(), Measures()
    other.add("rare", 0.5)
    assert reduce_over_steps([reduce_over_ranks([one, other]), Measures()]) == {"rare": 0.5}
    assert np.isfinite(list(reduce_over_steps([other]).values())).all()


def test_tokens_are_kept_as_of_the_first_time_they_were_trained_on_from_all_ranks_in_row_order():
    first, second = TokenStats(), TokenStats()
    for seen, rows, value in ((first, [2, 0], 1.0), (second, [1], 2.0), (first, [0, 2], 9.0), (second, [1], 9.0)):
        numbers = torch.full((len(rows), 3), value)
        seen.add({ROW: torch.tensor(rows)}, {"log_probs": -numbers, "entropy": numbers})
    first.add({}, {})  # rows that nobody will look at
    found = join_token_stats([first.take(), second.take()], Calls([]))
    assert found["entropy"][:, 0].tolist() == [1.0, 2.0, 1.0] and torch.equal(found["new_log_probs"], -found["entropy"])
    assert join_token_stats([first.take(), second.take()], Calls([])) == {}

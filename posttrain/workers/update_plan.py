"""Updates as the driver plans them: which rows make an optimizer step, with weights from the counts of all of them.

Workers execute a plan. So a gradient depends neither on the number of ranks nor on who computes which rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.batch.samples import rows_of_samples
from posttrain.controller.group import Calls, WorkerGroup
from posttrain.protocol import DataProto
from posttrain.workers.measures import Measures, reduce_over_ranks, reduce_over_steps
from posttrain.workers.row_dispatch import parts_by_rank, reporting_ranks

Prepare = Callable[[DataProto], DataProto]
UNUSED = ("prompts", "token_level_scores", "token_level_rewards", "reward_baselines")  # in a step


@dataclass(frozen=True)
class Schedule:
    """How a batch becomes optimizer steps: `prompts` per mini-batch, passes over the batch, and their order."""

    prompts: int
    epochs: int
    shuffle: bool
    seed: int


@dataclass
class MiniBatch:
    """One rank's part of an optimizer step. `passes` are its forward passes; None lets the engine cut them."""

    data: DataProto
    passes: list[Any] | None = None


@dataclass
class UpdatePlan:
    """The optimizer steps of one rank on a batch, made one by one as they are asked for; between processes a list."""

    rows: int  # rows that are computed with, those of every pass over the batch counted
    make: Callable[[], Iterator[MiniBatch]] | None = None
    steps: list[MiniBatch] = field(default_factory=list)

    def __iter__(self) -> Iterator[MiniBatch]:
        return iter(self.steps) if self.make is None else self.make()


def mini_batches(batch: DataProto, schedule: Schedule) -> Iterator[DataProto]:
    """The rows of each optimizer step: whole groups in order, or samples shuffled by the seed, the step and the pass.
    The rows of a sample are always together."""
    for epoch in range(schedule.epochs):
        if schedule.shuffle:
            samples = shuffle_samples(batch, schedule.seed, epoch)
            groups = len(dict.fromkeys(_uids(batch)))
            size = math.ceil(len(samples) * schedule.prompts / groups)
            for start in range(0, len(samples), size):
                yield batch[np.concatenate(samples[start : start + size])]
        else:
            for start, end in _spans_of_groups(_uids(batch), schedule.prompts):
                yield batch[start:end]


def _uids(batch: DataProto) -> list[Any]:
    return list(batch.non_tensor_batch["uid"])


def _spans_of_groups(uids: list[Any], groups: int) -> list[tuple[int, int]]:
    # (first row, row behind the last) of every `groups` groups; the rows of a group stand together.
    starts = [row for row, uid in enumerate(uids) if row == 0 or uid != uids[row - 1]][::groups]
    return list(zip(starts, [*starts[1:], len(uids)], strict=True))


def shuffle_samples(data: DataProto, seed: int, epoch: int) -> list[np.ndarray]:
    """The rows of each sample, samples in an order that depends on the seed, the step and the pass."""
    # From the seed, the step and the pass alone, not from a generator's state: a resumed run shuffles the same way.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + int(data.meta_info["step"]) * 101 + epoch)
    samples = rows_of_samples(data)
    return [samples[number] for number in torch.randperm(len(samples), generator=generator).tolist()]


def one_rank_plan(batch: DataProto, schedule: Schedule, prepare: Prepare) -> UpdatePlan:
    """The plan of a rank that computes everything."""
    rows = len(batch) * schedule.epochs
    return UpdatePlan(rows, lambda: (MiniBatch(prepare(mini)) for mini in mini_batches(batch, schedule)))


def plan_updates(group: WorkerGroup, batch: DataProto, schedule: Schedule, prepare: Prepare) -> Calls:
    """The optimizer steps of a batch for every rank of a group: all of them, with parts that balance their tokens."""
    if group.world_size == 1:
        return Calls([(one_rank_plan(batch, schedule, prepare),)])
    # Token weights come from the whole mini-batch before it is cut: a mean over tokens is then the same number
    # however many ranks there are and however unevenly their tokens lie.
    plans = [UpdatePlan(len(batch) * schedule.epochs) for _ in range(group.world_size)]
    for mini in mini_batches(batch, schedule):
        whole = prepare(mini)
        sent = whole.select([name for name in whole.batch if name not in UNUSED], [])
        for plan, part in zip(plans, parts_by_rank(whole, group), strict=True):
            plan.steps.append(MiniBatch(sent[part.rows], part.passes))
    return Calls([(plan,) for plan in plans], reporting_ranks=reporting_ranks(group))


def join_updates(results: list[list[Measures]], calls: Calls) -> dict[str, float]:
    """Metrics of a batch's optimizer steps, from those that every rank gave for each of them; ranks that computed the
    same rows count once."""
    return reduce_over_steps([reduce_over_ranks(parts) for parts in zip(*calls.reported(results), strict=True)])

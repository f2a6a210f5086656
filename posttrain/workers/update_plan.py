"""How the driver spreads rows over ranks and plans updates: the rows of each optimizer step, weighted by global counts.

Groups stay together and ranks get equal tokens. Workers execute a plan, so a gradient depends neither on the number of
ranks nor on the rank that computes a row. `token_weights` turn losses per token into one number, the same for every
split of a mini-batch.

Shapes: B rows, R response width.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.algorithms import aggregation_weights, mask_counts
from posttrain.batch.columns import Column, MaskColumn, has_store
from posttrain.batch.compact import compact, keep_rows, row_sums
from posttrain.batch.fields import ROUTES
from posttrain.batch.samples import has_several_rows, rows_of_samples, sample_of_rows
from posttrain.controller.group import Calls, WorkerGroup
from posttrain.engine.facts import EngineFacts
from posttrain.engine.micro_batches import RankPart, plan_ranks
from posttrain.engine.ranks import this_rank, world_size
from posttrain.protocol import DataProto
from posttrain.workers.measures import Measures, reduce_over_ranks, reduce_over_steps


@dataclass(frozen=True, eq=False)
class WeightColumn(Column):
    """The weights of responses of these lengths, by the counts of the whole mini-batch: made where they are read."""

    response_B: np.ndarray
    width: int
    mode: str
    scale: float | None
    tokens: int
    rows: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.response_B), self.width))

    def value(self) -> torch.Tensor:
        mask = MaskColumn(self.response_B, self.width).value()
        totals: dict[str, Any] = {"total_tokens": self.tokens, "total_rows": self.rows}
        return aggregation_weights(mask, self.mode, loss_scale_factor=self.scale, **totals)


def token_weights(mini: DataProto, mode: str, scale: float) -> tuple[dict[str, Any], dict[str, int]]:
    """(`loss_weights` by this aggregation and `mean_weights` of a mean over tokens, counts of the mini-batch).

    With samples of several rows also `row_count`, the number of rows that have tokens.
    """
    sample_B = torch.from_numpy(sample_of_rows(mini)) if has_several_rows(mini) else None
    mask = mini.batch.column("response_mask")
    if isinstance(mask, MaskColumn) and sample_B is None:
        tokens, rows = int(mask.response_B.sum()), int((mask.response_B > 0).sum())
        made: dict[str, Any] = {
            "loss_weights": WeightColumn(mask.response_B, mask.width, mode, scale, tokens, rows),
            "mean_weights": WeightColumn(mask.response_B, mask.width, "token-mean", None, tokens, rows),
        }
        return made, {"total_tokens": tokens, "total_rows": rows}
    mask_BR = mini.batch["response_mask"]
    made = {
        "loss_weights": aggregation_weights(mask_BR, mode, loss_scale_factor=scale, sample_B=sample_B),
        "mean_weights": aggregation_weights(mask_BR, "token-mean"),
    }
    if sample_B is not None:
        made["row_count"] = mask_counts(mask_BR)[1].expand(len(mini)).clone()
    tokens, samples = mask_counts(mask_BR, sample_B)
    return made, {"total_tokens": int(tokens), "total_rows": int(samples)}


COMPUTED = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


def by_groups(group: WorkerGroup, data: DataProto) -> Calls:
    """Rows with the same uid to the same rank, so that their prompt is computed once; ranks get equal tokens."""
    if group.world_size == 1:
        return Calls([(data,)])
    rows, sent = split_rows(_groups(data), _tokens(data), group.world_size), compact(data)
    return Calls([(sent[own],) for own in rows], rows)


def by_passes(group: WorkerGroup, data: DataProto) -> Calls:
    """Rows and equal numbers of passes for every rank; ranks that compute the same rows together get the same ones. A
    rank alone plans for itself. Recorded routes of experts are not sent: they are the policy's."""
    return _by_passes(group, data, [])


def by_passes_with_routes(group: WorkerGroup, data: DataProto) -> Calls:
    """As `by_passes`, with the recorded routes of experts, where there are any."""
    return _by_passes(group, data, _routes_in(data))


def _routes_in(data: DataProto) -> list[str]:
    return [ROUTES] if ROUTES in data.non_tensor_batch else []


def _by_passes(group: WorkerGroup, data: DataProto, objects: list[str]) -> Calls:
    if group.world_size == 1:
        kept = [name for name in data.non_tensor_batch if name != ROUTES or name in objects]
        return Calls([(data.select(None, kept), None)])
    parts = parts_by_rank(data, group)
    # Only what a forward pass reads: the other tensors of a batch would travel to every rank for nothing.
    needed = compact(data.select([name for name in COMPUTED if name in data.batch], objects, []))
    arguments = each_once(parts, lambda part: (needed[part.rows], part.passes))
    return Calls(arguments, [part.rows for part in parts], reporting_ranks(group))


def each_once(parts: Sequence[RankPart], make: Callable[[RankPart], Any]) -> list[Any]:
    """What is made of each part: once, where ranks share one."""
    made: dict[int, Any] = {}
    return [made[id(part)] if id(part) in made else made.setdefault(id(part), make(part)) for part in parts]


def parts_by_rank(data: DataProto, group: WorkerGroup) -> list[RankPart]:
    """A part for every rank; ranks that hold one copy of the model together have the same."""
    facts = group.once("engine_facts")
    # Ranks are ordered pipeline stage first, then data-parallel copies, then the ranks that share a sequence.
    stage = group.world_size // facts.pipeline
    parts = plan_ranks(data, facts, stage // facts.sequence_parallel)
    return [parts[rank % stage // facts.sequence_parallel] for rank in range(group.world_size)]


def reporting_ranks(group: WorkerGroup) -> list[int]:
    """One rank for every part: of those that compute the same rows the first, in the last stage of a pipeline, which
    alone sees losses."""
    if group.world_size == 1:
        return [0]
    facts = group.once("engine_facts")
    first = group.world_size - group.world_size // facts.pipeline
    return list(range(first, group.world_size, facts.sequence_parallel))


def split_rows(groups: Sequence[Hashable], tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows of each rank, in order: the largest group left goes to the rank that has the fewest tokens."""
    members: dict[Hashable, list[int]] = {}
    for row, name in enumerate(groups):
        members.setdefault(name, []).append(row)
    # Largest first to the least loaded (LPT): at most 4/3 of the best balance, and the same on every run.
    sizes = sorted(((sum(tokens[row] for row in rows), rows) for rows in members.values()), key=lambda s: (-s[0], s[1]))
    ranked = [(0, rank) for rank in range(ranks)]
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for size, rows in sizes:
        used, rank = heapq.heappop(ranked)
        chosen[rank] += rows
        heapq.heappush(ranked, (used + size, rank))
    return [sorted(rows) for rows in chosen]


def _groups(data: DataProto) -> list[Hashable]:
    fields = data.non_tensor_batch
    return list(fields["uid"]) if "uid" in fields else [tuple(ids) for ids in fields["raw_prompt_ids"]]


def _tokens(data: DataProto) -> list[int]:
    if "attention_mask" in data.batch:
        return row_sums(data, "attention_mask").astype(int).tolist()
    return [len(ids) for ids in data.non_tensor_batch["raw_prompt_ids"]]


def in_row_order(results: list[DataProto], calls: Calls) -> DataProto:
    """The ranks' rows as one batch, in the order of the caller's."""
    if calls.rows is None:
        return results[0]
    # What several ranks computed together is taken once.
    pairs = zip(calls.reported(results), calls.reported(list(calls.rows)), strict=True)
    parts = [(part, rows) for part, rows in pairs if len(rows)]
    joined = DataProto.concat([part for part, _ in parts])
    return joined[np.argsort(np.concatenate([rows for _, rows in parts]))]


def batch_of(**tensors: torch.Tensor | None) -> DataProto:
    """A batch of these; a rank without rows has none to give."""
    return DataProto.from_dict(tensors={name: tensor for name, tensor in tensors.items() if tensor is not None})


def in_store(found: DataProto, data: DataProto, facts: EngineFacts) -> DataProto:
    """What was computed of these rows, left in this worker's store where it has one; of ranks that computed the same
    rows the one that reports leaves it there, and the others give nothing."""
    if not has_store() or not len(found):
        return found
    return keep_rows(found, data) if reports_rows(facts) else DataProto()


def reports_rows(facts: EngineFacts) -> bool:
    """Whether this is the one of the ranks that compute the same rows whose result counts."""
    first = world_size() - world_size() // facts.pipeline
    return this_rank() >= first and (this_rank() - first) % facts.sequence_parallel == 0


def with_routes(batch: DataProto, routes: Sequence[np.ndarray]) -> DataProto:
    """The batch with the routes of experts of its rows, where it has rows."""
    if routes:
        batch.non_tensor_batch[ROUTES] = routes
    return batch


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
            # By sample, not by row: a sample of several rows has one weight, which must not be split over two optimizer
            # steps.
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
    steps: list[list[MiniBatch]] = []
    for mini in mini_batches(batch, schedule):
        whole = prepare(mini)
        # No loss reads these columns, which would travel to every rank.
        sent = compact(whole.select([name for name in whole.batch if name not in UNUSED], _routes_in(whole)))
        parts = parts_by_rank(whole, group)
        steps.append(each_once(parts, lambda part, sent=sent: MiniBatch(sent[part.rows], part.passes)))
    # Ranks that compute the same rows together have one plan, which is sent once.
    shared: dict[tuple[int, ...], tuple[UpdatePlan]] = {}
    arguments = []
    for own in zip(*steps, strict=True):
        plan = UpdatePlan(len(batch) * schedule.epochs, steps=list(own))
        arguments.append(shared.setdefault(tuple(map(id, own)), (plan,)))
    return Calls(arguments, reporting_ranks=reporting_ranks(group))


def join_updates(results: list[list[Measures]], calls: Calls) -> dict[str, float]:
    """Metrics of a batch's optimizer steps, from those that every rank gave for each of them; ranks that computed the
    same rows count once."""
    return reduce_over_steps([reduce_over_ranks(parts) for parts in zip(*calls.reported(results), strict=True)])

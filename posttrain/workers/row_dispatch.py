"""How rows are spread over ranks: whole groups together, tokens evenly; and how what the ranks gave is put in order."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

import numpy as np
import torch

from posttrain.controller.group import Calls, WorkerGroup
from posttrain.engine.micro_batches import RankPart, plan_ranks
from posttrain.protocol import DataProto

COMPUTED = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


def by_groups(group: WorkerGroup, data: DataProto) -> Calls:
    """Rows with the same uid to the same rank, so that their prompt is computed once; ranks get equal tokens."""
    if group.world_size == 1:
        return Calls([(data,)])
    rows = split_rows(_groups(data), _tokens(data), group.world_size)
    return Calls([(data[own],) for own in rows], rows)


def by_passes(group: WorkerGroup, data: DataProto) -> Calls:
    """Rows and equal numbers of passes for every rank; ranks that compute the same rows together get the same ones. A
    rank alone plans for itself."""
    if group.world_size == 1:
        return Calls([(data, None)])
    parts = parts_by_rank(data, group)
    # Only what a forward pass reads: the other tensors of a batch would travel to every rank for nothing.
    needed = data.select([name for name in COMPUTED if name in data.batch], [], [])
    return Calls([(needed[part.rows], part.passes) for part in parts], [part.rows for part in parts])


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
        return data.batch["attention_mask"].sum(-1).tolist()
    return [len(ids) for ids in data.non_tensor_batch["raw_prompt_ids"]]


def in_row_order(results: list[DataProto], calls: Calls) -> DataProto:
    """The ranks' rows as one batch, in the order of the caller's."""
    if calls.rows is None:
        return results[0]
    parts = [(part, rows) for part, rows in zip(results, calls.rows, strict=True) if len(rows)]
    joined = DataProto.concat([part for part, _ in parts])
    rows = np.concatenate([rows for _, rows in parts])
    _, first = np.unique(rows, return_index=True)  # what several ranks computed together is taken once
    return joined[first]


def batch_of(**tensors: torch.Tensor | None) -> DataProto:
    """A batch of these; a rank without rows has none to give."""
    return DataProto.from_dict(tensors={name: tensor for name, tensor in tensors.items() if tensor is not None})

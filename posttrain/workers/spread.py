"""How rows are spread over ranks: whole groups together, tokens evenly; and how what the ranks gave is put in order."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from posttrain.controller.dispatch import Calls
from posttrain.protocol import DataProto


def by_groups(group: Any, arguments: tuple[Any, ...]) -> Calls:
    """Rows with the same uid to the same rank, so that their prompt is computed once; ranks get equal tokens."""
    data: DataProto = arguments[0]
    if group.world_size == 1:
        return Calls([arguments])
    rows = split_rows(_groups(data), _tokens(data), group.world_size)
    return Calls([(data[own], *arguments[1:]) for own in rows], rows)


def split_rows(groups: Sequence[Hashable], tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows of each rank, in order: the largest group left goes to the rank that has the fewest tokens."""
    members: dict[Hashable, list[int]] = {}
    for row, name in enumerate(groups):
        members.setdefault(name, []).append(row)
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
    given = [part for part, rows in zip(results, calls.rows, strict=True) if len(rows)]
    joined = DataProto.concat(given)
    return joined.reorder(np.argsort(np.concatenate([rows for rows in calls.rows if len(rows)]), kind="stable"))

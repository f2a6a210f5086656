"""Passes over a batch for several ranks: equal in number, so that no rank waits for ever, and balanced by tokens."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

from posttrain.engine.facts import EngineFacts
from posttrain.engine.packing import Unit, passes_of_pairs, plan_micro_batches, plan_pairs, units_for
from posttrain.protocol import DataProto


@dataclass
class RankPart:
    """A rank's rows of the batch, and its passes over them: units of rows counted within the part. A pass without
    units is a rank's wait for others."""

    rows: list[int]
    passes: list[list[Unit]]


def plan_ranks(data: DataProto, facts: EngineFacts, ranks: int) -> list[RankPart]:
    """Each rank's part: what shares a prompt, or is a pair, stays together, and the largest of what is left goes to the
    rank with the fewest tokens."""
    bundles = plan_pairs(data, facts) if facts.pairs else [[unit] for unit in _units(data, facts, ranks)]
    parts = [_part(own, facts) for own in _dealt(bundles, ranks)]
    most = max(len(part.passes) for part in parts)
    for part in parts:
        part.passes += [[] for _ in range(most - len(part.passes))]
    return parts


def _units(data: DataProto, facts: EngineFacts, ranks: int) -> list[Unit]:
    """Units of the batch; small enough that every rank can have one."""
    rows = min(facts.max_rows or len(data), max(1, math.ceil(len(data) / ranks)))
    for limit in (facts.max_rows, rows):
        units = units_for(facts, data, limit)
        if len(units) >= ranks:
            break
    return units


def _dealt(bundles: list[list[Unit]], ranks: int) -> list[list[list[Unit]]]:
    fewest = [(0, rank) for rank in range(ranks)]
    dealt: list[list[list[Unit]]] = [[] for _ in range(ranks)]
    sizes = [(sum(unit.tokens for unit in bundle), bundle) for bundle in bundles]
    for size, bundle in sorted(sizes, key=lambda sized: (-sized[0], sized[1][0].rows[0])):
        tokens, rank = heapq.heappop(fewest)
        dealt[rank].append(bundle)
        heapq.heappush(fewest, (tokens + size, rank))
    return dealt


def _part(bundles: list[list[Unit]], facts: EngineFacts) -> RankPart:
    rows = sorted(row for bundle in bundles for unit in bundle for row in unit.rows)
    place = {row: number for number, row in enumerate(rows)}
    own = [[replace(unit, rows=[place[row] for row in unit.rows]) for unit in bundle] for bundle in bundles]
    if facts.pairs:
        return RankPart(rows, passes_of_pairs(own, facts))
    units = [unit for bundle in own for unit in bundle]
    return RankPart(rows, plan_micro_batches(units, token_budget=facts.token_budget, max_rows=facts.max_rows))

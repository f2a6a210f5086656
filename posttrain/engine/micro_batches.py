"""Which rows of a batch are computed together: units that share a beginning, passes that fit a token budget, ranks.

Planned from token counts alone, on the driver or on a rank; `packing.py` turns a planned pass into tensors.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from posttrain.batch.columns import StoredColumn, key_of
from posttrain.batch.compact import lengths_of
from posttrain.batch.samples import has_several_rows
from posttrain.engine.facts import EngineFacts
from posttrain.protocol import DataProto


@dataclass(frozen=True)
class Unit:
    """Rows that are computed together, because they share their beginnings: responses to one prompt, the rows of
    conversations with branches; or a single row.

    The first `shared[i]` tokens of the i-th row are those of row `sources[i]` (counted within the unit) and computed
    there; where that is itself, there are none. Rows that branch off each other stand in the order of their tree.
    """

    rows: list[int]
    sources: list[int]
    shared: list[int]
    tokens: int


def plan_units(
    data: DataProto,
    *,
    share: bool,
    width: int = 0,
    all_pairs: bool = True,
    joining: float = 0.0,
    max_rows: int | None = None,
    token_budget: int | None = None,
    digests: bool = False,
) -> list[Unit]:
    """Units of the batch, as `packed_units` packs them; none has more rows or tokens than a pass may have, unless it is
    a single row.

    Prompts are shared where a pass over a model of that width becomes cheaper by it; so are responses that are equal,
    and all beginnings of rows in a batch with samples of several rows.

    The responses of a unit are one sequence. Its matrix products then have fewer tokens. Attention that computes all
    pairs of a sequence has more pairs; attention that skips masked ones has fewer, but may have to join the parts over
    prompt and response, at the cost of `joining` tokens per token.

    With `digests`, responses are compared by these alone: equal ones are found, those that begin with another are not.
    """
    computed = _computed(data, digests=digests)
    if share and has_several_rows(data):
        candidates = _trees(data, max_rows, token_budget)
    else:
        groups = _equal_prompts(data) if share else [[row] for row in range(len(data))]
        parts = [part for rows in groups for part in _parts(rows, computed, max_rows, token_budget)]
        candidates = [_unit(part, computed) for part in parts]
    units: list[Unit] = []
    for shared in candidates:
        single = [_unit([row], computed) for row in shared.rows] if all_pairs or joining else []
        if all_pairs:
            costs_more = _cost(shared.tokens, width) > sum(_cost(unit.tokens, width) for unit in single)
        else:
            costs_more = joining > 0 and shared.tokens * (1 + joining) > sum(unit.tokens for unit in single)
        units += single if costs_more else [shared]
    return units


def _trees(data: DataProto, max_rows: int | None, token_budget: int | None) -> list[Unit]:
    """The rows of each prompt's samples as trees: every beginning that a branch has in common with another row once."""
    sequences, contexts = _sequences(data)
    by_uid: dict[Any, list[int]] = {}
    for row, uid in enumerate(data.non_tensor_batch["uid"]):
        by_uid.setdefault(uid, []).append(row)
    units: list[Unit] = []
    for rows in by_uid.values():
        before = None
        # In the order of their tokens rows with a common beginning follow each other, and the longest one that a row
        # shares with any before it is the one that it shares with its neighbour.
        for row in sorted(rows, key=lambda row: (sequences[row].astype(">i8").tobytes(), row)):
            own = sequences[row]
            shared = 0
            if before is not None:
                common = _common(sequences[before], own)
                # After the tokens that they read, rows of different samples have few in common: a branch for each of
                # these would cost more than it saves.
                whole = common == len(sequences[before])
                shared = common if whole else min(common, max(contexts[before], contexts[row]))
            unit = units[-1] if shared else None
            too_many = token_budget is not None and unit is not None and unit.tokens + len(own) - shared > token_budget
            if unit is None or too_many or len(unit.rows) == max_rows:
                units.append(Unit([row], [0], [0], len(own)))
            else:
                sources, begun = [*unit.sources, len(unit.rows) - 1], [*unit.shared, shared]
                units[-1] = Unit([*unit.rows, row], sources, begun, unit.tokens + len(own) - shared)
            before = row
    return units


def _sequences(data: DataProto) -> tuple[list[np.ndarray], list[int]]:
    """By row, all tokens that are computed, and how many of them were read before the first one that is trained."""
    width = data.batch["responses"].shape[1]
    ids, real = data.batch["input_ids"].cpu().numpy(), data.batch["attention_mask"].cpu().numpy().astype(bool)
    trained = data.batch["response_mask"].cpu().numpy().astype(bool)
    sequences, contexts = [], []
    for row in range(len(data)):
        prompt, response = int(real[row, :-width].sum()), int(real[row, -width:].sum())
        sequences.append(ids[row][real[row]][: prompt + max(0, response - 1)])
        contexts.append(prompt + (int(trained[row].argmax()) if trained[row].any() else response))
    return sequences, contexts


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    most = min(len(one), len(other))
    differing = np.flatnonzero(one[:most] != other[:most])
    return int(differing[0]) if len(differing) else most


def _parts(rows: list[int], computed: list[_Row], max_rows: int | None, token_budget: int | None) -> list[list[int]]:
    """The rows of a group, cut where a unit would be larger than a pass."""
    parts: list[list[int]] = []
    tokens = 0
    for row in rows:
        prompt, response = computed[row].prompt, computed[row].response
        too_many = token_budget is not None and tokens + response > token_budget
        if not parts or too_many or len(parts[-1]) == max_rows:
            parts.append([])
            tokens = prompt
        parts[-1].append(row)
        tokens += response
    return parts


def plan_passes(data: DataProto, facts: EngineFacts) -> list[list[Unit]]:
    """The units of each forward pass over a batch that one process computes alone."""
    if facts.pairs:
        return passes_of_pairs(plan_pairs(data, facts), facts)
    units = units_for(facts, data, facts.max_rows)
    return plan_micro_batches(units, token_budget=facts.token_budget, max_rows=facts.max_rows)


def plan_pairs(data: DataProto, facts: EngineFacts) -> list[list[Unit]]:
    """By pair, the units that its two rows, which follow each other, are computed in: one where they share a beginning
    and that is cheaper."""
    costs = {"width": facts.width, "all_pairs": facts.all_pairs, "joining": facts.joining}
    pairs = []
    for first in range(0, len(data), 2):
        units = plan_units(data[[first, first + 1]], share=facts.shares_prompts, **costs)
        pairs.append([replace(unit, rows=[first + row for row in unit.rows]) for unit in units])
    return pairs


def passes_of_pairs(pairs: list[list[Unit]], facts: EngineFacts) -> list[list[Unit]]:
    """The units of each pass, both rows of a pair always in the same one; `facts.max_rows` counts pairs."""
    whole = [Unit([number], [0], [0], sum(unit.tokens for unit in pair)) for number, pair in enumerate(pairs)]
    passes = plan_micro_batches(whole, token_budget=facts.token_budget, max_rows=facts.max_rows)
    return [[unit for chosen in units for unit in pairs[chosen.rows[0]]] for units in passes]


def units_for(facts: EngineFacts, data: DataProto, max_rows: int | None, *, digests: bool = False) -> list[Unit]:
    """Units of the batch for an engine of which this is known, each of `max_rows` rows at most."""
    return plan_units(
        data,
        share=facts.shares_prompts,
        width=facts.width,
        all_pairs=facts.all_pairs,
        joining=facts.joining,
        max_rows=max_rows,
        token_budget=facts.token_budget,
        digests=digests,
    )


class _Row(NamedTuple):
    """Tokens of a row's prompt, those that are computed of its response (all but the last), and these as int64 in
    bytes, or their digest."""

    prompt: int
    response: int
    content: bytes


def _computed(data: DataProto, *, digests: bool) -> list[_Row]:
    prompts, responses = (lengths.tolist() for lengths in lengths_of(data))
    computed = [max(0, length - 1) for length in responses]
    contents = _digests(data, "responses") if digests else None
    if contents is None:
        width = data.batch.shape("responses")[1]
        ids = data.batch["input_ids"][:, -width:].cpu().numpy().astype("int64")
        rows = [row[:length] for row, length in zip(ids, computed, strict=True)]
        contents = [np.array(key_of(row)).tobytes() if digests else row.tobytes() for row in rows]
    contents = [content if length else b"" for content, length in zip(contents, computed, strict=True)]
    return [_Row(*row) for row in zip(prompts, computed, contents, strict=True)]


def _digests(data: DataProto, name: str) -> list[bytes] | None:
    """Of each row's tokens, where they lie in a store: the driver plans by lengths and these alone."""
    column = data.batch.column(name) if name in data.batch else None
    if not isinstance(column, StoredColumn) or column.keys_B2 is None:
        return None
    return [key.tobytes() for key in column.keys_B2]


def _unit(rows: list[int], computed: list[_Row]) -> Unit:
    """These rows as a unit. In the order of their bytes a response stands before those that begin with it."""
    # Sorted from the largest bytes down, a response follows the one that it is the beginning of, if there is one.
    prompt = computed[rows[0]].prompt
    sources, tokens, longest = [0] * len(rows), prompt, b""
    source = -1
    for place in sorted(range(len(rows)), key=lambda place: (computed[rows[place]].content, -place), reverse=True):
        content = computed[rows[place]].content
        if source < 0 or not longest.startswith(content):
            source, longest = place, content
            tokens += computed[rows[place]].response
        sources[place] = source
    # The prompt is computed with the first response that is.
    first = next(place for place, source in enumerate(sources) if place == source)
    shared = [prompt + (0 if own == place else computed[rows[place]].response) for place, own in enumerate(sources)]
    sources, shared[first] = [first if own == place else own for place, own in enumerate(sources)], 0
    return Unit(rows, sources, shared, tokens)


def _cost(tokens: int, width: int) -> int:
    # Arithmetic of one layer over a sequence, in units of 4 x width: 24 x width^2 per token, 4 x width per pair.
    return tokens * (6 * width + tokens)


def _equal_prompts(data: DataProto) -> list[list[int]]:
    """Rows grouped by equal prompts, in order of their first row."""
    groups: dict[bytes, list[int]] = {}
    if (keys := _digests(data, "prompts")) is not None:
        for row, key in enumerate(keys):
            groups.setdefault(key, []).append(row)
        return list(groups.values())
    width = data.batch["input_ids"].shape[1] - data.batch["responses"].shape[1]
    real = data.batch["attention_mask"][:, :width].bool()
    ids = data.batch["input_ids"][:, :width].masked_fill(~real, -1).cpu().numpy()
    for row in range(len(data)):
        groups.setdefault(ids[row].tobytes(), []).append(row)
    return list(groups.values())


def plan_micro_batches(units: list[Unit], *, token_budget: int, max_rows: int | None = None) -> list[list[Unit]]:
    """Units of each forward pass: large ones first, filled up to the budget, at least one unit each."""
    # Large ones first also makes the first pass the largest: if memory does not suffice, it shows at once.
    plan: list[list[Unit]] = []
    used, rows = 0, 0
    for unit in sorted(units, key=lambda unit: (-unit.tokens, unit.rows[0])):
        size = len(unit.rows)
        if not plan or used + unit.tokens > token_budget or (max_rows is not None and rows + size > max_rows):
            plan.append([])
            used, rows = 0, 0
        plan[-1].append(unit)
        used, rows = used + unit.tokens, rows + size
    return plan


@dataclass
class RankPart:
    """A rank's rows of the batch, and its passes over them: units of rows counted within the part. In a pass without
    units the rank only takes part in what its pass shares with others."""

    rows: list[int]
    passes: list[list[Unit]]


def plan_ranks(data: DataProto, facts: EngineFacts, ranks: int) -> list[RankPart]:
    """Each rank's part, in equally many passes: FSDP2 gathers weights in every one of them, so that a rank with fewer
    would leave the others waiting for ever. Rows that share a prompt, or are a pair, stay together."""
    bundles = plan_pairs(data, facts) if facts.pairs else [[unit] for unit in _units(data, facts, ranks)]
    parts = [_part(own, facts) for own in _spread_over_ranks(bundles, ranks)]
    most = max(len(part.passes) for part in parts)
    for part in parts:
        part.passes += [[] for _ in range(most - len(part.passes))]
    return parts


def _units(data: DataProto, facts: EngineFacts, ranks: int) -> list[Unit]:
    """Units of the batch; small enough that every rank can have one."""
    rows = min(facts.max_rows or len(data), max(1, math.ceil(len(data) / ranks)))
    # Whole groups first; only if there are fewer of them than ranks are they split, which computes prompts twice.
    for limit in (facts.max_rows, rows):
        # By digests, wherever the tokens lie: a batch that comes out of a checkpoint is planned as the stored one was.
        units = units_for(facts, data, limit, digests=True)
        if len(units) >= ranks:
            break
    return units


def _spread_over_ranks(bundles: list[list[Unit]], ranks: int) -> list[list[list[Unit]]]:
    """By rank: large bundles first, each to the rank with the fewest tokens so far."""
    fewest = [(0, rank) for rank in range(ranks)]
    chosen: list[list[list[Unit]]] = [[] for _ in range(ranks)]
    sizes = [(sum(unit.tokens for unit in bundle), bundle) for bundle in bundles]
    for size, bundle in sorted(sizes, key=lambda sized: (-sized[0], sized[1][0].rows[0])):
        tokens, rank = heapq.heappop(fewest)
        chosen[rank].append(bundle)
        heapq.heappush(fewest, (tokens + size, rank))
    return chosen


def _part(bundles: list[list[Unit]], facts: EngineFacts) -> RankPart:
    rows = sorted(row for bundle in bundles for unit in bundle for row in unit.rows)
    place = {row: number for number, row in enumerate(rows)}
    own = [
        [Unit([place[row] for row in unit.rows], unit.sources, unit.shared, unit.tokens) for unit in bundle]
        for bundle in bundles
    ]
    if facts.pairs:
        return RankPart(rows, passes_of_pairs(own, facts))
    units = [unit for bundle in own for unit in bundle]
    return RankPart(rows, plan_micro_batches(units, token_budget=facts.token_budget, max_rows=facts.max_rows))

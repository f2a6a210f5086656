"""Rows of a batch packed end to end, each prompt and each response to it once; micro-batches that fit a token budget.

Shapes: B rows, S width of prompt and response, R response width, T packed tokens, N response tokens, U distinct
pairs of a place and the token that it predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from posttrain.engine.facts import EngineFacts
from posttrain.kernels.cuda import to_device
from posttrain.kernels.packed_attention import PackedLayout
from posttrain.protocol import DataProto


@dataclass(frozen=True)
class Unit:
    """Rows that are computed together: responses to one prompt that share it, or a single row.

    `sources[i]` is the row (counted within the unit) whose tokens serve the i-th: itself, or one whose response begins
    with all that is computed of the i-th.
    """

    rows: list[int]
    sources: list[int]
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
) -> list[Unit]:
    """Units of the batch, as `packed_units` packs them; none has more rows or tokens than a pass may have, unless it is
    a single row.

    Prompts are shared where a pass over a model of that width becomes cheaper by it; so are responses that are equal.

    The responses of a unit are one sequence: its matrix products take fewer tokens, and attention that computes all
    pairs of a sequence takes more of them; one that skips what is not seen takes fewer, but may have to join what a
    token saw of its prompt and of its response, at the cost of `joining` tokens per token.
    """
    computed = _computed(data)
    units: list[Unit] = []
    for rows in _equal_prompts(data) if share else [[row] for row in range(len(data))]:
        for part in _parts(rows, computed, max_rows, token_budget):
            together = _unit(part, computed)
            apart = [_unit([row], computed) for row in together.rows] if all_pairs or joining else []
            if all_pairs:
                dearer = _cost(together.tokens, width) > sum(_cost(unit.tokens, width) for unit in apart)
            else:
                dearer = joining > 0 and together.tokens * (1 + joining) > sum(unit.tokens for unit in apart)
            units += apart if dearer else [together]
    return units


def _parts(
    rows: list[int], computed: list[tuple[int, bytes]], max_rows: int | None, token_budget: int | None
) -> list[list[int]]:
    """The rows of a group, cut where a unit would be larger than a pass."""
    parts: list[list[int]] = []
    tokens = 0
    for row in rows:
        prompt, response = computed[row][0], len(computed[row][1]) // 8
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
    whole = [Unit([number], [0], sum(unit.tokens for unit in pair)) for number, pair in enumerate(pairs)]
    passes = plan_micro_batches(whole, token_budget=facts.token_budget, max_rows=facts.max_rows)
    return [[unit for chosen in units for unit in pairs[chosen.rows[0]]] for units in passes]


def units_for(facts: EngineFacts, data: DataProto, max_rows: int | None) -> list[Unit]:
    """Units of the batch for an engine of which this is known, each of `max_rows` rows at most."""
    return plan_units(
        data,
        share=facts.shares_prompts,
        width=facts.width,
        all_pairs=facts.all_pairs,
        joining=facts.joining,
        max_rows=max_rows,
        token_budget=facts.token_budget,
    )


def _computed(data: DataProto) -> list[tuple[int, bytes]]:
    """By row, tokens of its prompt, and what is computed of its response: all but the last token, as int64 in bytes."""
    width = data.batch["responses"].shape[1]
    mask = data.batch["attention_mask"].cpu()
    prompts, responses = mask[:, :-width].sum(-1).tolist(), mask[:, -width:].sum(-1).tolist()
    ids = data.batch["input_ids"][:, -width:].cpu().numpy().astype("int64")
    return [(p, row[: max(0, r - 1)].tobytes()) for p, r, row in zip(prompts, responses, ids, strict=True)]


def _unit(rows: list[int], computed: list[tuple[int, bytes]]) -> Unit:
    """These rows as a unit. In the order of their bytes a response stands before those that begin with it."""
    sources, tokens, longest = [0] * len(rows), computed[rows[0]][0], b""
    source = -1
    for place in sorted(range(len(rows)), key=lambda place: (computed[rows[place]][1], -place), reverse=True):
        response = computed[rows[place]][1]
        if source < 0 or not longest.startswith(response):
            source, longest = place, response
            tokens += len(response) // 8
        sources[place] = source
    return Unit(rows, sources, tokens)


def _cost(tokens: int, width: int) -> int:
    """Arithmetic of one layer over a sequence, in units of 4 x width: 24 x width^2 per token, 4 x width per pair."""
    return tokens * (6 * width + tokens)


def _equal_prompts(data: DataProto) -> list[list[int]]:
    """Rows grouped by equal prompts, in order of their first row."""
    width = data.batch["input_ids"].shape[1] - data.batch["responses"].shape[1]
    real = data.batch["attention_mask"][:, :width].bool()
    ids = data.batch["input_ids"][:, :width].masked_fill(~real, -1).cpu().numpy()
    groups: dict[bytes, list[int]] = {}
    for row in range(len(data)):
        groups.setdefault(ids[row].tobytes(), []).append(row)
    return list(groups.values())


def plan_micro_batches(units: list[Unit], *, token_budget: int, max_rows: int | None = None) -> list[list[Unit]]:
    """Units of each forward pass: large ones first, filled up to the budget, at least one unit each."""
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
class Rows:
    """Input of one forward pass, and where the response tokens are in it.

    `predict_U` are the (flattened) places whose hidden state predicts a response token, and `label_U` those tokens.
    Tokens that come after the same beginning share one such pair: `source_N` (if any do) is the pair of each token, and
    `slot_N` its place in a (B, R) tensor.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    layout: PackedLayout | None
    predict_U: torch.Tensor
    label_U: torch.Tensor
    source_N: torch.Tensor | None
    slot_N: torch.Tensor
    shape: tuple[int, int]

    def of_tokens(self, values_U: torch.Tensor) -> torch.Tensor:
        """Values of all response tokens, from those of the pairs."""
        return values_U if self.source_N is None else values_U.index_select(0, self.source_N)

    def scatter(self, values_U: torch.Tensor) -> torch.Tensor:
        """(B, R) with the values in the places of their tokens and 0 elsewhere."""
        flat = values_U.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.slot_N,), self.of_tokens(values_U)).view(self.shape)


def padded_rows(data: DataProto, device: torch.device) -> Rows:
    """The rows side by side, each from the left, padded on the right only: there no model's real token sees padding,
    whatever it makes of masks and positions."""
    ids_BS, mask_BS, _, real_BR = _tensors(data)
    rows, width = real_BR.shape
    order_BS = mask_BS.long().argsort(dim=1, descending=True, stable=True)
    length_B = mask_BS.sum(-1)
    longest = int(length_B.max())
    left_BL = ids_BS.gather(1, order_BS[:, :longest])
    kept_BL = torch.arange(longest) < length_B[:, None]
    prompt_B = length_B - real_BR.sum(-1)
    row_N, col_N = real_BR.nonzero(as_tuple=True)
    predict_N = row_N * longest + prompt_B[row_N] + real_BR.long().cumsum(-1)[real_BR] - 2
    labels, slots = ids_BS[:, -width:][real_BR], row_N * width + col_N
    position_BL = torch.arange(longest).expand(rows, -1)
    tensors = (left_BL, position_BL, kept_BL.long(), predict_N, labels, slots)
    ids, positions, mask, places, labels, slots = (to_device(x, device) for x in tensors)
    return Rows(ids, positions, mask, None, places, labels, None, slots, (rows, width))


def packed_units(data: DataProto, units: list[Unit], device: torch.device) -> Rows:
    """The rows packed; the rows of `data` are those of the units, end to end.

    All of it happens on the host, so that a device that still computes is not waited for. The last token of a response
    is predicted, but predicts nothing, and no other token looks at it: it is left out. A response that another one of
    its unit begins with is read off that one.
    """
    ids_BS, mask_BS, position_BS, real_BR = _tensors(data)
    rows, width = real_BR.shape
    start = ids_BS.shape[1] - width
    sizes = torch.tensor([len(unit.rows) for unit in units])
    leader_B = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    row_B = torch.arange(rows)
    number_B = row_B - leader_B + 1  # of a response among those that share its prompt
    source_B = leader_B + torch.tensor([source for unit in units for source in unit.sources])
    kept_BS = mask_BS.clone()
    kept_BS[:, :start] &= (number_B == 1)[:, None]
    kept_BS[:, start:] &= (source_B == row_B)[:, None]
    length_B = real_BR.sum(-1)
    answered = (length_B > 0).nonzero().squeeze(1)
    kept_BS[answered, start + length_B[answered] - 1] = False
    place_BS = (kept_BS.flatten().long().cumsum(0) - 1).view_as(ids_BS)
    prompt_end_B = place_BS[leader_B, start - 1]
    before_BR = torch.cat([prompt_end_B[:, None], place_BS[source_B, start:-1]], -1)
    row_N, col_N = real_BR.nonzero(as_tuple=True)
    segment_T = None
    if len(units) < rows:
        segment_BS = torch.zeros_like(ids_BS)
        segment_BS[:, start:] = number_B[:, None]
        segment_T = segment_BS[kept_BS]
    lengths = torch.zeros(len(units), dtype=torch.long)
    lengths.index_add_(0, torch.repeat_interleave(torch.arange(len(units)), sizes), kept_BS.sum(-1))
    position_T = position_BS[kept_BS]
    predict_N = before_BR[real_BR]
    layout = PackedLayout(
        lengths.tolist(), device, segment_T=segment_T, position_T=position_T, wanted_T=predict_N.unique()
    )
    labels, slots = ids_BS[:, start:][real_BR], row_N * width + col_N
    pairs = (predict_N, labels, None)
    if len(labels) and bool((source_B != row_B).any()):
        pairs = _distinct(predict_N, labels)
    tensors = (ids_BS[kept_BS][None], position_T[None], *pairs, slots)
    ids, positions, *rest = (None if x is None else to_device(x, device) for x in tensors)
    return Rows(ids, positions, None, layout, *rest, (rows, width))  # pyright: ignore


def with_a_place(rows: Rows) -> Rows:
    """Rows without any response token ask for one at their first place, which nobody reads: so every weight has a
    gradient, as it has on the ranks that this one adds its own to."""
    if len(rows.predict_U):
        return rows
    first = rows.predict_U.new_zeros(1)
    if rows.layout is not None:
        rows.layout.wanted_T = first
    return replace(rows, predict_U=first, label_U=first, source_N=rows.slot_N)


def dummy_rows(device: torch.device, *, packed: bool) -> Rows:
    """One token and the one after it, for a pass that counts nothing."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    if packed:
        layout = PackedLayout([1], device, position_T=zero, wanted_T=zero)
        return Rows(zero[None], zero[None], None, layout, zero, zero, None, zero, (1, 1))
    two = torch.arange(2, device=device)[None]
    return Rows(torch.zeros_like(two), two, torch.ones_like(two), None, zero, zero, None, zero, (1, 1))


def _distinct(predict_N: torch.Tensor, label_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distinct pairs of place and label, and which of them each token has."""
    size = label_N.max() + 1
    pair_U, source_N = (predict_N * size + label_N).unique(return_inverse=True)
    return pair_U // size, pair_U % size, source_N


def _tensors(data: DataProto) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids_BS, mask_BS = data.batch["input_ids"].cpu(), data.batch["attention_mask"].cpu().bool()
    position_BS = (mask_BS.long().cumsum(-1) - 1).clamp(min=0)
    return ids_BS, mask_BS, position_BS, mask_BS[:, -data.batch["responses"].shape[1] :]

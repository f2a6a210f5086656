"""The rows of a pass as tensors: packed end to end, with what rows share computed once, or padded.

Shapes: B rows, S width of prompt and response, R response width, T packed tokens, N response tokens, U distinct
pairs of a place and the token that it predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from posttrain.batch.fields import ROUTES
from posttrain.engine.micro_batches import Unit
from posttrain.kernels.cuda import to_device
from posttrain.kernels.packed_attention import PackedLayout
from posttrain.models.routing import RoutePass, RouteShape
from posttrain.protocol import DataProto


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
    routes: RoutePass | None = None  # of a mixture's tokens, flattened like `input_ids`
    # By row, the (flattened) places of its tokens; of those that it shares with another row, where that one has them.
    token_places: list[torch.Tensor] | None = None

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
    # Prompts arrive padded on the left: a stable sort by the mask moves the real tokens of each row to its start.
    order_BS = mask_BS.long().argsort(dim=1, descending=True, stable=True)
    length_B = mask_BS.sum(-1)
    longest = int(length_B.max())
    left_BL = ids_BS.gather(1, order_BS[:, :longest])
    kept_BL = torch.arange(longest) < length_B[:, None]
    prompt_B = length_B - real_BR.sum(-1)
    row_N, col_N = real_BR.nonzero(as_tuple=True)
    # The state before a token predicts it, and cumsum counts from 1: hence the 2.
    predict_N = row_N * longest + prompt_B[row_N] + real_BR.long().cumsum(-1)[real_BR] - 2
    labels, slots = ids_BS[:, -width:][real_BR], row_N * width + col_N
    position_BL = torch.arange(longest).expand(rows, -1)
    routes = _given_routes(data, torch.arange(rows).repeat_interleave(longest), position_BL.flatten(), device)
    token_places = [row * longest + torch.arange(int(length)) for row, length in enumerate((length_B - 1).clamp(min=0))]
    tensors = (left_BL, position_BL, kept_BL.long(), predict_N, labels, slots)
    ids, positions, mask, places, labels, slots = (to_device(x, device) for x in tensors)
    return Rows(ids, positions, mask, None, places, labels, None, slots, (rows, width), routes, token_places)


def packed_units(data: DataProto, units: list[Unit], device: torch.device, *, all_places: bool = False) -> Rows:
    """The rows packed; the rows of `data` are those of the units, end to end.

    All of it happens on the host, so that nothing waits for a device that still computes the pass before. The last
    token of a response is predicted, but predicts nothing and no other token attends to it: it is not computed. What a
    row shares with another one of its unit is read off that one. `all_places` asks for `Rows.token_places`.
    """
    ids_BS, mask_BS, position_BS, real_BR = _tensors(data)
    rows, width = real_BR.shape
    start = ids_BS.shape[1] - width
    sizes = torch.tensor([len(unit.rows) for unit in units])
    source_B = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    source_B += torch.tensor([source for unit in units for source in unit.sources])
    shared_B = torch.tensor([shared for unit in units for shared in unit.shared])
    length_B = real_BR.sum(-1)
    prompt_B = mask_BS.sum(-1) - length_B
    computed_B = prompt_B + (length_B - 1).clamp(min=0)
    kept_BS = mask_BS & (position_BS >= shared_B[:, None]) & (position_BS < computed_B[:, None])
    own_B = kept_BS.sum(-1)
    first_B = own_B.cumsum(0) - own_B
    # The place that predicts each response token: that of the token before it, in the row that computes it.
    row_N, col_N = real_BR.nonzero(as_tuple=True)
    sharing = (first_B, shared_B, source_B)
    predict_N = _places(row_N, prompt_B[row_N] + col_N - 1, *sharing)
    token_places = None
    if all_places:
        row_M = torch.repeat_interleave(torch.arange(rows), computed_B)
        position_M = torch.arange(len(row_M)) - (computed_B.cumsum(0) - computed_B)[row_M]
        token_places = list(_places(row_M, position_M, *sharing).split(computed_B.tolist()))
    lengths = torch.zeros(len(units), dtype=torch.long)
    lengths.index_add_(0, torch.repeat_interleave(torch.arange(len(units)), sizes), own_B)
    # Without sharing every sequence has one row, and attention sees all that stands before.
    end_T = _ends(units, first_B.tolist(), own_B.tolist()) if len(units) < rows else None
    position_T = position_BS[kept_BS]
    # The last layer need only compute the states that are read.
    layout = PackedLayout(lengths.tolist(), device, end_T=end_T, position_T=position_T, wanted_T=predict_N.unique())
    labels, slots = ids_BS[:, start:][real_BR], row_N * width + col_N
    # Rows read off the same tokens often ask for the same prediction: the vocabulary is computed once for each.
    pairs = (predict_N, labels, None)
    if len(labels) and bool(((own_B == 0) | (shared_B > prompt_B)).any()):
        pairs = _find_distinct(predict_N, labels)
    routes = _given_routes(data, kept_BS.nonzero()[:, 0], position_T, device)
    tensors = (ids_BS[kept_BS][None], position_T[None], *pairs, slots)
    ids, positions, *rest = (None if x is None else to_device(x, device) for x in tensors)
    return Rows(ids, positions, None, layout, *rest, (rows, width), routes, token_places)  # pyright: ignore


def _places(
    row_M: torch.Tensor, position_M: torch.Tensor, first_B: torch.Tensor, shared_B: torch.Tensor, source_B: torch.Tensor
) -> torch.Tensor:
    """Where the pass computes these tokens of rows: in the row itself, or in the one that it shares them with."""
    owner_M = row_M
    while bool((elsewhere_M := position_M < shared_B[owner_M]).any()):
        owner_M = torch.where(elsewhere_M, source_B[owner_M], owner_M)
    return first_B[owner_M] + position_M - shared_B[owner_M]


def _given_routes(
    data: DataProto, row_T: torch.Tensor, position_T: torch.Tensor, device: torch.device
) -> RoutePass | None:
    """The recorded routes of a pass's tokens, each the token of a row at a position; None where there are none."""
    if ROUTES not in data.non_tensor_batch:
        return None
    recorded = data.non_tensor_batch[ROUTES]
    lengths_B = torch.tensor([len(routes) for routes in recorded])
    flat = torch.from_numpy(np.concatenate(recorded))
    known_T = position_T < lengths_B[row_T]
    # Tokens without routes take any: `known_T` says that they are not read.
    index_T = torch.where(known_T, (lengths_B.cumsum(0) - lengths_B)[row_T] + position_T, 0)
    given_TLK = flat[index_T] if len(flat) else flat.new_zeros(len(index_T), *flat.shape[1:])
    return RoutePass(to_device(given_TLK, device), to_device(known_T, device))


def expert_counts(data: DataProto, shape: RouteShape) -> np.ndarray:
    """(L, X) how often each expert was chosen for the tokens that sampled tokens are predicted from, as recorded."""
    counts_LX = np.zeros((shape.layers, shape.experts))
    real_BR, trained_BR = (data.batch[name].cpu().numpy().astype(bool) for name in ("attention_mask", "response_mask"))
    width = trained_BR.shape[1]
    for row, routes in enumerate(data.non_tensor_batch[ROUTES]):
        before = int(real_BR[row, :-width].sum()) + np.flatnonzero(trained_BR[row]) - 1
        for layer, chosen in enumerate(routes[before[before < len(routes)]].swapaxes(0, 1)):
            counts_LX[layer] += np.bincount(chosen.ravel(), minlength=shape.experts)
    return counts_LX


def _ends(units: list[Unit], first: list[int], own: list[int]) -> torch.Tensor:
    """(T,) the place behind the last token that sees each one. `first` and `own` are where the tokens that a row
    computes itself begin, and how many there are."""
    ends = np.zeros(first[-1] + own[-1], np.int64)
    begin = 0  # the unit's first row
    for unit in units:
        last = begin + len(unit.rows) - 1
        ends[first[begin] : first[last] + own[last]] = first[last] + own[last]
        # From the unit's first row down to the one before: (row, how many of its own tokens later rows may see).
        path: list[list[int]] = []
        for row, (source, shared) in enumerate(zip(unit.sources, unit.shared, strict=True)):
            if not own[begin + row]:
                continue
            while unit.shared[source] >= shared > 0:  # the row that computes the last token which is shared
                source = unit.sources[source]
            here = first[begin + row]
            while path and path[-1][0] != source:
                done, seen = path.pop()
                ends[first[begin + done] : first[begin + done] + seen] = here
            if path:
                seen = shared - unit.shared[source]
                ends[first[begin + source] + seen : first[begin + source] + path[-1][1]] = here
                path[-1][1] = seen
            path.append([row, own[begin + row]])
        begin = last + 1
    return torch.from_numpy(ends)


def with_a_prediction(rows: Rows) -> Rows:
    """Rows without any response token predict one at their first place, and its output is discarded: so every weight
    has a gradient, as FSDP2 expects when it sums gradients over ranks."""
    if len(rows.predict_U):
        return rows
    first = rows.predict_U.new_zeros(1)
    if rows.layout is not None:
        rows.layout.wanted_T = first
    return replace(rows, predict_U=first, label_U=first, source_N=rows.slot_N)


def dummy_rows(device: torch.device, *, packed: bool) -> Rows:
    """One token and the one after it, for a pass without rows: ranks that share a model make equally many passes."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    if packed:
        layout = PackedLayout([1], device, position_T=zero, wanted_T=zero)
        return Rows(zero[None], zero[None], None, layout, zero, zero, None, zero, (1, 1))
    two = torch.arange(2, device=device)[None]
    return Rows(torch.zeros_like(two), two, torch.ones_like(two), None, zero, zero, None, zero, (1, 1))


def _find_distinct(predict_N: torch.Tensor, label_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distinct pairs of place and label, and which of them each token has."""
    size = label_N.max() + 1
    pair_U, source_N = (predict_N * size + label_N).unique(return_inverse=True)
    return pair_U // size, pair_U % size, source_N


def _tensors(data: DataProto) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids_BS, mask_BS = data.batch["input_ids"].cpu(), data.batch["attention_mask"].cpu().bool()
    position_BS = (mask_BS.long().cumsum(-1) - 1).clamp(min=0)
    return ids_BS, mask_BS, position_BS, mask_BS[:, -data.batch["responses"].shape[1] :]

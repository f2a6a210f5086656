"""The parts of a decode step between its matrix products: norms, paged attention, gating, mixtures of
experts.

Each is one call of a compiled kernel (cpu/decode.cpp) on a CPU, of Triton kernels (cuda/) on a CUDA device, and of its
torch equivalent elsewhere. The cache of a layer is a pool of blocks of BLOCK tokens. Values are stored as (blocks,
heads, BLOCK, size), keys as (blocks, heads, size, BLOCK), or like the values where Triton reads them.

Shapes: T tokens of one step, H heads of queries, K heads of keys, D head size, E width of the model, R rows of the
block table, N blocks of a row, X experts, J experts of a token, P = T J pairs of a token and an expert, I width of an
expert.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from posttrain.kernels import cuda
from posttrain.kernels.compiled import AttentionLayout, kernel
from posttrain.kernels.ordered import is_for_cpu
from posttrain.kernels.quantized import Quantized, round_rows
from posttrain.kernels.scores import NO_CHANGES, ScoreChanges, changed_attention
from posttrain.kernels.states import RowStates, StateGroup, state_groups

BLOCK = 32  # tokens in a block; decode.cpp holds the same number
FAR = 2**31 - 1  # the start of a missing block: after every position
BOX = 2**26  # attention scores that the torch equivalent holds at once
LATENT_BOX = 2**22  # latents, and scores of all heads, that attention to latents holds at once
TILE = 4  # tokens of one row that read the cache together in the compiled kernel


@dataclass
class StepTokens:
    """The tokens of one step: the row and the position of each, and the blocks of each row.

    Tokens of a row are consecutive and in order. Block n of a row holds its tokens from position `starts_RN[n]` up to
    the next block's start, so that rows can share a prompt's last block as it is; places without a block start at FAR.
    """

    ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int32
    rows_T: torch.Tensor  # int32
    table_RN: torch.Tensor  # int32
    starts_RN: torch.Tensor  # int32
    longest: int  # the largest position + 1
    rows: np.ndarray | None = None  # `rows_T` on the host, if known: reading it back would wait for the device
    states: RowStates | None = None  # of recurrent layers

    @property
    def device(self) -> torch.device:
        return self.ids_T.device

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """[start, end) of the tokens of each row."""
        rows = self.rows_T.cpu().numpy() if self.rows is None else self.rows
        edges = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
        return list(pairwise(edges))

    @cached_property
    def state_groups(self) -> list[StateGroup]:
        """Rows that recurrent layers compute together."""
        assert self.states is not None
        return state_groups(self.states, self.runs, self.device)

    @cached_property
    def state_order_T(self) -> torch.Tensor:
        """The place of each token among those of the groups, end to end."""
        tokens = torch.cat([group.token_BL.flatten() for group in self.state_groups])
        order_T = torch.empty_like(tokens)
        order_T[tokens] = torch.arange(len(tokens), device=tokens.device)
        return order_T

    @cached_property
    def boxes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Rows with similar numbers of tokens as rectangles of token numbers, and which of their places are real."""
        runs, boxes = sorted(self.runs, key=lambda run: run[0] - run[1]), []
        while runs:
            longest = runs[0][1] - runs[0][0]
            # Rows of at least half the longest one's tokens share its rectangle, as many as BOX scores allow.
            most = max(1, BOX // (longest * self.table_RN.shape[1] * BLOCK))
            fitting = sum(2 * (end - start) >= longest for start, end in runs[:most])
            starts_B, ends_B = torch.tensor(runs[:fitting], device=self.device).T
            place_BQ = starts_B[:, None] + torch.arange(longest, device=self.device)
            boxes.append((torch.minimum(place_BQ, ends_B[:, None] - 1), place_BQ < ends_B[:, None]))
            runs = runs[fitting:]
        return boxes

    @cached_property
    def tile_starts(self) -> torch.Tensor:
        """Starts of runs of at most TILE tokens of one row, and the end."""
        if len(self.runs) == len(self.rows_T):
            starts: Sequence[int] | range = range(len(self.rows_T) + 1)
        else:
            starts = [at for start, end in self.runs for at in range(start, end, TILE)]
            starts.append(len(self.rows_T))
        return torch.tensor(starts, dtype=torch.int32)

    @cached_property
    def wide_tiles(self) -> torch.Tensor:
        """The same for Triton's tiles, on the device."""
        from posttrain.kernels.cuda.paged_attention import TILE as WIDE

        starts = [at for start, end in self.runs for at in range(start, end, WIDE)]
        return cuda.to_device(torch.tensor([*starts, len(self.rows_T)], dtype=torch.int32), self.device)

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(block, place in it) of each token."""
        starts_TN = self.starts_RN[self.rows_T.long()]
        last_T = (starts_TN <= self.positions_T[:, None]).sum(-1) - 1
        blocks_T = self.table_RN[self.rows_T.long(), last_T].long()
        return blocks_T, self.positions_T.long() - starts_TN.gather(1, last_T[:, None]).squeeze(1)

    @cached_property
    def walks(self) -> tuple[torch.Tensor, ...]:
        """What `cuda.ordered.tile_attention` reads: tiles, bases, positions, and where the keys are, by position."""
        rows, position_RL = len(self.table_RN), torch.arange(self.longest, dtype=torch.int32, device=self.device)
        position_RL = position_RL.expand(rows, -1).contiguous()
        column_RL = torch.searchsorted(self.starts_RN, position_RL, right=True).sub_(1).clamp_(min=0)
        place_RL = self.table_RN.gather(1, column_RL) * BLOCK + position_RL - self.starts_RN.gather(1, column_RL)
        bases = self.rows_T[self.wide_tiles[:-1].long()].long() * self.longest
        return self.wide_tiles, bases, self.positions_T, place_RL.flatten()

    @cached_property
    def slots_T(self) -> torch.Tensor:
        blocks_T, places_T = self.places
        return blocks_T * BLOCK + places_T


# (keys, values) of one layer. Latents serve as both: their cache is (latents,).
LayerCache = tuple[torch.Tensor, ...]


def new_cache(blocks: int, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
    """The cache of one layer; with no heads, one of latents. Zeros: empty places are multiplied by 0, and must not be
    NaN."""
    if not heads:
        shape = (blocks, BLOCK, size)
        on_host = device.type == "cpu"
        latents = zeros_in_large_pages(shape, dtype) if on_host else torch.zeros(shape, dtype=dtype, device=device)
        return (latents,)
    shapes = (blocks, heads, size, BLOCK), (blocks, heads, BLOCK, size)
    if device.type == "cpu":
        return zeros_in_large_pages(shapes[0], dtype), zeros_in_large_pages(shapes[1], dtype)
    values = torch.zeros(shapes[1], dtype=dtype, device=device)
    keys = torch.zeros_like(values) if cuda.runs_here(values) else torch.zeros(shapes[0], dtype=dtype, device=device)
    return keys, values


def copy_tokens(cache: LayerCache, source_T: torch.Tensor, target_T: torch.Tensor) -> None:
    """Keys and values of the tokens at places `source_T` to places `target_T`; a place is block * BLOCK + offset."""
    from_block, from_place, to_block, to_place = *_split(source_T), *_split(target_T)
    if len(cache) == 1:
        cache[0][to_block, to_place] = cache[0][from_block, from_place]
        return
    keys, values = cache
    values[to_block, :, to_place] = values[from_block, :, from_place]
    if cuda.runs_here(values):
        keys[to_block, :, to_place] = keys[from_block, :, from_place]
    else:
        keys[to_block, :, :, to_place] = keys[from_block, :, :, from_place]


def _split(places_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return places_T // BLOCK, places_T % BLOCK


def add_rms_norm(
    residual_TE: torch.Tensor, added_TE: torch.Tensor | None, weight_E: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """The norm of `residual + added`; the sum stays in `residual`."""
    if cuda.runs_here(residual_TE):
        from posttrain.kernels.cuda import elementwise

        return elementwise.add_rms_norm(residual_TE, added_TE, weight_E, epsilon)
    function = kernel("add_rms_norm", residual_TE)
    if function is None:
        if added_TE is not None:
            residual_TE.add_(added_TE)
        return F.rms_norm(residual_TE, weight_E.shape, weight_E, epsilon)
    out = torch.empty_like(residual_TE)
    tokens, size = residual_TE.shape
    added = added_TE.data_ptr() if added_TE is not None else None
    threads = _threads(residual_TE.numel())
    function(residual_TE.data_ptr(), added, weight_E.data_ptr(), out.data_ptr(), tokens, size, epsilon, threads)
    return out


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows that hold both."""
    if cuda.runs_here(gate_up_T2I):
        from posttrain.kernels.cuda import elementwise

        return elementwise.silu_mul(gate_up_T2I)
    tokens, both = gate_up_T2I.shape
    if gate_up_T2I.is_meta and is_for_cpu(gate_up_T2I):  # a memory plan counts the tensor and computes nothing
        return gate_up_T2I.new_empty(tokens, both // 2)
    function = kernel("silu_mul", gate_up_T2I)
    if function is None:
        gate, up = gate_up_T2I.chunk(2, -1)
        return F.silu(gate) * up
    out = gate_up_T2I.new_empty(tokens, both // 2)
    function(gate_up_T2I.data_ptr(), out.data_ptr(), tokens, both // 2, _threads(gate_up_T2I.numel()))
    return out


def attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    cache: LayerCache,
    step: StepTokens,
    *,
    scale: float,
    window: int | None = None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 0.0,
    exact: bool = False,
    changes: ScoreChanges = NO_CHANGES,
) -> torch.Tensor:
    """Puts keys and values into the cache and gives the attention outputs, (T, H * D).

    `rotation` (cosines and sines by position, float32) and `norms` (weights of query and key norms) are applied to the
    heads first where given. The queries' memory may be overwritten. With `exact`, sums have the order of training's.
    """
    if cuda.runs_here(query_THD):
        given = (query_THD, key_TKD, value_TKD, cache, step, scale, window, rotation, norms, epsilon)
        return _attention_cuda(*given, changes, exact)
    function = kernel("paged_attention", query_THD)
    if function is None:
        given = (query_THD, key_TKD, value_TKD, cache, step, scale, window, rotation, norms, epsilon)
        return _attention_torch(*given, changes)
    tokens, heads, size = query_THD.shape
    out = query_THD.new_empty(tokens, heads * size)
    tiles = step.tile_starts
    sinks_H = None if changes.sinks_H is None else changes.sinks_H.detach().float().contiguous()
    layout = AttentionLayout(
        tokens, len(tiles) - 1, step.table_RN.shape[1],
        heads, key_TKD.shape[1], size, window or 0, torch.get_num_threads(),
        scale, epsilon, *(stride for x in (query_THD, key_TKD, value_TKD) for stride in x.stride()[:2]),
        None if sinks_H is None else sinks_H.data_ptr(), changes.cap or 0.0,
    )  # fmt: skip
    tensors = (query_THD, key_TKD, value_TKD, *(rotation or (None, None)), *(norms or (None, None)), *cache)
    lists = (step.table_RN, step.starts_RN, step.rows_T, step.positions_T, tiles)
    pointers = [None if x is None else x.data_ptr() for x in (*tensors, *lists, out)]
    function(ctypes.byref(layout), *pointers)
    return out


def _attention_cuda(
    query, key, value, cache, step, scale, window, rotation, norms, epsilon, changes, exact=False
) -> torch.Tensor:
    from posttrain.kernels.cuda.elementwise import rotate_and_store
    from posttrain.kernels.cuda.paged_attention import prefill_attention

    query_THD = rotate_and_store(
        query, key, value, cache, step.positions_T, step.slots_T, rotation=rotation, norms=norms, epsilon=epsilon
    )
    if exact:
        assert not changes, "exact attention has no score caps or sinks"
        from posttrain.kernels.cuda.ordered import tile_attention

        return tile_attention(query_THD, *cache, *step.walks, scale=scale)[0].flatten(1)
    tables = (step.wide_tiles, step.rows_T, step.positions_T, step.table_RN, step.starts_RN)
    return prefill_attention(query_THD, cache, *tables, scale=scale, window=window, far=FAR, changes=changes)


def _attention_torch(query, key, value, cache, step, scale, window, rotation, norms, epsilon, changes) -> torch.Tensor:
    if norms is not None:
        query = F.rms_norm(query, query.shape[-1:], norms[0], epsilon)
        key = F.rms_norm(key, key.shape[-1:], norms[1], epsilon)
    if rotation is not None:
        cosine, sine = (table[step.positions_T.long()][:, None].to(query.dtype) for table in rotation)
        query, key = (x * cosine + _half_turn(x) * sine for x in (query, key))
    keys, values = cache
    blocks_T, places_T = step.places
    keys[blocks_T, :, :, places_T] = key
    values[blocks_T, :, places_T] = value
    out = torch.empty_like(query)
    for index_BQ, real_BQ in step.boxes:
        found = _attend(query[index_BQ], cache, step, index_BQ, scale, window, changes)
        out[index_BQ[real_BQ]] = found[real_BQ]
    return out.flatten(1)


def _attend(
    query_BQHD, cache, step: StepTokens, index_BQ, scale: float, window: int | None, changes: ScoreChanges
) -> torch.Tensor:
    # B rows with Q queries each. The blocks of a row are gathered into one padded stretch of L places; places that are
    # empty (behind a shared prompt's last token, or in no block) get the position FAR, which no query sees.
    blocks_BN, seen = _seen(step, index_BQ, window)
    key_BKDL = cache[0][blocks_BN].permute(0, 2, 3, 1, 4).flatten(3)
    value_BKLD = cache[1][blocks_BN].transpose(1, 2).flatten(2, 3)
    given = (query_BQHD.transpose(1, 2), key_BKDL.transpose(2, 3), value_BKLD)
    if changes:
        out = changed_attention(*given, seen[:, None], scale=scale, changes=changes)
    else:
        shared = query_BQHD.shape[2] != value_BKLD.shape[1]
        out = F.scaled_dot_product_attention(*given, attn_mask=seen[:, None], scale=scale, enable_gqa=shared)
    return out.transpose(1, 2)


def _seen(step: StepTokens, index_BQ: torch.Tensor, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    # The blocks of the rows, and which of their places each query sees, (B, Q, L).
    positions_BQ = step.positions_T[index_BQ]
    rows_B = step.rows_T[index_BQ[:, 0]].long()
    starts_BN = step.starts_RN[rows_B]
    blocks = int((starts_BN <= positions_BQ.max()).sum(-1).max())
    blocks_BN, starts_BN = step.table_RN[rows_B, :blocks].long(), starts_BN[:, :blocks]
    places_BNP = starts_BN[..., None].clamp(max=FAR - BLOCK) + torch.arange(BLOCK, device=blocks_BN.device)
    ends_BN = F.pad(starts_BN[:, 1:], (0, 1), value=FAR)
    places_BL = places_BNP.masked_fill(places_BNP >= ends_BN[..., None], FAR).flatten(1)
    seen = places_BL[:, None] <= positions_BQ[..., None]
    if window:
        seen = seen & (positions_BQ[..., None] - places_BL[:, None] < window)
    return blocks_BN, seen


def latent_attention(
    query_THC: torch.Tensor, latent_TC: torch.Tensor, cache: LayerCache, step: StepTokens, *, rank: int, scale: float
) -> torch.Tensor:
    """Puts latents into the cache and gives them weighted by the scores of all heads, (T, H, rank). A latent's C
    numbers are the key of every head, and the first `rank` of them its value."""
    if cuda.runs_here(query_THC):
        from posttrain.kernels.cuda.latent_attention import prefill_latents, store_latents

        store_latents(latent_TC, cache[0], step.slots_T)
        tables = (step.wide_tiles, step.rows_T, step.positions_T, step.table_RN, step.starts_RN)
        return prefill_latents(query_THC, cache[0], *tables, rank=rank, scale=scale, far=FAR)
    cache[0][step.places] = latent_TC
    heads, out_THR = query_THC.shape[1], query_THC.new_empty(*query_THC.shape[:2], rank)
    for index_BQ, real_BQ in _latent_boxes(step, *query_THC.shape[1:]):
        blocks_BN, seen_BQL = _seen(step, index_BQ, None)
        latent_B1LC = cache[0][blocks_BN].flatten(1, 2)[:, None]
        # Heads are further queries of one head of keys: torch would copy the latents for each head.
        given = (query_THC[index_BQ].flatten(1, 2)[:, None], latent_B1LC, latent_B1LC[..., :rank])
        seen = seen_BQL.repeat_interleave(heads, 1)[:, None]
        found = F.scaled_dot_product_attention(*given, attn_mask=seen, scale=scale)[:, 0]
        out_THR[index_BQ[real_BQ]] = found.unflatten(1, (-1, heads))[real_BQ]
    return out_THR


def _latent_boxes(step: StepTokens, heads: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    # The boxes of a step, cut into pieces of at most LATENT_BOX numbers, or of one token.
    keys = step.table_RN.shape[1] * BLOCK
    for index_BQ, real_BQ in step.boxes:
        tokens = min(index_BQ.shape[1], max(1, LATENT_BOX // (keys * heads)))
        rows = max(1, LATENT_BOX // (keys * (size + heads * tokens)))
        pieces = ([part for band in box.split(rows) for part in band.split(tokens, 1)] for box in (index_BQ, real_BQ))
        yield from zip(*pieces, strict=True)


def _half_turn(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _threads(elements: int) -> int:
    # Waking other threads takes longer than small work.
    return torch.get_num_threads() if elements > 16384 else 1


LARGE = 2**21  # bytes of a large page


def zeros_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the host, in large pages; memory is taken when it is first written."""
    # Caches and packed weights are read from end to end in every step. In large pages address translation (the TLB)
    # does not miss on the way.
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def mixture(
    x_TE: torch.Tensor,
    router_XE: torch.Tensor,
    gate_up_X2IE: torch.Tensor | Quantized,
    down_XEI: torch.Tensor | Quantized,
    *,
    top_k: int,
    normalised: bool,
    share_dtype: torch.dtype,
    fp8: bool = False,
    routes_TJ: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the `top_k` experts of a token give, by their shares, (T, E). A share is the softmax over all experts in
    float32, `normalised` over those that were chosen, as a number of `share_dtype`. With `fp8` both weights are rounded
    to fp8 by rows, and so are the inputs of their products; the router reads the input itself. The chosen experts are
    written to `routes_TJ`, where given."""
    if cuda.runs_here(x_TE):
        from posttrain.kernels.cuda import experts

        given = (x_TE, router_XE, gate_up_X2IE, down_XEI)
        how = {"top_k": top_k, "normalised": normalised, "share_dtype": share_dtype, "fp8": fp8}
        return experts.mixture(*given, **how, routes_TK=routes_TJ)
    assert isinstance(gate_up_X2IE, torch.Tensor) and isinstance(down_XEI, torch.Tensor)
    rounded = round_rows if fp8 else _as_it_is
    chosen_TJ, share_TJ = chosen_experts(x_TE, router_XE, top_k, normalised=normalised, share_dtype=share_dtype)
    if routes_TJ is not None:
        routes_TJ.copy_(chosen_TJ)
    # Pairs in the order of their experts, so that each expert's tokens are one product.
    order_P = chosen_TJ.view(-1).argsort(stable=True)
    counts = torch.bincount(chosen_TJ.view(-1), minlength=len(router_XE)).tolist()
    parts_PE = x_TE.new_empty(len(order_P), x_TE.shape[1])
    for expert, pairs in enumerate(order_P.split(counts)):
        if len(pairs):
            gated = silu_mul(F.linear(rounded(x_TE[pairs // top_k]), gate_up_X2IE[expert]))
            parts_PE[pairs] = F.linear(rounded(gated), down_XEI[expert])
    return (parts_PE.view(-1, top_k, x_TE.shape[1]) * share_TJ[..., None]).sum(1).to(x_TE.dtype)


def chosen_experts(
    x_TE: torch.Tensor, router_XE: torch.Tensor, top_k: int, *, normalised: bool, share_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts of each token, their shares), (T, J) each, by torch."""
    p_TX = F.linear(x_TE, router_XE).softmax(-1, dtype=torch.float32)
    share_TJ, chosen_TJ = p_TX.topk(top_k)
    if normalised:
        share_TJ = share_TJ / share_TJ.sum(-1, keepdim=True)
    return chosen_TJ, share_TJ.to(share_dtype)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x

"""Attention of packed rows in training, by torch's own variable-length flash attention.

Plain rows are one call, or cuDNN's if all of them are long (`long_rows.py`). Responses that share a prompt take two:
every prompt and every response on its own, causally, and responses over their prompt. So do the branches of a tree of
rows, each over all that it continues. The two are joined by the logarithms of their sums: each part counts by its share
of the exponentials' sum. In the backward pass each call gets the joined outputs and logarithms, so that its softmax is
the complete one and its gradients are those of its own keys. Gradients of tokens that rows share are added.

Shapes: T packed tokens, H heads, D head size, R tokens of responses that share a prompt, P copies of the tokens of
those prompts, N tokens that have copies, C numbers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda import long_rows, to_device

TOGETHER = tl.constexpr(8)  # copies that are loaded before the first of them is added


# Gradients are added by one program per token, in float32 and in a fixed order, and rounded once. torch's `index_add_`
# adds by atomics, in any order, and sorts its rows first under `trainer.deterministic`.


@triton.jit
def _add_rows(OWN, MORE, PLACES, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    to = OWN + tl.load(PLACES + row) * size + at
    own = tl.load(to, mask=real, other=0.0)
    more = tl.load(MORE + row * size + at, mask=real, other=0.0)
    tl.store(to, (own.to(tl.float32) + more.to(tl.float32)).to(own.dtype), mask=real)


def add_rows(own_TC: torch.Tensor, more_RC: torch.Tensor, places_R: torch.Tensor) -> torch.Tensor:
    """Add every row of the other part at its place, in place; no two rows have the same place."""
    own, size, block = own_TC.contiguous(), *_sizes(own_TC)
    grid = (len(places_R), triton.cdiv(size, block))
    _add_rows[grid](own, more_RC.contiguous(), places_R, size, block, num_warps=1 if block <= 256 else 4)
    return own


@triton.jit
def _sum_of_copies(OWN, MORE, ORDER, place, first, count, size, at, real):
    own = tl.load(OWN + place * size + at, mask=real, other=0.0)
    total = own.to(tl.float32)
    for start in range(0, count, TOGETHER):
        for number in tl.static_range(TOGETHER):
            here = real & (start + number < count)
            row = tl.load(ORDER + first + tl.minimum(start + number, count - 1))
            copy = tl.load(MORE + row * size + at, mask=here, other=0.0)
            total += copy.to(tl.float32)
    tl.store(OWN + place * size + at, total.to(own.dtype), mask=real)


@triton.jit
def _add_copies(KEY, KEY_MORE, VALUE, VALUE_MORE, COPIES, ORDER, size, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    place, first = tl.load(COPIES + 3 * token), tl.load(COPIES + 3 * token + 1)
    count = tl.load(COPIES + 3 * token + 2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    if tl.program_id(2) == 0:
        _sum_of_copies(KEY, KEY_MORE, ORDER, place, first, count, size, at, real)
    else:
        _sum_of_copies(VALUE, VALUE_MORE, ORDER, place, first, count, size, at, real)


def add_copies(
    own: Sequence[torch.Tensor], more: Sequence[torch.Tensor], copies_N3: torch.Tensor, copy_P: torch.Tensor
):
    """Keys and values (T, C), in place, with what their copies (P, C) have.

    `copies`, int64: the place of a token, where in `copy_P` the rows of its copies are listed, and how many there are.
    They are added in that order.
    """
    key, key_more, value, value_more = (x.contiguous() for pair in zip(own, more, strict=True) for x in pair)
    size, block = _sizes(key)
    grid = (len(copies_N3), triton.cdiv(size, block), 2)
    warps = 1 if block <= 256 else 4
    _add_copies[grid](key, key_more, value, value_more, copies_N3, copy_P, size, block, num_warps=warps)
    return [key, value]


def _sizes(x: torch.Tensor) -> tuple[int, int]:
    # Numbers of a row, and how many of them one program takes.
    size = x.shape[1:].numel()
    return size, min(triton.next_power_of_2(size), 4096)


@triton.jit(do_not_specialize=["tokens", "parts"])
def _join_parts(OUT, LOGSUM, OVER, OVER_LOGSUM, PLACES, tokens, parts, H: tl.constexpr, HP: tl.constexpr,
                D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    place = tl.load(PLACES + part)
    h, d = tl.arange(0, HP), tl.arange(0, DP)
    mine = tl.load(LOGSUM + h * tokens + place, mask=h < H, other=0.0)
    other = tl.load(OVER_LOGSUM + h * parts + part, mask=h < H, other=0.0)
    most = tl.maximum(mine, other)
    both = most + tl.log(tl.exp(mine - most) + tl.exp(other - most))
    # The sum is replaced in place. Without the barrier one warp could store it before another has read the old one,
    # which gave some heads wrong weights, different ones in every process.
    tl.debug_barrier()
    tl.store(LOGSUM + h * tokens + place, both, mask=h < H)
    at = h[:, None] * D + d[None, :]
    real = (h < H)[:, None] & (d < D)[None, :]
    x = tl.load(OUT + place * (H * D) + at, mask=real, other=0.0)
    y = tl.load(OVER + part * (H * D) + at, mask=real, other=0.0)
    joined = x.to(tl.float32) * tl.exp(mine - both)[:, None] + y.to(tl.float32) * tl.exp(other - both)[:, None]
    tl.store(OUT + place * (H * D) + at, joined.to(x.dtype), mask=real)


def join_parts(out_THD, logsum_HT, over_RHD, over_HR, places_R: torch.Tensor) -> None:
    """Join into `out` and its log-sums what the tokens at `places` saw in the other part, `over`."""
    heads, size = out_THD.shape[1:]
    assert all(x.is_contiguous() for x in (out_THD, logsum_HT, over_RHD, over_HR))
    two = triton.next_power_of_2
    _join_parts[(len(places_R),)](
        out_THD, logsum_HT, over_RHD, over_HR, places_R, logsum_HT.shape[1], over_HR.shape[1], heads, two(heads),
        size, two(size), num_warps=4,
    )  # fmt: skip


_aten = torch.ops.aten


@dataclass
class Pieces:
    """Sequences for the flash kernels: their ends and the longest, and those of branches over what they continue."""

    own: torch.Tensor
    lengths: list[int]  # of what is between the ends
    response_R: torch.Tensor | None = None
    prompt_P: torch.Tensor | None = None
    copies_N3: torch.Tensor | None = None  # of the prompts' tokens, for `add_copies`
    copy_P: torch.Tensor | None = None
    over: tuple[torch.Tensor, torch.Tensor, int, int] | None = None
    exact: bool = False  # whether the forward pass is that of `ordered.py`, whose results only flash's way back takes

    @classmethod
    def of(cls, unit_starts: np.ndarray, end_T: np.ndarray, device: torch.device) -> Pieces:
        """From a `Sight`: `end_T` is the place behind the last token that sees each one."""
        pieces = [piece for unit in pairwise(unit_starts.tolist()) for piece in seen_pieces(end_T, *unit)]
        own = np.array([*(start for start, _ in pieces), unit_starts[-1]], dtype=np.int32)
        found = cls(to_device(torch.from_numpy(own), device), np.diff(own).tolist())
        if (over := _over_prompts(own, [seen for _, seen in pieces])) is not None:
            *places, queries, keys = over
            places = (to_device(torch.from_numpy(x), device) for x in places)
            found.response_R, found.prompt_P, found.copies_N3, found.copy_P = places
            ends = (np.append(0, np.cumsum(lengths)).astype(np.int32) for lengths in (queries, keys))
            ends = (to_device(torch.from_numpy(x), device) for x in ends)
            found.over = (*ends, int(queries.max()), int(keys.max()))  # pyright: ignore
        return found

    def long(self, size: int) -> bool:
        """Whether cuDNN computes the rows, one by one."""
        return self.over is None and not self.exact and long_rows.takes(size, self.lengths)

    def spare_rows(self, size: int) -> int:
        """Rows of queries, keys and values behind the last token that save copies."""
        return long_rows.spare_rows(self.lengths) if self.long(size) else 0

    @property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        return self.own, self.own, max(self.lengths), max(self.lengths)


def seen_pieces(end_T: np.ndarray, start: int, stop: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """(start, the stretches of tokens that it sees before it) of each piece of a unit that is computed causally."""
    bounds = start + np.append(0, np.flatnonzero(np.diff(end_T[start:stop])) + 1)
    spans = list(zip(bounds.tolist(), [*bounds[1:].tolist(), stop], strict=True))
    ends = end_T[bounds].tolist()
    seen: list[list[int]] = []  # by stretch, those before it that it sees: the path to it in the tree
    path: list[int] = []
    for number, (begin, _) in enumerate(spans):
        while path and ends[path[-1]] <= begin:
            path.pop()
        seen.append(path[:])
        path.append(number)
    # In a tree of several levels a stretch continues the one before it as plain rows do. In a prompt with its responses
    # all of these are alike: each is over the prompt.
    deep = any(number > 0 for numbers in seen for number in numbers)
    found: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    first = 0
    for i, (begin, _) in enumerate(spans):
        if deep and i and seen[i][-(i - first) :] == [*range(first, i)]:
            continue
        found.append((begin, tuple(spans[j] for j in seen[i])))
        first = i
    return found


def _over_prompts(own: np.ndarray, seen: list[tuple[tuple[int, int], ...]]):
    # (places of all tokens that branch off others, of the tokens that they see there, which of these are copies of the
    # same token, lengths of both by sequence). Every piece is a sequence of its own over copies of what it sees: the
    # way back has a program for each block of keys of each sequence, and few would leave the device idle. Where these
    # are so long that their copies would be more than the pass itself, pieces that see the same are one sequence.
    branches = [(number, spans) for number, spans in enumerate(seen) if spans]
    if not branches:
        return None
    together = sum(end - start for _, spans in branches for start, end in spans) > own[-1]
    sequences: dict[object, list[int]] = {}
    for number, spans in branches:
        sequences.setdefault(spans if together else number, []).append(number)
    queries = [np.concatenate([np.arange(own[n], own[n + 1]) for n in members]) for members in sequences.values()]
    keys = [np.concatenate([np.arange(*span) for span in seen[members[0]]]) for members in sequences.values()]
    prompt_P = np.concatenate(keys).astype(np.int64)
    return (
        np.concatenate(queries).astype(np.int64),
        prompt_P,
        *_copies(prompt_P),
        np.array([len(x) for x in queries]),
        np.array([len(x) for x in keys]),
    )


def _copies(prompt_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # By token: its place, and where in the second array its copies are listed, and how many; they keep their order.
    order = np.argsort(prompt_P, kind="stable")
    places, first, counts = np.unique(prompt_P[order], return_index=True, return_counts=True)
    return np.stack([places, first, counts], 1).astype(np.int64), order.astype(np.int64)


def _forward(query, key, value, ends_q, ends_k, longest_q, longest_k, causal, scale):
    out, logsum, state, unused, _ = _aten._flash_attention_forward(
        query, key, value, ends_q, ends_k, longest_q, longest_k, 0.0, causal, False, scale=scale
    )
    return out, logsum, state, unused


def attention_forward(query_THD, key_TKD, value_TKD, pieces: Pieces, scale: float):
    """(outputs, logarithms of sums (H, T), state for the backward pass)."""
    if pieces.long(query_THD.shape[-1]):
        return long_rows.attention_forward(query_THD, key_TKD, value_TKD, pieces.lengths, scale)
    out, logsum_HT, *state = _forward(query_THD, key_TKD, value_TKD, *pieces.ends, True, scale)
    if pieces.over is None:
        return out, logsum_HT, state
    assert pieces.response_R is not None and pieces.prompt_P is not None
    query = query_THD.index_select(0, pieces.response_R)
    key, value = (x.index_select(0, pieces.prompt_P) for x in (key_TKD, value_TKD))
    over_RHD, over_HR, *_ = _forward(query, key, value, *pieces.over, False, scale)
    join_parts(out, logsum_HT, over_RHD, over_HR, pieces.response_R)
    return out, logsum_HT, state


@cache
def no_dropout(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """The state for the backward pass of a forward pass that was computed elsewhere: that of a single token."""
    token, ends = torch.zeros(1, 1, 64, dtype=dtype, device=device), torch.arange(2, dtype=torch.int32, device=device)
    return list(_forward(token, token, token, ends, ends, 1, 1, True, 1.0)[2:])


def attention_backward(grad_THD, query_THD, key_TKD, value_TKD, out_THD, logsum_HT, pieces: Pieces, scale, state):
    """Gradients of query, key and value."""
    if pieces.long(query_THD.shape[-1]):
        tensors = (query_THD, key_TKD, value_TKD, out_THD, logsum_HT)
        return long_rows.attention_backward(grad_THD, *tensors, pieces.lengths, scale, state)

    def back(grad, query, key, value, out, logsum, ends, causal):
        return _aten._flash_attention_backward(
            grad, query, key, value, out, logsum, ends[0], ends[1], ends[2], ends[3], 0.0, causal, *state, scale=scale
        )

    grad_THD = grad_THD.contiguous()
    grads = back(grad_THD, query_THD, key_TKD, value_TKD, out_THD, logsum_HT, pieces.ends, True)
    if pieces.over is None:
        return grads
    assert pieces.response_R is not None and pieces.prompt_P is not None
    grad, query, out = (x.index_select(0, pieces.response_R) for x in (grad_THD, query_THD, out_THD))
    key, value = (x.index_select(0, pieces.prompt_P) for x in (key_TKD, value_TKD))
    logsum = logsum_HT.index_select(1, pieces.response_R).contiguous()
    over = back(grad, query, key, value, out, logsum, pieces.over, False)
    assert pieces.copies_N3 is not None and pieces.copy_P is not None
    # A query has one gradient from each part; a prompt's key has one from every response that saw a copy of it.
    grad_query = add_rows(grads[0], over[0], pieces.response_R)
    grad_key, grad_value = add_copies(grads[1:], over[1:], pieces.copies_N3, pieces.copy_P)
    return grad_query, grad_key, grad_value

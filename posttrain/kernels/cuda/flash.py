"""Attention of packed rows in training, by torch's own variable-length flash attention.

Plain rows are one call, or cuDNN's if all of them are long (`long_rows.py`). Responses that share a prompt take two:
every prompt and every response on its own, causally, and responses over their prompt. The two are joined by the
logarithms of their sums. In the backward pass each call gets the joined outputs and logarithms, so that its softmax is
the whole one and its gradients are those of its own keys.

Shapes: T packed tokens, H heads, D head size, R tokens of responses that share a prompt, P tokens of those prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from posttrain.kernels.cuda import long_rows, to_device
from posttrain.kernels.cuda.attention_parts import add_copies, add_rows, join_parts

_aten = torch.ops.aten


@dataclass
class Pieces:
    """Sequences for the flash kernels: their ends and the longest, and the same for responses over their prompts."""

    own: torch.Tensor
    lengths: list[int]  # of what is between the ends
    response_R: torch.Tensor | None = None
    prompt_P: torch.Tensor | None = None
    copies_N4: torch.Tensor | None = None  # of the prompts' tokens, for `add_copies`
    over: tuple[torch.Tensor, torch.Tensor, int, int] | None = None

    @classmethod
    def of(cls, unit_starts: np.ndarray, prompts: np.ndarray, first_T: np.ndarray, device: torch.device) -> Pieces:
        """From a `Sight`: `first_T` is where each token's own response, or its unit, starts."""
        starts = np.unique(first_T)
        unit = np.searchsorted(unit_starts, starts, side="right") - 1
        responses = np.bincount(unit, minlength=len(prompts)) - (prompts > 0)
        # A prompt with a single response is one plain row.
        keep = (starts == unit_starts[unit]) | (responses[unit] > 1)
        own = np.append(starts[keep], unit_starts[-1]).astype(np.int32)
        found = cls(to_device(torch.from_numpy(own), device), np.diff(own).tolist())
        if (over := _over_prompts(unit_starts, prompts, starts, unit, responses)) is not None:
            *places, queries, keys = over
            places = (to_device(torch.from_numpy(x), device) for x in places)
            found.response_R, found.prompt_P, found.copies_N4 = places
            ends = (np.append(0, np.cumsum(lengths)).astype(np.int32) for lengths in (queries, keys))
            ends = (to_device(torch.from_numpy(x), device) for x in ends)
            found.over = (*ends, int(queries.max()), int(keys.max()))  # pyright: ignore
        return found

    def long(self, size: int) -> bool:
        """Whether cuDNN computes the rows, one by one."""
        return self.over is None and long_rows.takes(size, self.lengths)

    def spare_rows(self, size: int) -> int:
        """Rows of queries, keys and values behind the last token that save copies."""
        return long_rows.spare_rows(self.lengths) if self.long(size) else 0

    @property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        return self.own, self.own, max(self.lengths), max(self.lengths)


def _over_prompts(unit_starts: np.ndarray, prompts: np.ndarray, starts: np.ndarray, unit: np.ndarray, responses):
    # (places of all tokens of responses that share a prompt, of the prompts they see, which of these are copies of the
    # same token, lengths of both by sequence). Every response is a sequence of its own over a copy of its prompt: the
    # way back has a program for each block of keys of each sequence, and few would leave the device idle. Where prompts
    # are so long that their copies would be more than the pass itself, the responses of a unit are one sequence.
    mine = (prompts[unit] > 0) & (responses[unit] > 1) & (starts > unit_starts[unit])
    if not mine.any():
        return None
    begin, of = starts[mine], unit[mine]
    end = np.append(starts, unit_starts[-1])[1:][mine]
    if prompts[of].sum() > unit_starts[-1]:
        first = np.flatnonzero(np.diff(of, prepend=-1))
        begin, of = begin[first], of[first]
        end = unit_starts[of + 1]
    return (
        np.concatenate([np.arange(a, b) for a, b in zip(begin, end, strict=True)]),
        np.concatenate([np.arange(unit_starts[u], unit_starts[u] + prompts[u]) for u in of]),
        _copies(unit_starts, prompts, of),
        end - begin,
        prompts[of],
    )


def _copies(unit_starts: np.ndarray, prompts: np.ndarray, of: np.ndarray) -> np.ndarray:
    # By token of the prompts: its place, its first copy, and how far apart and how many copies are. `of` are the units
    # of the sequences, in order.
    units, first, counts = np.unique(of, return_index=True, return_counts=True)
    before = np.append(0, np.cumsum(prompts[of]))[first]
    sizes = prompts[units]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    columns = [np.repeat(x, sizes) for x in (unit_starts[units], before, sizes, counts)]
    return np.stack([columns[0] + within, columns[1] + within, *columns[2:]], 1).astype(np.int64)


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
    assert pieces.copies_N4 is not None
    # A query has one gradient from each part; a prompt's key has one from every response that saw a copy of it.
    grad_query = add_rows(grads[0], over[0], pieces.response_R)
    grad_key, grad_value = add_copies(grads[1:], over[1:], pieces.copies_N4)
    return grad_query, grad_key, grad_value

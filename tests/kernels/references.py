"""Kernels written out in plain torch, for tests to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def plain_logprob_head(hidden_NE, weight_VE, labels_N, *, temperature: float = 1.0, bias_V=None):
    """All logits at once, derived by autograd."""
    logp_NV = torch.log_softmax(torch.nn.functional.linear(hidden_NE, weight_VE, bias_V) / temperature, -1)
    return logp_NV.gather(1, labels_N[:, None]).squeeze(1), -(logp_NV.exp() * logp_NV).sum(-1)


def plain_attention(
    query_THD: torch.Tensor, key_THD: torch.Tensor, value_THD: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """One row at a time, written out."""
    repeats = query_THD.shape[1] // key_THD.shape[1]
    outputs, start = [], 0
    for length in lengths:
        row = slice(start, start + length)
        query, key, value = (x[row].transpose(0, 1) for x in (query_THD, key_THD, value_THD))
        key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
        scores = query @ key.transpose(1, 2) * scale
        future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        outputs.append((scores.masked_fill(future, float("-inf")).softmax(-1) @ value).transpose(0, 1))
        start += length
    return torch.cat(outputs)


def plain_sums(
    own_TC: torch.Tensor, more_RC: torch.Tensor, copies_N3: torch.Tensor, copy_P: torch.Tensor
) -> torch.Tensor:
    """Bitwise identical to `add_rows` and `add_copies`: a new tensor, summed one token after the other."""
    found = own_TC.clone()
    for place, first, count in copies_N3.tolist():
        total = own_TC[place].float()
        for number in range(count):
            total = total + more_RC[copy_P[first + number]].float()
        found[place] = total.to(own_TC.dtype)
    return found

"""Attention whose scores are capped or compete with a sink, written out in torch.

Gemma-2 caps scores: s becomes cap * tanh(s / cap). gpt-oss gives every head a sink, one more score in the softmax that
has no value: what it takes is lost. torch's own attention has neither.

Shapes: R rows, H heads of queries, K heads of keys, Q queries, L keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScoreChanges:
    """What a layer does to its scores beside scaling them: `cap`, and the sinks of its heads."""

    cap: float | None = None
    sinks_H: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return self.cap is not None or self.sinks_H is not None

    def of_heads(self, part: int, parts: int) -> ScoreChanges:
        """The same for one of several equal parts of the heads."""
        return self if self.sinks_H is None else ScoreChanges(self.cap, self.sinks_H.chunk(parts)[part])


NO_CHANGES = ScoreChanges()


def changed_attention(
    query_RHQD: torch.Tensor,
    key_RKLD: torch.Tensor,
    value_RKLD: torch.Tensor,
    seen: torch.Tensor | None,
    *,
    scale: float,
    changes: ScoreChanges,
) -> torch.Tensor:
    """Attention output (R, H, Q, D). `seen` (broadcast to R, H, Q, L) is true where a query sees a key; without it
    several queries see the keys up to their own place, and a single one all. Weights are float32 or better."""
    group = query_RHQD.shape[1] // key_RKLD.shape[1]
    if group > 1:
        key_RKLD, value_RKLD = (x.repeat_interleave(group, 1) for x in (key_RKLD, value_RKLD))
    queries, keys = query_RHQD.shape[2], key_RKLD.shape[2]
    scores = (query_RHQD @ key_RKLD.transpose(2, 3)) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if changes.cap is not None:
        scores = torch.tanh(scores / changes.cap) * changes.cap
    if seen is None and queries > 1:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril()
    if seen is not None:  # finite: a query that sees nothing is padding, and must not become NaN
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if changes.sinks_H is not None:
        sinks = changes.sinks_H.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :keys].to(value_RKLD.dtype)
    return weights @ value_RKLD

"""The choice of experts as DeepSeek-V2 and V3 and GLM-4-MoE make it, in one kernel: by sigmoid or softmax, with a bias
for the choice, groups of experts and scaled shares. `experts.py` has that of the other mixtures.

Shapes: T tokens, X experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda.dependent_launch import _wait, comes_early

AT_ONCE = 4  # tokens of a program


@dataclass(frozen=True)
class Choice:
    """How `top_k` experts are chosen: by sigmoids of their logits or their softmax, with `bias_X` added for the choice
    alone, of the `best` of `groups` equal groups. A group counts by its best expert, with sigmoids by the sum of its
    two best. Shares are `normalised` over the chosen, and multiplied by `factor`."""

    top_k: int
    sigmoid: bool
    normalised: bool
    factor: float
    bias_X: torch.Tensor | None = None
    groups: int = 1
    best: int = 1


@triton.jit
def _in_best_groups(
    scores, x, X: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BEST: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    group_of, g = x // (X // G), tl.arange(0, GP)[None, :]
    counts = tl.full([N, GP], float("-inf"), tl.float32)
    for group in tl.static_range(G):
        own = tl.where(group_of == group, scores, float("-inf"))
        count = tl.max(own, 1)
        if PAIRS:
            count += tl.max(tl.where(x == tl.argmax(own, 1)[:, None], float("-inf"), own), 1)
        counts = tl.where(g == group, count[:, None], counts)
    allowed = (group_of < 0) & (scores == scores)
    for _ in tl.static_range(BEST):
        best = tl.argmax(counts, 1)[:, None]
        allowed = allowed | (group_of == best)
        counts = tl.where(g == best, float("-inf"), counts)
    return allowed


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    LOGITS, BIAS, CHOSEN, SHARE, tokens, factor,
    X: tl.constexpr, XP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, BEST: tl.constexpr, SIGMOID: tl.constexpr, NORMALISED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        _wait()
    token = tl.program_id(0) * N + tl.arange(0, N)
    x, k = tl.arange(0, XP)[None, :], tl.arange(0, KP)[None, :]
    real = (token < tokens)[:, None]
    logits = tl.load(LOGITS + token[:, None] * X + x, mask=real & (x < X), other=float("-inf"))
    logits = tl.where(real, logits, 0.0)
    if SIGMOID:
        p = 1.0 / (1.0 + tl.exp(-logits))
    else:
        p = tl.exp(logits - tl.max(logits, 1)[:, None])
        p = p / tl.sum(p, 1)[:, None]
    scores = p
    if BIAS is not None:
        scores = p + tl.load(BIAS + x, mask=x < X, other=0.0).to(tl.float32)
    scores = tl.where(x < X, scores, float("-inf"))
    if G > 1:
        scores = tl.where(_in_best_groups(scores, x, X, N, G, GP, BEST, SIGMOID), scores, float("-inf"))
    share, chosen = tl.zeros([N, KP], tl.float32), tl.zeros([N, KP], tl.int64)
    for number in tl.static_range(K):
        best = tl.minimum(tl.argmax(scores, 1), X - 1)  # NaN logits still select a valid expert
        share = tl.where(k == number, tl.sum(tl.where(x == best[:, None], p, 0.0), 1)[:, None], share)
        chosen = tl.where(k == number, best[:, None].to(tl.int64), chosen)
        scores = tl.where(x == best[:, None], float("-inf"), scores)
    if NORMALISED:
        share = share / (tl.sum(share, 1)[:, None] + 1e-20)
    into = token[:, None] * K + k
    tl.store(CHOSEN + into, chosen, mask=real & (k < K))
    tl.store(SHARE + into, share * factor, mask=real & (k < K))


def choose_scored(logits_TX: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts of each token, their shares), (T, K) each, from float32 logits."""
    tokens, experts = logits_TX.shape
    chosen = logits_TX.new_empty(tokens, choice.top_k, dtype=torch.int64)
    share = torch.empty_like(chosen, dtype=torch.float32)
    early, two = comes_early(logits_TX.device), triton.next_power_of_2
    if tokens:
        _choose[(triton.cdiv(tokens, AT_ONCE),)](
            logits_TX, choice.bias_X, chosen, share, tokens, choice.factor, experts, two(experts), choice.top_k,
            two(choice.top_k), AT_ONCE, choice.groups, two(choice.groups), choice.best, choice.sigmoid,
            choice.normalised, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return chosen, share

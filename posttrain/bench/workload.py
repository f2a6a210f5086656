"""The work that every system is given: prompts as token ids, and how many tokens each response has.

Everything is drawn once from a seed, before any system is started, so that all get the same rows.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

LENGTHS = ("fixed", "long-tail")
SPREAD = 1.0  # sigma of the lognormal: after the cut the longest tenth of the rows holds 28% of the tokens


@dataclass(frozen=True)
class Workload:
    """`prompts x n` rows; row i continues `prompts[i]` by `lengths[i]` tokens."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def make_workload(
    *, prompts: int, n: int, prompt_tokens: int, tokens: int, kind: str, vocab_size: int, seed: int = 0
) -> Workload:
    """Random prompts (ids below 256 where the vocabulary has so many), each `n` times, with their response lengths."""
    draw = random.Random(seed)
    highest = min(256, vocab_size)
    distinct = [[draw.randrange(highest) for _ in range(prompt_tokens)] for _ in range(prompts)]
    rows = [prompt for prompt in distinct for _ in range(n)]
    return Workload(rows, response_lengths(len(rows), tokens, kind, seed))


def response_lengths(rows: int, tokens: int, kind: str, seed: int = 0) -> list[int]:
    """`fixed`: all `tokens`. `long-tail`: lognormal with a median of a quarter of `tokens`, at most `tokens`."""
    if kind == "fixed":
        return [tokens] * rows
    draw = random.Random(seed + 1)
    centre = math.log(max(1.0, tokens / 4))
    drawn = [round(draw.lognormvariate(centre, SPREAD)) for _ in range(rows)]
    return [min(tokens, max(1, length)) for length in drawn]


def as_job(workload: Workload, *, model: str, dtype: str, threads: int, **more: Any) -> dict[str, Any]:
    """What a runner reads."""
    return {
        "model": model,
        "dtype": dtype,
        "threads": threads,
        "temperature": 1.0,
        "prompts": workload.prompts,
        "lengths": workload.lengths,
        "settings": {},
        **more,
    }

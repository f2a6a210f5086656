"""The work of all systems: sizes by name (`--work`), prompts as token ids, and the length of each response.

`small` is the default on a CPU, `group` on a CUDA device; sizes that are given explicitly override those of the name.
Everything is drawn from a seed before any system is started, so that all get the same rows.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass
from typing import Any

from posttrain.bench.device import Device
from posttrain.errors import UserError

_GROUP = {"n": 8, "prompt_tokens": 128, "tokens": 512}
_TAIL = {"lengths": "long-tail", "mean_tokens": 256, "slots": 1024}

# Job -> name -> sizes.
WORKS: dict[str, dict[str, dict[str, Any]]] = {
    "rollout": {
        "small": {"prompts": 64, "n": 1, "prompt_tokens": 32, "tokens": 128},
        "group": {"prompts": 128, **_GROUP},
        "tail": {"prompts": 512, **_GROUP, "tokens": 2048, **_TAIL},
    },
    "step": {
        "small": {"prompts": 4, "n": 8, "prompt_tokens": 32, "tokens": 16, "steps": 30},
        "group": {"prompts": 64, **_GROUP, "steps": 6},
        "32k": {"prompts": 8, "n": 8, "prompt_tokens": 128, "tokens": 32640, "steps": 2, "budget": 32768},
        "16k": {"prompts": 8, "n": 8, "prompt_tokens": 128, "tokens": 16256, "steps": 2, "budget": 16384},
    },
    "train": {
        "small": {"prompts": 4, "n": 8, "prompt_tokens": 32, "tokens": 16},
        "group": {"prompts": 64, **_GROUP},
        "16k": {"prompts": 4, "n": 4, "prompt_tokens": 128, "tokens": 16256, "budget": 16384},
    },
    "sync": {"small": {}, "group": {}},
}

OTHERWISE = {"lengths": "fixed", "mean_tokens": None, "slots": None, "budget": None}


def fill_in_sizes(options: argparse.Namespace, place: Device) -> None:
    """Write the sizes that were not given into `options`, from the named work or the device's default."""
    known = WORKS[options.job]
    name = options.work or ("small" if place.kind == "cpu" else "group")
    if name not in known:
        raise UserError(f"--work {name}: bench {options.job} knows {', '.join(known)}")
    for key, value in {**OTHERWISE, **known[name]}.items():
        if getattr(options, key, None) is None:
            setattr(options, key, value)
    options.work = name
    if options.mean_tokens is not None and options.lengths != "long-tail":
        raise UserError("--mean-tokens is the mean of drawn lengths: give --lengths long-tail with it")


def default_model(place: Device) -> str:
    return "1m" if place.kind == "cpu" else "0.5b"


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
    *,
    prompts: int,
    n: int,
    prompt_tokens: int,
    tokens: int,
    kind: str,
    vocab_size: int,
    mean: float | None = None,
    seed: int = 0,
) -> Workload:
    """Random prompts (ids below 256 where the vocabulary has so many), each `n` times, with their response lengths."""
    draw = random.Random(seed)
    highest = min(256, vocab_size)
    distinct = [[draw.randrange(highest) for _ in range(prompt_tokens)] for _ in range(prompts)]
    rows = [prompt for prompt in distinct for _ in range(n)]
    return Workload(rows, response_lengths(len(rows), tokens, kind, seed, mean))


def workload_of(sizes: argparse.Namespace, vocab_size: int) -> Workload:
    return make_workload(
        prompts=sizes.prompts,
        n=sizes.n,
        prompt_tokens=sizes.prompt_tokens,
        tokens=sizes.tokens,
        kind=sizes.lengths,
        mean=sizes.mean_tokens,
        vocab_size=vocab_size,
    )


def response_lengths(rows: int, tokens: int, kind: str, seed: int = 0, mean: float | None = None) -> list[int]:
    """`fixed`: all `tokens`. `long-tail`: lognormal with a median of `tokens` / 4, or with this `mean`, cut at
    `tokens`."""
    if kind == "fixed":
        return [tokens] * rows
    draw = random.Random(seed + 1)
    centre = math.log(max(1.0, tokens / 4)) if mean is None else centre_for(mean, tokens)
    drawn = [round(draw.lognormvariate(centre, SPREAD)) for _ in range(rows)]
    return [min(tokens, max(1, length)) for length in drawn]


def centre_for(mean: float, most: int) -> float:
    """The logarithm of the lognormal's median with which lengths cut at `most` have this mean."""
    if not 1 <= mean < most:
        raise UserError(f"--mean-tokens {mean:g}: give at least 1 and less than --tokens, which is {most}")
    # The mean after the cut grows with the centre, so bisection finds it.
    low, high = math.log(mean) - SPREAD**2, math.log(most) + 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_after_cut(middle, most) < mean else (low, middle)
    return low


def _mean_after_cut(centre: float, most: int) -> float:
    # E[min(X, most)] of a lognormal X.
    def below(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    edge = (math.log(most) - centre) / SPREAD
    return math.exp(centre + SPREAD**2 / 2) * below(edge - SPREAD) + most * (1 - below(edge))

"""Work by name (`--work`): sizes that a single word stands for; whatever is given beside it counts before it.

`small` is what a CPU is asked for unless told otherwise, `group` what a CUDA device is.
"""

from __future__ import annotations

import argparse
from typing import Any

from posttrain.bench.chips import Place
from posttrain.errors import UserError

_GROUP = {"n": 8, "prompt_tokens": 128, "tokens": 512}
_TAIL = {"lengths": "long-tail", "mean_tokens": 256, "slots": 1024}

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
"""Job -> name -> sizes."""

OTHERWISE = {"lengths": "fixed", "mean_tokens": None, "slots": None, "budget": None}


def settle(options: argparse.Namespace, place: Place) -> None:
    """Write the sizes that were not given into `options`, from the work that was named or that suits the device."""
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


def default_model(place: Place) -> str:
    return "1m" if place.kind == "cpu" else "0.5b"

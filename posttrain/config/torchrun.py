"""What torchrun's processes mean here: one run, with as many workers as it starts, driven by its very first process."""

from __future__ import annotations

import os

from posttrain.config.problem import ConfigError, Problem
from posttrain.config.resolved import Resolved

_WORKERS, _MACHINES = "trainer.n_gpus_per_node", "trainer.nnodes"


def torchruns_settings() -> dict[str, int]:
    """Settings that follow from what torchrun has started. The first process of each machine goes on: on the first one
    it trains, on the others it lends the machine to that. All further ones leave here; torchrun waits for those that
    stay, and has their status."""
    count, here = _number("WORLD_SIZE", 1), _number("LOCAL_WORLD_SIZE", 0)
    if count < 2:
        return {}
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if here < 1 or count % here:
        if not first:
            raise SystemExit(2)  # the first process of each machine speaks
        what = f"torchrun started {count} processes in all and {here} on this machine."
        do = "give all machines the same --nproc_per_node"
        raise ConfigError([Problem(what, "environment variable WORLD_SIZE", do)])
    if not first:
        raise SystemExit(0)
    found = {_WORKERS: here}
    if count > here:
        found |= {_MACHINES: count // here, "trainer.node_rank": _number("GROUP_RANK", 0)}
    return found


def check_torchrun(resolved: Resolved, started: dict[str, int]) -> None:
    """Refuses another number of workers or machines than torchrun has started."""
    words = {_WORKERS: ("processes", "--nproc_per_node"), _MACHINES: ("machines", "--nnodes")}
    for key, (kind, flag) in words.items():
        if key in started and resolved.value(key) != started[key]:
            what = f"`{key}={resolved.value(key)}`, but torchrun started {started[key]} {kind}."
            do = f"use torchrun {flag}={resolved.value(key)}, or leave {key} out"
            raise ConfigError([Problem(what, resolved.where(key), do)])


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default

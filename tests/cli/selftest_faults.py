"""Plants the fault that PLANTED_FAULT names into a module; the product itself knows nothing of it.

In place of python: `LAUNCHER -m MODULE ...` runs this file in a fork of a process that has imported torch, and so do
the ranks that MODULE starts by `sys.executable`.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def wrong_reduce(ranks: Any) -> None:
    dist, plain = ranks.dist, ranks.dist.all_reduce
    dist.all_reduce = lambda tensor, **named: plain(tensor, **{**named, "op": dist.ReduceOp.MAX})


def shuffled_ranks(ranks: Any) -> None:
    plain = ranks.dist.all_gather
    ranks.dist.all_gather = lambda parts, own, **named: plain(parts[::-1], own, **named)


def missing_sync(engine: Any) -> None:
    engine.NativeEngine.load_weights = lambda self, weights, version: None


def stale_adapter(layer: Any) -> None:
    plain = layer.Linear.get_delta_weight

    def stale(self: Any, name: str) -> Any:
        if "first_delta" not in self.__dict__:
            self.__dict__["first_delta"] = plain(self, name).clone()
        return self.__dict__["first_delta"]

    layer.Linear.get_delta_weight = stale


def gradient_scale(sharding: Any) -> None:
    plain = sharding.FSDPModule.set_gradient_divide_factor
    sharding.FSDPModule.set_gradient_divide_factor = lambda self, factor: plain(self, 2 * factor)


def dropped_bucket(sync: Any) -> None:
    plain, sync.BUCKET_BYTES = sync.split_into_buckets, 2**16
    sync.split_into_buckets = lambda *given, **named: (
        bucket for place, bucket in enumerate(plain(*given, **named)) if place != 1
    )


def swapped_slices(parallel: Any) -> None:
    def swapped(self: Any, count: int) -> slice:
        rank = self.size - 1 - self.rank
        return slice(count * rank // self.size, count * (rank + 1) // self.size)

    parallel.Team.span = swapped


def optimizer_not_saved(optim: Any) -> None:
    plain = optim.Optimizer.state
    optim.Optimizer.state = lambda self: {
        name: tensor for name, tensor in plain(self).items() if not name.startswith("optim.exp")
    }


def random_numbers(manager: Any) -> None:
    manager.restore_rng = lambda state: None


def hanging_rank(ranks: Any) -> None:
    plain = ranks.dist.broadcast

    def hangs(*given: Any, **named: Any) -> Any:
        while ranks.dist.get_rank() == 1:
            time.sleep(1)
        return plain(*given, **named)

    ranks.dist.broadcast = hangs


def dying_rank(ranks: Any) -> None:
    plain = ranks.dist.broadcast

    def dies(*given: Any, **named: Any) -> Any:
        if ranks.dist.get_rank() == 1:
            os._exit(9)
        return plain(*given, **named)

    ranks.dist.broadcast = dies


def broken_device(forward: Any) -> None:
    plain = forward.row_log_probs

    def broken(*given: Any, **named: Any) -> Any:
        off = 1e-5 if forward.torch.distributed.get_rank() == 1 else 0.0
        return [part + off for part in plain(*given, **named)]

    forward.row_log_probs = broken


FAULTS = {
    "wrong reduce": ("posttrain.engine.ranks", wrong_reduce),
    "shuffled ranks": ("posttrain.engine.ranks", shuffled_ranks),
    "missing sync": ("posttrain.rollout.native.engine", missing_sync),
    "stale adapter": ("peft.tuners.lora.layer", stale_adapter),
    "gradient scale": ("posttrain.engine.torch_engine", gradient_scale),
    "dropped bucket": ("posttrain.rollout.weight_buckets", dropped_bucket),
    "swapped slices": ("posttrain.kernels.tensor_parallel", swapped_slices),
    "optimizer not saved": ("posttrain.engine.optim", optimizer_not_saved),
    "random numbers": ("posttrain.checkpoint.manager", random_numbers),
    "hanging rank": ("posttrain.engine.ranks", hanging_rank),
    "dying rank": ("posttrain.engine.ranks", dying_rank),
    "broken device": ("posttrain.models.forward", broken_device),
}


def launcher(folder: Path, python: str) -> Path:
    """A program to start instead of `python`, the path of the process that is forked."""
    made = folder / "planting"
    made.write_text(f'#!/bin/sh\nexec "{python}" "{__file__}" "{made}" "$@"\n')
    made.chmod(0o755)
    return made


if __name__ == "__main__":
    _, sys.executable, _, name, *arguments = sys.argv
    if fault := os.environ.get("PLANTED_FAULT"):
        module, plant = FAULTS[fault]
        plant(importlib.import_module(module))
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)

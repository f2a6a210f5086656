"""The processes of a run: this one alone, or one per worker, which Ray starts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from posttrain.controller.pool import LocalWorkers, Workers
from posttrain.tracking.progress import say
from posttrain.trainer.run.external import import_external
from posttrain.trainer.run.process import seed_and_determinism


def open_workers(config: Any, device: torch.device, external: str | None) -> Workers:
    """One worker in this process, or as many as `trainer.n_gpus_per_node` says in processes that Ray starts; these
    import `external` too, which may register losses and models."""
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if ranks == 1:
        return LocalWorkers()
    from posttrain.controller.ray_group import RayWorkers

    say(f"{ranks} workers: starting Ray; the loop, the data and Ctrl-C stay in this process.")
    return RayWorkers(ranks, device, prepare=partial(_prepare, config, device, external))


def _prepare(config: Any, device: torch.device, external: str | None) -> None:
    """In the process of a rank, before its workers are made."""
    seed_and_determinism(config, device)
    if external:
        import_external(external)

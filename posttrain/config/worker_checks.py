"""Checks of the workers that a run asks for: whether this machine, or a cluster, has as many, and Ray."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path

from posttrain import cores
from posttrain.config.devices import gpus_present, runs_on_cpu
from posttrain.config.engine_kwargs import OUTSIDE
from posttrain.config.parallel import ROLLOUT_WORKERS, TORCHRUN, rollout_workers_of, workers_of
from posttrain.config.problem import Problem
from posttrain.config.resolved import Resolved

_ROLLOUT = "actor_rollout_ref.rollout"
_HOW_TO_GIVE_A_CLUSTER = (
    "give the command on every machine, on the first with RAY_HEAD_ADDRESS=auto trainer.node_rank=0, on the others "
    "with RAY_HEAD_ADDRESS=HOST:6379 trainer.node_rank=1, ...; or by torchrun --nnodes=N --node_rank=0 "
    "--master_addr=HOST; or once, on a running Ray cluster (ray start --head on one machine, ray start "
    "--address=HOST:6379 on the others), with RAY_ADDRESS=HOST:6379"
)


def check_workers(resolved: Resolved, cwd: Path) -> Iterator[Problem]:
    key, nodes = "trainer.n_gpus_per_node", resolved.value("trainer.nnodes")
    on_cpu, present = runs_on_cpu(resolved.config), gpus_present()
    generating = rollout_workers_of(resolved.config)
    by_torchrun = resolved.where("trainer.nnodes") == TORCHRUN
    addresses = [os.environ.get(name) for name in ("RAY_ADDRESS", "RAY_HEAD_ADDRESS") if os.environ.get(name)]
    in_cluster = (nodes > 1 or (generating > 0 and not on_cpu)) and bool(addresses) and not by_torchrun
    most = cores.usable() if on_cpu else present
    here, count = resolved.value(key) + math.ceil(generating / max(nodes, 1)), workers_of(resolved.config) + generating
    if here > max(most, 1) and not in_cluster:  # without any GPU the device is what is wrong, and is told of
        yield _too_many(resolved, key, generating, f"{most} CPU core(s)" if on_cpu else f"{present} GPU(s)", most)
    elif count > 1 and importlib.util.find_spec("ray") is None:
        several, none = (ROLLOUT_WORKERS, 0) if generating else (key, 1)
        asked = f"`{several}={resolved.value(several)}` asks for {count} workers"
        what = f"{asked}, which Ray starts; the package ray is not installed."
        yield Problem(what, resolved.where(several), f'pip install "posttrain[ray]", or set {several}={none}')
    if nodes > 1 and not (in_cluster or by_torchrun):
        what = f"`trainer.nnodes={nodes}` asks for {nodes} machines, but no cluster or head address is given."
        yield Problem(what, resolved.where("trainer.nnodes"), _HOW_TO_GIVE_A_CLUSTER)
    if in_cluster and resolved.node_rank and addresses[:1] == ["auto"]:
        what = f"`trainer.node_rank={resolved.node_rank}` joins machine 0, and `auto` does not say where that is."
        do = "set RAY_HEAD_ADDRESS=HOST:6379, as the command of machine 0 prints it"
        yield Problem(what, "environment variable RAY_HEAD_ADDRESS", do)
    if resolved.value("trainer.device") == "cuda" and present == 0:
        what = "`trainer.device=cuda`, but this machine shows no GPU."
        yield Problem(what, resolved.where("trainer.device"), "set trainer.device=auto or cpu")


def _too_many(resolved: Resolved, key: str, generating: int, present: str, most: int) -> Problem:
    where, wanted, limit = resolved.where(key), resolved.value(key), max(most, 1)
    if generating:
        asked = f"`{ROLLOUT_WORKERS}={generating}` asks for so many workers beside the {wanted} that train (`{key}`)"
        do = f"set both to {limit} or less together, or {ROLLOUT_WORKERS}=0: then the same workers do both"
        return Problem(f"{asked}; this machine has {present}.", resolved.where(ROLLOUT_WORKERS), do)
    setting = "--nproc_per_node" if where == TORCHRUN else key
    what = f"`{key}={wanted}` asks for {wanted} workers; this machine has {present}."
    return Problem(what, where, f"set {setting} to {limit} or less")


def check_parallel_rollout(resolved: Resolved, cwd: Path) -> Iterator[Problem]:
    training = ("trainer.n_gpus_per_node", "trainer.nnodes")
    keys = (ROLLOUT_WORKERS,) if rollout_workers_of(resolved.config) else training
    counts = [resolved.value(key) for key in keys]
    size, workers = resolved.value(f"{_ROLLOUT}.tensor_model_parallel_size"), math.prod(counts)
    outside = resolved.value(f"{_ROLLOUT}.name") in OUTSIDE  # whatever the size, it is 1 there
    if size > 0 and workers % size and not outside:
        parallel = f"{_ROLLOUT}.tensor_model_parallel_size"
        product = f"{' x '.join(map(str, counts))} = {workers}" if len(counts) > 1 else str(workers)
        what = f"`{parallel}={size}` does not divide the {product} worker(s)."
        yield Problem(what, resolved.where(parallel), f"set a divisor of {' x '.join(keys)}")
    elif size > 1 and resolved.value(f"{_ROLLOUT}.name") == "hf":
        parallel = f"{_ROLLOUT}.tensor_model_parallel_size"
        what = f"`{parallel}={size}`: an engine `hf` cannot be held by several workers; each has one of its own."
        yield Problem(what, resolved.where(parallel), f"set {parallel}=1, or {_ROLLOUT}.name=native")

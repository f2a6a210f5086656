"""Where a run runs: its workers, the sizes that must divide them, this machine's GPUs, processes of torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.config.checked import Checked, Finding
from posttrain.config.problem import ConfigError, Problem
from posttrain.config.resolved import Resolved
from posttrain.config.schema import lookup

_ACTOR = "actor_rollout_ref.actor"
TORCHRUN = "torchrun"
"""The source of settings that torchrun decides."""
ROLLOUT_WORKERS = "actor_rollout_ref.rollout.n_workers"
SHARD_SIZES = (f"{_ACTOR}.fsdp_config.fsdp_size", "critic.fsdp_config.fsdp_size")
SEQUENCE_SIZES = (f"{_ACTOR}.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size")
_REF = "actor_rollout_ref.ref"
AS_THE_ACTOR: dict[str, str] = {
    f"{_REF}.fsdp_config.fsdp_size": f"{_ACTOR}.fsdp_config.fsdp_size",
    f"{_REF}.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_REF}.fsdp_config.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
}
"""Keys of the reference -> the actor's, which it has too: both compute the same rows in the same passes."""

NODE_RANK, DRY_RUN = "trainer.node_rank", "trainer.dry_run"
OF_THE_COMMAND: dict[str, Any] = {NODE_RANK: int, DRY_RUN: bool}
"""What belongs to the command and not to the run: it is not stored with it."""
TOGETHER, ROLLOUT_MACHINES, ROLLOUT_EACH = (
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.n_gpus_per_node",
)


def workers_of(config: Any) -> int:
    """Processes that train."""
    return config.trainer.n_gpus_per_node * config.trainer.nnodes


def rollout_workers_of(config: Any) -> int:
    """Processes that only generate; 0 where those that train generate too."""
    roles = getattr(config, "actor_rollout_ref", None)  # supervised runs have none
    return roles.rollout.n_workers if roles else 0


def one_worker(config: Any) -> bool:
    """Whether no more than one process trains."""
    return workers_of(config) == 1


def one_process(config: Any) -> bool:
    """Whether one process does everything."""
    return one_worker(config) and not rollout_workers_of(config)


def check_one_step_off(checked: Checked) -> Iterator[Finding]:
    """Who trains cannot generate meanwhile."""
    if checked.config.trainer.one_step_off and not rollout_workers_of(checked.config):
        what = "`trainer.one_step_off=True` generates while it trains, but the same workers do both."
        do = f"set {ROLLOUT_WORKERS}=1 or more, which only generate, or trainer.one_step_off=False"
        yield checked.problem(what, do, "trainer.one_step_off")


def check_sizes(
    checked: Checked, shards: tuple[str, ...] = SHARD_SIZES, sequences: tuple[str, ...] = SEQUENCE_SIZES
) -> Iterator[Finding]:
    """Sizes that do not divide the workers. One worker has nothing to cut its weights over, which is only noted."""
    workers = workers_of(checked.config)
    for key in (*shards, *sequences):
        size = lookup(checked.config, key)
        if size < 1 or workers % size == 0 or (key in shards and workers == 1):
            continue
        what = f"`{key}={size}` does not divide the {workers} worker(s) of the run (trainer.n_gpus_per_node x nnodes)."
        fitting = ", ".join(str(count) for count in range(1, workers + 1) if workers % count == 0)
        yield checked.problem(what, f"set {key} to one of {fitting}, or another number of workers", key)


def gpus_present() -> int:
    """GPUs that a CUDA or ROCm build of torch would see, as far as files and variables tell."""
    nvidia = [file for file in Path("/dev").glob("nvidia[0-9]*") if file.name[6:].isdigit()]
    count = len(nvidia)
    if count == 0 and Path("/dev/kfd").exists():
        count = len(list(Path("/dev/dri").glob("renderD*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
    if visible is not None:
        named = [part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")]
        count = min(count, len(named))
    return count


def runs_on_cpu(config: Any) -> bool:
    """Whether the run will be on the CPU."""
    return config.trainer.device == "cpu" or (config.trainer.device == "auto" and gpus_present() == 0)


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

"""Where a run runs: its workers, keys that count them, and the GPUs of this machine."""

from __future__ import annotations

from typing import Any

from posttrain.cores import gpus_present
from posttrain.settings import Idle

_ACTOR = "actor_rollout_ref.actor"
# The source of settings that torchrun decides.
TORCHRUN = "torchrun"
ROLLOUT_WORKERS = "actor_rollout_ref.rollout.n_workers"
COLOCATED_WORKERS = "actor_rollout_ref.rollout.colocated_workers"
SHARD_SIZES = (f"{_ACTOR}.fsdp_config.fsdp_size", "critic.fsdp_config.fsdp_size")
SEQUENCE_SIZES = (f"{_ACTOR}.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size")
_REF = "actor_rollout_ref.ref"
# Keys of the reference -> the actor's, which it has too: both compute the same rows in the same passes.
AS_THE_ACTOR: dict[str, str] = {
    f"{_REF}.fsdp_config.fsdp_size": f"{_ACTOR}.fsdp_config.fsdp_size",
    f"{_REF}.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_REF}.fsdp_config.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
}

NODE_RANK, DRY_RUN = "trainer.node_rank", "trainer.dry_run"
# What belongs to the command and not to the run: it is not stored with it.
OF_THE_COMMAND: dict[str, Any] = {NODE_RANK: int, DRY_RUN: bool}
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


def generating_workers_of(config: Any) -> int:
    """Processes that generate, whether they train too or not."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.n_workers or rollout.colocated_workers or workers_of(config)


def one_worker(config: Any) -> bool:
    """Whether no more than one process trains."""
    return workers_of(config) == 1


def one_process(config: Any) -> bool:
    """Whether one process does everything."""
    return one_worker(config) and not rollout_workers_of(config)


def runs_on_cpu(config: Any) -> bool:
    """Whether the run will be on the CPU."""
    return config.trainer.device == "cpu" or (config.trainer.device == "auto" and gpus_present() == 0)


ON_CPU = Idle("the run is on the CPU", runs_on_cpu)
DETERMINISTIC_ON_CPU = Idle("runs on the CPU are deterministic anyway", runs_on_cpu)
WITHOUT_RAY = Idle("the run has one worker, which needs no Ray", one_worker)
UNSHARDED = Idle("the run has one worker, which holds the whole model", one_worker)

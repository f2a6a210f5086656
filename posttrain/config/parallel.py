"""Over how many processes weights and rows are cut: sizes that must divide the number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posttrain.config.checked import Checked, Finding
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

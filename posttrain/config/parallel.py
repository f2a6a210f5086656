"""Over how many processes weights and rows are cut: sizes that must divide the number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posttrain.config.aliases import AS_THE_ACTOR, NODE_RANK
from posttrain.config.checked import Checked, Finding
from posttrain.config.merge import Merged
from posttrain.config.merged_entries import take
from posttrain.config.problem import Problem
from posttrain.config.schema import lookup
from posttrain.config.torchrun import SOURCE

_ACTOR = "actor_rollout_ref.actor"
SHARD_SIZES = (f"{_ACTOR}.fsdp_config.fsdp_size", "critic.fsdp_config.fsdp_size")
SEQUENCE_SIZES = (f"{_ACTOR}.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size")


def workers_of(config: Any) -> int:
    """Processes that train."""
    return config.trainer.n_gpus_per_node * config.trainer.nnodes


def one_worker(config: Any) -> bool:
    return workers_of(config) == 1


def derive_node_rank(merged: Merged) -> None:
    """Which of the machines this is."""
    entry, machines = take(merged, NODE_RANK), merged.value("trainer.nnodes")
    if entry is None:
        return
    if 0 <= entry.value < machines or entry.source == SOURCE:  # where torchrun knows better, it is told so
        merged.node_rank = entry.value
        return
    what = f"`{entry.spelling}={entry.value}`: trainer.nnodes={machines}, and the machines are 0 to {machines - 1}."
    do = f"give one of them on each machine, each its own, or set trainer.nnodes to {max(entry.value, 0) + 1} or more"
    merged.problems.append(Problem(what, entry.source, do, ("trainer.nnodes",)))


def derive_reference_sizes(merged: Merged) -> None:
    """The reference's sizes may be written, but not differ from the actor's."""
    for key, actors in AS_THE_ACTOR.items():
        entry = take(merged, key)
        if entry is not None and entry.value != merged.value(actors):
            what = (
                f"`{entry.spelling}={entry.value}`: the reference is cut as the actor is, over {merged.value(actors)}."
            )
            do = f"set {actors}={entry.value}, which holds for both, or remove {entry.spelling}"
            merged.problems.append(Problem(what, entry.source, do, (actors,)))


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

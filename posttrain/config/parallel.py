"""Over how many processes weights and rows are cut: sizes that must divide the number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posttrain.config.aliases import AS_THE_ACTOR, DRY_RUN, NODE_RANK, ROLLOUT_EACH, ROLLOUT_MACHINES, TOGETHER
from posttrain.config.checked import Checked, Finding
from posttrain.config.merge import Merged
from posttrain.config.problem import Problem
from posttrain.config.schema import lookup
from posttrain.config.torchrun import SOURCE

_ACTOR = "actor_rollout_ref.actor"
ROLLOUT_WORKERS = "actor_rollout_ref.rollout.n_workers"
SHARD_SIZES = (f"{_ACTOR}.fsdp_config.fsdp_size", "critic.fsdp_config.fsdp_size")
SEQUENCE_SIZES = (f"{_ACTOR}.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size")


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


def derive_command(merged: Merged) -> None:
    """Which of the machines this is, and whether it is only looked at."""
    dry = merged.take(DRY_RUN)
    merged.dry_run = dry is not None and dry.value
    entry, machines = merged.take(NODE_RANK), merged.value("trainer.nnodes")
    if entry is None:
        return
    if 0 <= entry.value < machines or entry.source == SOURCE:  # where torchrun knows better, it is told so
        merged.node_rank = entry.value
        return
    what = f"`{entry.spelling}={entry.value}`: trainer.nnodes={machines}, and the machines are 0 to {machines - 1}."
    do = f"give one of them on each machine, each its own, or set trainer.nnodes to {max(entry.value, 0) + 1} or more"
    merged.problems.append(Problem(what, entry.source, do, ("trainer.nnodes",)))


def derive_layout(merged: Merged) -> None:
    """Workers that only generate, in verl's words: so many on each of so many machines, and that there are any."""
    machines, each = merged.take(ROLLOUT_MACHINES), merged.take(ROLLOUT_EACH)
    given = [entry for entry in (machines, each) if entry is not None]
    if given:
        count = (1 if machines is None else machines.value) * (
            merged.value("trainer.n_gpus_per_node") if each is None else each.value
        )
        merged.put(ROLLOUT_WORKERS, count, max(given, key=lambda entry: entry.rank))
    entry, apart = merged.take(TOGETHER), merged.value(ROLLOUT_WORKERS)
    if entry is None or entry.value == (not apart):
        return
    if entry.value:
        what = f"`{entry.spelling}=True` has the same workers train and generate, but `{ROLLOUT_WORKERS}={apart}`."
        do = f"remove {entry.spelling}, or set {ROLLOUT_WORKERS}=0"
    else:
        what = f"`{entry.spelling}=False` has other workers generate than train, but nothing says how many."
        do = f"set {ROLLOUT_WORKERS}"
    merged.problems.append(Problem(what, entry.source, do, (ROLLOUT_WORKERS,)))


def derive_reference_sizes(merged: Merged) -> None:
    """The reference's sizes may be written, but not differ from the actor's."""
    for key, actors in AS_THE_ACTOR.items():
        entry = merged.take(key)
        if entry is not None and entry.value != merged.value(actors):
            what = (
                f"`{entry.spelling}={entry.value}`: the reference is cut as the actor is, over {merged.value(actors)}."
            )
            do = f"set {actors}={entry.value}, which holds for both, or remove {entry.spelling}"
            merged.problems.append(Problem(what, entry.source, do, (actors,)))


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

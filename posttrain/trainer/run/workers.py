"""The processes and machines of a run: this process alone, or one per worker, which Ray starts.

One machine drives a run over several. The same command on another machine lends it that machine, or leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch

from posttrain.config.parallel import one_process, rollout_workers_of, workers_of
from posttrain.config.resolved import Resolved
from posttrain.config.trainer import RunConfig
from posttrain.controller.pool import LocalWorkers, Workers
from posttrain.controller.stalls import append_log, printed_lines
from posttrain.external import import_external
from posttrain.tracking.console import ignore_hangup
from posttrain.tracking.progress import say
from posttrain.tracking.row import waiting
from posttrain.tracking.rundir import RunTaken
from posttrain.trainer.run.process import seed_and_determinism
from posttrain.trainer.run.result import RunResult


def open_workers(config: Any, device: torch.device, external: str | None, logs: Path | None = None) -> Workers:
    """One worker in this process, or as many as `trainer.n_gpus_per_node` says, on each of `trainer.nnodes` machines,
    and `rollout.n_workers` that only generate, in processes that Ray starts; these import `external` too, which may
    register losses, models and engines. What a process printed that died is written to the folder `logs`."""
    if one_process(config):
        return LocalWorkers()
    from posttrain.controller.ray_pool import RayWorkers

    machines, ranks, rollout = config.trainer.nnodes, workers_of(config), rollout_workers_of(config)
    where = f" on {machines} machines" if machines > 1 else ""
    who = f"{ranks} worker(s){where} to train and {rollout} to generate" if rollout else f"{ranks} workers{where}"
    say(f"{who}: starting Ray; the loop, the data and Ctrl-C stay in this process.")
    prepare, settings = partial(_prepare, config.trainer, device, external), config.trainer.ray_init
    with waiting("starting Ray"):
        teams = rollout > 0 and config.actor_rollout_ref.rollout.tensor_model_parallel_size > 1
        workers = RayWorkers(
            ranks,
            device,
            prepare=prepare,
            machines=machines,
            tell=say,
            settings=settings,
            rollout=rollout,
            teams=teams,
            stopped_s=config.trainer.stopped_worker_timeout_s,
            logs=logs,
            shared=Path(config.trainer.default_local_dir),
        )
    if settings and workers.cluster.was_there:
        say("note: trainer.ray_init has no effect: this process is connected to a Ray already.")
    return workers


def keep_worker_logs(workers: Workers, folder: Path) -> None:
    """What the processes of the ranks printed, before Ray's own folder is gone: added to `workers.log`, where that of
    a process that died is already."""
    cluster, watch = getattr(workers, "cluster", None), getattr(workers, "watch", None)
    if cluster is None or not cluster.folder:  # this process, or a Ray of the user's, which keeps its logs
        return
    for path in sorted(Path(cluster.folder).glob("session_latest/logs/worker-*")):
        if path.suffix not in (".out", ".err") or (watch is not None and path.name in watch.kept):
            continue
        append_log(printed_lines([str(path)]), path.name, folder)


def _prepare(settings: RunConfig, device: torch.device, external: str | None) -> None:
    # Runs in the process of a rank, before its workers are made.
    seed_and_determinism(settings, device)
    if external:
        import_external(external)


SERVED = "served"
Named = ParamSpec("Named")
Run = Callable[Concatenate[Resolved, Named], RunResult]


def driven_by_one_machine(run: Run[Named]) -> Run[Named]:
    """`run`, unless this machine is another than the first, or the same command on a machine of the same Ray was
    earlier and has the run's directory."""

    @wraps(run)
    def driven(resolved: Resolved, *arguments: Named.args, **named: Named.kwargs) -> RunResult:
        if resolved.node_rank:
            return _serve(resolved)
        try:
            return run(resolved, *arguments, **named)
        except RunTaken as taken:
            if resolved.config.trainer.nnodes == 1:
                raise
            say(f"{taken} If that is the same command on another machine: it drives the run, and this one leaves.")
            return _empty_result(resolved)

    return driven


def _serve(resolved: Resolved) -> RunResult:
    """Join the Ray of machine 0 until its run has ended."""
    from posttrain.controller import torchrun
    from posttrain.controller.ray_address import given_address
    from posttrain.controller.ray_node import serve

    say(f"Machine {resolved.node_rank} of {resolved.config.trainer.nnodes}: machine 0 drives the run.")
    shared = Path(resolved.config.trainer.default_local_dir)
    address, token = torchrun.wait_for_address(shared) if torchrun.is_meeting() else (given_address(), "")
    assert address is not None  # checked with the settings
    with ignore_hangup():
        serve(address, say, token)
    return _empty_result(resolved)


def _empty_result(resolved: Resolved) -> RunResult:
    return RunResult(Path(resolved.config.trainer.default_local_dir), SERVED, 0)

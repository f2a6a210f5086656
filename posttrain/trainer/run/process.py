"""How every run begins and ends: its directory, external module and device, and errors turned into advice.

`open_run_directory` decides which directory a run is written to, and whether it continues the run that is there.
`open_workers` makes its workers: in this process alone, or in one process per worker, which Ray starts. One machine
drives a run over several; the same command on another machine lends it that machine, or leaves.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch

from posttrain.checkpoint.folders import disk_words
from posttrain.config.resolved import Resolved
from posttrain.config.trainer import ROLES, RunConfig, one_process, own_workers_of, workers_of
from posttrain.controller import ray_address
from posttrain.controller.incidents import append_log, printed_lines, without_marks
from posttrain.controller.pool import ROLLOUT, LocalWorkers, RolePool, Workers
from posttrain.errors import UserError
from posttrain.external import KEY, import_external
from posttrain.kernels.ordered import fix_product_library
from posttrain.machines.cluster import Machines
from posttrain.tracking.console import ignore_hangup
from posttrain.tracking.progress import say, waiting
from posttrain.tracking.rundir import RunDirectory, RunDirectoryError, RunTaken
from posttrain.tracking.status import read_status
from posttrain.tracking.tee import tee_output
from posttrain.trainer.run.memory import explain_out_of_memory, is_out_of_memory, named_stage
from posttrain.trainer.run.result import RunResult
from posttrain.workers.roles import pick_device

Say = Callable[[str], object]


def open_run_directory(config: Any, say: Say, *, stem: str | None = None) -> tuple[RunDirectory, bool]:
    """The opened directory, and whether the run in it goes on. Never mixes two runs.

    `stem` begins the names of runs that have none of their own; null takes the estimator's name.
    """
    stem = stem or re.sub(r"[^A-Za-z0-9_.-]", "_", config.algorithm.adv_estimator)
    trainer = config.trainer
    root = Path(trainer.default_local_dir)
    if trainer.experiment_name is not None:
        run = RunDirectory(root, trainer.project_name, trainer.experiment_name, on_note=say).open()
        return run, _check_continues(run, config, say)
    number = _newest_run(root / trainer.project_name, stem)
    if number and trainer.resume_mode == "auto":
        run = RunDirectory(root, trainer.project_name, f"{stem}-{number}", on_note=say)
        if not _is_finished(run, config) and not run.changed_settings(config.to_dict()):
            run.open()
            say(f"Continuing the unfinished run {run.path} (the settings are the same).")
            return run, _check_continues(run, config, say)
    run = RunDirectory(root, trainer.project_name, f"{stem}-{number + 1}", on_note=say)
    return run.open(), False


def _newest_run(folder: Path, stem: str) -> int:
    # The largest number of a run that made it to its first step: one that failed before has nothing to resume,
    # and must not stand between an unfinished run and the command that continues it.
    begun = (path.parent.name for path in folder.glob(f"{stem}-*/config.yaml"))
    found = [re.fullmatch(rf"{re.escape(stem)}-(\d+)", name) for name in begun]
    return max((int(match[1]) for match in found if match), default=0)


def _check_continues(run: RunDirectory, config: Any, say: Say) -> bool:
    if not run.holds_run():
        return False
    if config.trainer.resume_mode == "disable":
        run.close()
        raise RunDirectoryError(
            f"{run.path} holds a run already and trainer.resume_mode=disable. Choose another trainer.experiment_name, "
            "set trainer.resume_mode=auto to continue it, or move the folder away."
        )
    given = config.trainer.resume_from_path if config.trainer.resume_mode == "resume_path" else None
    if given and run.checkpoints.resolve() not in Path(given).resolve().parents:
        run.close()
        raise RunDirectoryError(
            f"{run.path} holds a run already, and trainer.resume_from_path={given} belongs to another one. Choose a "
            "new trainer.experiment_name for the run that branches off."
        )
    for key, old, new in run.changed_settings(config.to_dict()):
        say(f"Changed since this run was started: {key} was {old}, is now {new}.")
    return True


def _is_finished(run: RunDirectory, config: Any) -> bool:
    status = read_status(run.path)
    wanted = config.trainer.total_training_steps or 0
    return status.get("status") == "finished" and wanted <= int(status.get("total_steps", 0))


_DETERMINISTIC: Any = torch.utils.deterministic  # its attribute exists at run time only


@contextmanager
def opened_run(resolved: Resolved, stem: str | None = None) -> Iterator[RunDirectory]:
    """The opened directory of a run, with a log of its output. `stem` begins the names of runs that have none of their
    own."""
    with ExitStack() as stack:
        stack.enter_context(ignore_hangup())
        stack.enter_context(restore_determinism())
        run, _ = open_run_directory(resolved.config, say, stem=stem)
        stack.callback(run.close)
        stack.enter_context(tee_output(run.log))
        say(f"Run directory: {run.path}")
        for note in resolved.notes:
            say(f"note: {note}")
        yield run


@contextmanager
def opened_attempt(resolved: Resolved, run: RunDirectory) -> Iterator[tuple[ExitStack, Any]]:
    """(stack, settings) for everything that a run opens in its directory, with errors turned into advice."""
    config = copy.deepcopy(resolved.config)  # sizes and paths are filled in later; the caller's stays as it was
    # An error is explained before workers are shut down, which may take a while or fail, too.
    with ExitStack() as stack, explain_errors(run, config):
        yield stack, config


def load_external(name: str | None, setting: str = KEY) -> None:
    """Import the user's module, which may register estimators, losses, samplers or engines."""
    if name:
        import_external(name, setting)
        say(f"Loaded {name}.")


def find_run_device(settings: RunConfig) -> torch.device:
    """The workers' device. `trainer.device=auto` on a driver without GPUs, as on the head of many clusters, is CUDA
    where a machine of the Ray that the environment names has one; the settings then say so, too."""
    device = pick_device(settings.device)
    if settings.device == "auto" and device.type == "cpu" and not ray_address.is_meeting() and _cluster_has_gpus():
        settings.device = "cuda"
        return torch.device("cuda")
    return device


def _cluster_has_gpus() -> bool:
    if importlib.util.find_spec("ray") is None or not any(os.environ.get(name) for name in ray_address.ADDRESSES):
        return False
    from posttrain.controller.ray_cluster import has_gpus

    try:
        return has_gpus()
    except UserError:  # no Ray answers there: reported when workers are started, if the run needs any
        return False


def prepare_torch(settings: RunConfig, device: torch.device) -> None:
    """Seed and determinism as the section `trainer` says, and the device in words."""
    seed_and_determinism(settings, device)
    threads = torch.get_num_threads()
    what = f"{threads} thread{'s' * (threads != 1)}"
    if device.type == "cuda":
        what = torch.cuda.get_device_name() if torch.cuda.is_available() else "of other machines; this one drives"
    say(f"Device: {device} ({what})")


def seed_and_determinism(settings: RunConfig, device: torch.device) -> None:
    """In every process that computes."""
    seed_all(settings.seed)
    if device.type == "cpu":
        fix_product_library()
    if settings.deterministic:
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Or every new tensor would be filled with NaN first: nothing here reads what it has not written.
        _DETERMINISTIC.fill_uninitialized_memory = False


@contextmanager
def restore_determinism() -> Iterator[None]:
    """Around a run: what `prepare_torch` switches on holds for this run, not for what its process does next."""
    before, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = _DETERMINISTIC.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        _DETERMINISTIC.fill_uninitialized_memory = filled


def seed_all(seed: int) -> None:
    """The global generators that ours or a user's code may draw from: torch's, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def explain_errors(run: RunDirectory, config: Any) -> Iterator[None]:
    """Memory and disk errors say what to do; any other leaves its traceback in the run directory."""
    try:
        yield
    except UserError:
        raise  # its text says it all
    except Exception as error:
        words = _words(error, run, config)
        if words is None:
            _write_crash(run)
            raise
        raise UserError(words) from error


def _words(error: Exception, run: RunDirectory, config: Any) -> str | None:
    if is_out_of_memory(error):
        return explain_out_of_memory(config, error)
    return disk_words(error, run.path) if isinstance(error, OSError) else None


def _write_crash(run: RunDirectory) -> None:
    path = run.crash / f"{time.strftime('%Y%m%d-%H%M%S')}.txt"
    try:
        path.write_text(traceback.format_exc())
    except OSError:
        return  # the original error matters more than its copy
    say(f"The run failed; the traceback is in {Path(path)}. The same command continues from the newest checkpoint.")


def open_workers(
    config: Any,
    device: torch.device,
    external: str | None,
    logs: Path | None = None,
    machines: int | None = None,
    own_roles: Sequence[RolePool] = (),
) -> Workers:
    """One worker in this process, or as many as `trainer.n_gpus_per_node` says, on each of `trainer.nnodes` machines,
    and those of roles with workers of their own, in processes that Ray starts; these import `external` too, which may
    register losses, models and engines. What a process printed that died is written to the folder `logs`. `machines`
    are those that are left, where the run goes on with fewer; `own_roles` are pools of the trainer's own class."""
    elsewhere = device.type == "cuda" and not torch.cuda.is_available()  # this process can only drive
    if machines is not None:
        config.trainer.nnodes = machines  # from here on: sizes and memory are planned for those that are left
    elif one_process(config) and not elsewhere and not own_roles:
        return LocalWorkers()
    from posttrain.controller.ray_pool import RayWorkers

    machines, ranks, pools = int(config.trainer.nnodes), workers_of(config), [*_pools_of(config), *own_roles]
    where = f" on {machines} machines" if machines > 1 else ""
    others = [f"{pool.workers} {'to generate' if pool.role == ROLLOUT else f'of the {pool.title}'}" for pool in pools]
    who = " and ".join([f"{ranks} worker(s){where} to train", *others]) if pools else f"{ranks} workers{where}"
    say(f"{who}: starting Ray; the loop, the data and Ctrl-C stay in this process.")
    prepare, settings = partial(_prepare, config.trainer, device, external), config.trainer.ray_init
    with waiting("starting Ray"), named_stage("start"):
        workers = RayWorkers(
            ranks,
            device,
            prepare=prepare,
            machines=machines,
            tell=say,
            settings=settings,
            pools=pools,
            placement_s=config.trainer.placement_timeout_s,
            stopped_s=config.trainer.stopped_worker_timeout_s,
            hung_s=config.trainer.hung_worker_timeout_s,
            logs=logs,
            shared=Path(config.trainer.default_local_dir),
        )
    if settings and workers.cluster.was_there:
        say("note: trainer.ray_init has no effect: this process is connected to a Ray already.")
    return workers


def _pools_of(config: Any) -> Iterator[RolePool]:
    """By the settings of the run."""
    for role, count in own_workers_of(config).items():
        # Workers that hold one engine together know each other; other rollout workers are worlds of one rank.
        team = config.actor_rollout_ref.rollout.engine_size if role == ROLLOUT else 1
        yield RolePool(role, count, ROLES[role].key, together=team > 1 or (ROLES[role].shards and count > 1), team=team)


def keep_worker_logs(workers: Workers, folder: Path) -> None:
    """What the workers printed on all machines, before Ray's own folders are gone: added to `workers.log`, where that
    of a process that died is already."""
    cluster, watch = getattr(workers, "cluster", None), getattr(workers, "watch", None)
    if cluster is None or watch is None:  # one process: what it printed is in the run's own log
        return
    for who, files, lines in workers.printed():
        names = {Path(file).name for file in files}
        if not names <= watch.kept:
            append_log(printed_lines(files) if lines is None else lines, who, folder)
            watch.kept |= names
    if not cluster.folder:  # a Ray of the user's, whose other processes are not this run's
        return
    for path in sorted(Path(cluster.folder).glob("session_latest/logs/worker-*")):
        if path.suffix not in (".out", ".err") or path.name in watch.kept:
            continue
        append_log(printed_lines([str(path)]), path.name, folder)


def keep_machine_logs(machines: Machines, folder: Path) -> None:
    """What workers of rewards, tools and agents on other machines have printed there: added to `workers.log`."""
    for address, lines in machines.printed():
        append_log(without_marks(lines), f"Rewards, tools and agents on {address}", folder)


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
    from posttrain.controller.ray_address import given_address
    from posttrain.controller.ray_node import serve

    say(f"Machine {resolved.node_rank} of {resolved.config.trainer.nnodes}: machine 0 drives the run.")
    shared = Path(resolved.config.trainer.default_local_dir)
    address, token = ray_address.wait_for_address(shared) if ray_address.is_meeting() else (given_address(), "")
    assert address is not None  # checked with the settings
    with ignore_hangup():
        serve(address, say, token)
    return _empty_result(resolved)


def _empty_result(resolved: Resolved) -> RunResult:
    return RunResult(Path(resolved.config.trainer.default_local_dir), SERVED, 0)

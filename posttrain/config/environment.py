"""Checks against this machine: folders, packages, devices, loggers. Run before torch is imported."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from posttrain import cores
from posttrain.config.checked import checks_of_packages
from posttrain.config.choices import LOGGER_PACKAGES
from posttrain.config.resolved import ConfigError, Problem, Resolved
from posttrain.config.trainer import ROLES, TORCHRUN, own_workers_of, runs_on_cpu, workers_of
from posttrain.cores import gpus_present

_HOW_TO_GIVE_A_CLUSTER = (
    "give the command on every machine, on the first with RAY_HEAD_ADDRESS=auto trainer.node_rank=0, on the others "
    "with RAY_HEAD_ADDRESS=HOST:6379 trainer.node_rank=1, ...; or by torchrun --nnodes=N --node_rank=0 "
    "--master_addr=HOST; or once, on a running Ray cluster (ray start --head on one machine, ray start "
    "--address=HOST:6379 on the others), with RAY_ADDRESS=HOST:6379"
)


def check_environment(resolved: Resolved, cwd: Path | None = None) -> list[Problem]:
    """Everything on this machine that would stop the run."""
    folder = cwd or Path.cwd()
    checks = [*checks_of_packages("check_environment"), _own_code, _check_workers, _folders]
    return [problem for examine in checks for problem in examine(resolved, folder)]


def _own_code(resolved: Resolved, cwd: Path) -> Iterator[Problem]:
    own = ("custom_reward_function.path", "actor_rollout_ref.model.external_lib")
    for key in own if hasattr(resolved.config, "actor_rollout_ref") else ("model.external_lib",):
        name = resolved.value(key)
        if name is None or name.startswith(("http://", "https://")):
            continue  # a reward server is asked when the reward is loaded
        if name.endswith(".py") and not (cwd / name).is_file():
            what = f"`{key}`: the file {name} does not exist."
            yield Problem(what, resolved.where(key), "give a Python file that exists")
        elif not name.endswith(".py") and not _module_exists(name, cwd):
            do = "give a .py file, or a dotted path that lies in the working folder or is installed"
            yield Problem(f"`{key}`: no module {name} was found.", resolved.where(key), do)


def _module_exists(name: str, cwd: Path) -> bool:
    """Whether the first part of a dotted path is a file or folder here, or an installed module."""
    first = name.split(".")[0].split(":")[0]
    if (cwd / f"{first}.py").is_file() or (cwd / first).is_dir():
        return True
    try:
        return importlib.util.find_spec(first) is not None
    except (ImportError, ValueError):
        return False


def _check_workers(resolved: Resolved, cwd: Path) -> Iterator[Problem]:
    key, nodes = "trainer.n_gpus_per_node", resolved.value("trainer.nnodes")
    on_cpu, present = runs_on_cpu(resolved.config), gpus_present()
    beside = {ROLES[role].key: workers for role, workers in own_workers_of(resolved.config).items()}
    others = sum(beside.values())
    by_torchrun = resolved.where("trainer.nnodes") == TORCHRUN
    addresses = [os.environ.get(name) for name in ("RAY_ADDRESS", "RAY_HEAD_ADDRESS") if os.environ.get(name)]
    # A Ray that runs has its own machines; `auto` may start one here. What is free there is known when it is asked.
    named = any(address != "auto" for address in addresses)
    several = nodes > 1 or (others > 0 and not on_cpu)
    in_cluster = (named or (several and bool(addresses))) and not by_torchrun
    most = cores.usable() if on_cpu else present
    # Workers of one role are spread evenly over the machines.
    here, count = resolved.value(key) + math.ceil(others / max(nodes, 1)), workers_of(resolved.config) + others
    if here > max(most, 1) and not in_cluster:  # without any GPU the device is wrong, and reported
        yield _too_many(resolved, key, beside, f"{most} CPU core(s)" if on_cpu else f"{present} GPU(s)", most)
    elif (count > 1 or (named and not on_cpu and present == 0)) and importlib.util.find_spec("ray") is None:
        several, none = (next(iter(beside)), 0) if beside else (key, 1)
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
    if resolved.value("trainer.device") == "cuda" and present == 0 and not in_cluster:
        what = "`trainer.device=cuda`, but this machine shows no GPU."
        do = "set trainer.device=auto or cpu; or name a Ray cluster that has GPUs by RAY_ADDRESS=HOST:6379"
        yield Problem(what, resolved.where("trainer.device"), do)
    dashboard = resolved.value("trainer.ray_init").get("include_dashboard")
    if dashboard and importlib.util.find_spec("aiohttp_cors") is None:
        what = "`trainer.ray_init.include_dashboard=true`: Ray's dashboard and job server are not installed."
        yield Problem(what, resolved.where("trainer.ray_init"), 'pip install "posttrain[cluster]"')


def _too_many(resolved: Resolved, key: str, beside: dict[str, int], present: str, most: int) -> Problem:
    where, wanted, limit = resolved.where(key), resolved.value(key), max(most, 1)
    if beside:
        named = ", ".join(f"`{own}={count}`" for own, count in beside.items())
        asked = f"{named} ask{'s' * (len(beside) == 1)} for so many workers beside the {wanted} that train (`{key}`)"
        all_of_them = "both" if len(beside) == 1 else "them"
        do = f"set {all_of_them} to {limit} or less together, or {', '.join(f'{own}=0' for own in beside)}: then the "
        do += "same workers do both"
        where = ", and ".join(dict.fromkeys(resolved.where(own) for own in beside))
        return Problem(f"{asked}; this machine has {present}.", where, do)
    setting = "--nproc_per_node" if where == TORCHRUN else key
    what = f"`{key}={wanted}` asks for {wanted} workers; this machine has {present}."
    return Problem(what, where, f"set {setting} to {limit} or less")


def _folders(resolved: Resolved, cwd: Path) -> Iterator[Problem]:
    key = "trainer.default_local_dir"
    target = (cwd / resolved.value(key)).absolute()
    # The folder is made when the run starts; its nearest existing parent decides whether that can work.
    present = next(folder for folder in (target, *target.parents) if folder.exists())
    if not present.is_dir() or not os.access(present, os.W_OK | os.X_OK):
        what = f"`{key}={resolved.value(key)}` cannot be written: {present} is no folder that you may write to."
        yield Problem(what, resolved.where(key), f"set {key} to a folder that you may write to")
    resume = resolved.value("trainer.resume_from_path")
    if resume is not None and resolved.value("trainer.resume_mode") == "resume_path" and not (cwd / resume).is_dir():
        what = f"`trainer.resume_from_path`: the folder {resume} does not exist."
        yield Problem(what, resolved.where("trainer.resume_from_path"), "give a folder .../checkpoints/global_step_N")


def missing_packages(resolved: Resolved) -> list[Problem]:
    """One problem per logger of `trainer.logger` whose package is not installed; a run continues without it."""
    found = []
    names = resolved.value("trainer.logger")
    for name in sorted(set(names) - set(installed(names)), key=names.index):
        what = f"`trainer.logger` names {name}, but the package {name} is not installed: the run continues without it."
        do = f'pip install "posttrain[{name}]" (or pip install {name}), or leave it out of trainer.logger'
        found.append(Problem(what, resolved.where("trainer.logger"), do, ("trainer.logger",)))
    return found


def missing_notes(resolved: Resolved) -> list[str]:
    """The same in one line each, for the notes that a run prints first."""
    return [f"{problem.what} What to do: {problem.do}." for problem in missing_packages(resolved)]


def installed(names: Sequence[str]) -> list[str]:
    """The loggers among `names` that need no package, or whose package is there."""
    return [name for name in names if name not in LOGGER_PACKAGES or _is_there(name)]


def _is_there(name: str) -> bool:
    # `find_spec` raises for a module that a test or a notebook has put there without one.
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


_WORKERS, _MACHINES = "trainer.n_gpus_per_node", "trainer.nnodes"


def torchruns_settings() -> dict[str, int]:
    """Settings that follow from what torchrun has started. The first process of each machine stays: on the first one
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
        # A status of 0: torchrun ends all processes when one of them fails.
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

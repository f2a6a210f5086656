"""The machine: device and memory, disk for checkpoints, the run directory, packages, ports, the model's files.

Rollout engines such as vLLM install the torch they were built for, which posttrain may not support.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain import cores
from posttrain.config.environment import missing_packages
from posttrain.config.trainer import own_workers_of, workers_of
from posttrain.doctor.case import ERROR, NOTE, WARNING, Case, Finding
from posttrain.errors import UserError
from posttrain.planning.budgets import apply_plan
from posttrain.planning.counting import ModelBytes
from posttrain.planning.memory_plan import find_remedies, shown
from posttrain.planning.supervised import ROLE
from posttrain.rollout.engine_kwargs import OUTSIDE
from posttrain.tracking.rundir import RunDirectory
from posttrain.tracking.status import installed_versions, read_status

AREA = "resources"
PACKAGES = ("torch", "transformers", "safetensors", "pyarrow", "peft", "ray")
_SIZE = struct.Struct("<Q")


def check_resources(case: Case) -> Iterator[Finding]:
    _versions(case)
    yield from _engines(case)
    yield from _wrong_versions()
    yield from _run_directory(case)
    for problem in missing_packages(case.resolved):  # of loggers
        yield Finding.of(problem, AREA, WARNING)
    yield from _weights(case)
    yield from _disk(case)
    yield from _ports(case)


def check_memory(case: Case) -> Iterator[Finding]:
    """The memory plan, and what would lower it."""
    try:
        chosen = apply_plan(case.config, case.device, case.resolved.explicit, case.planner)
        plan = case.planner.plan(case.config, case.device)
    except UserError as error:
        yield Finding(ERROR, "memory", str(error))
        return
    case.report.fact("memory", plan.verdict(), *chosen)
    if not plan.fits:
        remedies = find_remedies(case.config, plan, case.planner)
        do = "; ".join(remedy.words() for remedy in remedies[:3]) or "take a smaller model"
        yield Finding(ERROR, "memory", f"The run does not fit into memory. {plan.verdict()}", case.device.words, do)


def _versions(case: Case) -> None:
    found = installed_versions(PACKAGES)
    shown = ", ".join(f"{name} {found.get(name, 'not installed')}" for name in PACKAGES)
    case.report.fact(AREA, f"{shown}.", f"The run would be on {case.device.words}.")


def _run_directory(case: Case) -> Iterator[Finding]:
    trainer = case.config.trainer
    if trainer.experiment_name is None:
        return
    run = RunDirectory(Path(trainer.default_local_dir), trainer.project_name, trainer.experiment_name)
    if not run.holds_run():
        case.report.fact(AREA, f"It would be written to {run.path}.")
        return
    status = read_status(run.path)
    run_state = f"{status.get('status', 'begun')} at step {status.get('step', 0)}"
    if trainer.resume_mode == "disable":
        what = f"{run.path} holds a run already ({run_state}), and trainer.resume_mode=disable refuses to touch it."
        do = "choose another trainer.experiment_name, or trainer.resume_mode=auto to continue it"
        yield Finding(ERROR, AREA, what, case.where("trainer.resume_mode"), do)
        return
    case.report.fact(AREA, f"{run.path} holds a run already ({run_state}): it would be continued.")
    for key, old, new in run.changed_settings(case.resolved.config.to_dict()):
        yield Finding(NOTE, AREA, f"Changed since that run was started: {key} was {old}, is now {new}.")


def _bytes_saved(case: Case) -> int:
    roles = ["actor" if case.is_rl else ROLE]
    if case.is_rl:
        from posttrain.algorithms import get_adv_estimator

        roles += ["critic"] * get_adv_estimator(case.config.algorithm.adv_estimator).needs_critic
    held = [case.planner.count(case.config, case.device, role, ModelBytes.of) for role in roles]
    if case.model.lora_rank > 0:  # only adapters are saved
        return sum(one.optimizer * 2 for one in held)
    return sum(one.weights + one.optimizer for one in held)


def _disk(case: Case) -> Iterator[Finding]:
    target = Path(case.config.trainer.default_local_dir).absolute()
    # The run makes its folder when it starts: the nearest existing one is on the same disk.
    present = next(folder for folder in (target, *target.parents) if folder.exists())
    free, one = shutil.disk_usage(present).free, _bytes_saved(case)
    saves = case.run.saves if case.run else 1
    words = f"A checkpoint takes {shown(one)}; {saves} would lie in {target}, where {shown(free)} are free."
    case.report.fact(AREA, words)
    if free < saves * one:
        level = ERROR if free < 2 * one else WARNING  # the next one is written before an older one goes
        do = "make room on the disk, set trainer.default_local_dir to another, or trainer.max_ckpt_to_keep=1"
        yield Finding(level, AREA, f"The disk is too small for the checkpoints. {words}", str(present), do)


def _ports(case: Case) -> Iterator[Finding]:
    # Workers meet on a port that the system chooses, so any free one will do.
    workers = workers_of(case.config) + sum(own_workers_of(case.config).values())
    if workers == 1:
        case.report.fact(AREA, "One worker: no port and no Ray is needed.")
        return
    try:
        with socket.socket() as one:
            # Tried rather than looked up: a container can forbid sockets in several ways.
            one.bind(("127.0.0.1", 0))
    except OSError as error:
        what = f"{workers} workers talk over local ports, but none could be opened: {error}."
        yield Finding(ERROR, AREA, what, case.where("trainer.n_gpus_per_node"), "allow sockets on the loopback address")
    case.report.fact(AREA, f"{workers} workers on {cores.usable()} cores; Ray chooses free ports by itself.")


def _weights(case: Case) -> Iterator[Finding]:
    # Compares names only: the headers of the files are read, not the weights.
    folder = case.model_folder
    if folder is None or case.is_pairs or case.model.allow_other_weights:
        return
    stored = _stored_names(folder)
    if not stored:
        return
    role = "actor" if case.is_rl else ROLE
    wanted = case.planner.count(case.config, case.device, role, _weight_names) if case.model.lora_rank == 0 else set()
    if missing := sorted(wanted - stored):
        shown_names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        what = f"{folder} lacks {len(missing)} of the model's {len(wanted)} weights ({shown_names})."
        do = "fetch the model again; is its config.json that of these weights?"
        yield Finding(ERROR, AREA, what, case.where(f"{case.tree.model}.path"), do)


def _weight_names(model: Any) -> frozenset[str]:
    # Tied weights need not be stored.
    tied = set(getattr(model, "_tied_weights_keys", None) or [])
    names = {name for name, _ in model.named_parameters()}
    if getattr(model.config, "tie_word_embeddings", False):
        names -= tied | {"lm_head.weight"}
    return frozenset(names)


def _stored_names(folder: Path) -> set[str]:
    # A safetensors file starts with the length of its JSON header. Empty if any file has another layout.
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                (length,) = _SIZE.unpack(file.read(_SIZE.size))
                names |= json.loads(file.read(length)).keys()
        except (OSError, ValueError, struct.error):
            return set()
    return names - {"__metadata__"}


WHERE = "the Python environment"
_NAME = "actor_rollout_ref.rollout.name"


def _engines(case: Case) -> Iterator[Finding]:
    if not case.is_rl:
        return
    chosen = case.config.actor_rollout_ref.rollout.name
    for name, found in installed_engines().items():
        engine = OUTSIDE[name]
        tried, was_tried = engine.said_tried(), engine.is_tried(found)
        state = "was tried with posttrain" if was_tried else f"was not tried with posttrain; {tried}"
        does = "generates" if chosen == name else f"is installed, and generates with {_NAME}={name}"
        case.report.fact(AREA, f"{found} {does}; this version {state}.")
        if chosen == name and not was_tried:
            do = "the run proves its log-probs when it starts; if it does not start, take a version that was tried"
            yield Finding(NOTE, AREA, f"{found} was not tried with posttrain; {tried}.", WHERE, do)
        if chosen == name and (need := _torch_of(found)) is not None and not _is_met(need):
            what = f"{found} wants {need.name}{need.specifier}, and torch {_version('torch')} is installed."
            yield Finding(
                WARNING, AREA, what, WHERE, f"pip install '{need.name}{need.specifier}'; {_environment_advice(name)}"
            )


def installed_engines() -> dict[str, str]:
    """Engine -> package and version, of those that are installed."""
    found = {name: engine.installed_version() for name, engine in OUTSIDE.items()}
    return {name: version for name, version in found.items() if version is not None}


def _environment_advice(package: str) -> str:
    engine = next(engine for engine in OUTSIDE.values() if package in (engine.name, *engine.packages))
    return f"an environment of its own is best for an engine: {engine.how_to_install}"


def _wrong_versions() -> Iterator[Finding]:
    for need in _requirements("posttrain"):  # none where it runs from a folder, and is not installed
        there, wanted = _version(need.name), f"{need.name}{need.specifier}"
        if there is None:
            yield Finding(WARNING, AREA, f"{need.name} is not installed ({wanted}).", WHERE, f"pip install '{wanted}'")
        elif not _is_met(need):
            what, do = f"{need.name} {there} is installed, {wanted} is needed", f"pip install '{wanted}'"
            if need.name == "torch" and (by := _engines_wanting_torch()):
                what, do = (
                    f"{what}: {by} brought it",
                    f"{do}, behind which {by} may not start; {_environment_advice(by.partition(' ')[0])}",
                )
            yield Finding(WARNING, AREA, f"{what}.", WHERE, do)


def _engines_wanting_torch() -> str:
    # Engines whose requirements the installed torch meets: they probably installed it.
    wants = {found: _torch_of(found) for found in installed_engines().values()}
    return " and ".join(found for found, need in wants.items() if need is not None and _is_met(need))


def _torch_of(found: str) -> Any:
    needs = [need for need in _requirements(found.partition(" ")[0]) if need.name == "torch" and need.specifier]
    return needs[0] if needs else None


def _requirements(package: str) -> Iterator[Any]:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for text in wanted:
        try:
            need = Requirement(text)
        except InvalidRequirement:
            continue
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            yield need


def _is_met(need: Any) -> bool:
    # A requirement of one build (`2.11.0+cpu`) is not met by another build of that version: vLLM's compiled parts may
    # lack symbols with it.
    there = _version(need.name)
    return there is not None and need.specifier.contains(there, prereleases=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

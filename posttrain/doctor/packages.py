"""Packages of the environment: versions that posttrain was not made for, rollout engines, and the torch they want.

An engine is installed behind posttrain and brings the torch that it was built for: what posttrain takes may be another.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

from posttrain.config.engine_kwargs import OUTSIDE
from posttrain.doctor.case import Case
from posttrain.doctor.finding import NOTE, WARNING, Finding

AREA, WHERE = "resources", "the Python environment"
_NAME = "actor_rollout_ref.rollout.name"


def check_packages(case: Case) -> Iterator[Finding]:
    yield from _engines(case)
    yield from _wrong_versions()


def _engines(case: Case) -> Iterator[Finding]:
    """Those that are installed, whether one of them generates or not."""
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
            yield Finding(WARNING, AREA, what, WHERE, f"pip install '{need.name}{need.specifier}'; {_apart(name)}")


def installed_engines() -> dict[str, str]:
    """Engine -> package and version, of those that are installed."""
    found = {name: engine.installed_version() for name, engine in OUTSIDE.items()}
    return {name: version for name, version in found.items() if version is not None}


def _apart(package: str) -> str:
    engine = next(engine for engine in OUTSIDE.values() if package in (engine.name, *engine.packages))
    return f"an environment of its own is best for an engine: {engine.how_to_install}"


def _wrong_versions() -> Iterator[Finding]:
    """Packages that posttrain was not made for, by its own requirements."""
    for need in _requirements("posttrain"):  # none where it runs from a folder, and is not installed
        there, wanted = _version(need.name), f"{need.name}{need.specifier}"
        if there is None:
            yield Finding(WARNING, AREA, f"{need.name} is not installed ({wanted}).", WHERE, f"pip install '{wanted}'")
        elif not _is_met(need):
            what, do = f"{need.name} {there} is installed, {wanted} is needed", f"pip install '{wanted}'"
            if need.name == "torch" and (by := _brought_by()):
                what, do = (
                    f"{what}: {by} brought it",
                    f"{do}, behind which {by} may not start; {_apart(by.partition(' ')[0])}",
                )
            yield Finding(WARNING, AREA, f"{what}.", WHERE, do)


def _brought_by() -> str:
    """The engines that want the torch that is there."""
    wants = {found: _torch_of(found) for found in installed_engines().values()}
    return " and ".join(found for found, need in wants.items() if need is not None and _is_met(need))


def _torch_of(found: str) -> Any:
    """What a package wants of torch; None if that is not known."""
    needs = [need for need in _requirements(found.partition(" ")[0]) if need.name == "torch" and need.specifier]
    return needs[0] if needs else None


def _requirements(package: str) -> Iterator[Any]:
    """Those that hold here, without extras."""
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
    """As pip sees it: where a build is asked for by name (`2.11.0+cpu`), another of that version is not it, and vLLM's
    compiled parts may lack symbols with it."""
    there = _version(need.name)
    return there is not None and need.specifier.contains(there, prereleases=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

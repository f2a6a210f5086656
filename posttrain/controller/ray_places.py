"""Where processes of a run are, for the user: their GPUs, or the processes themselves and their cores, by machine."""

from __future__ import annotations

from collections.abc import Sequence

Place = tuple[str, list[int], int, int]
"""(the machine's name, the process's own GPUs there, its id, its threads), as `RankHost.place` tells."""


def places_words(places: Sequence[Place]) -> str:
    """`GPUs 4, 5 of node-1` or, without GPUs, `processes 311, 312 of node-1, a core each`."""
    machines: dict[str, list[Place]] = {}
    for place in places:
        machines.setdefault(place[0], []).append(place)
    return "; ".join(f"{_of_one(own)} of {machine}{_cores(own)}" for machine, own in machines.items())


def _of_one(places: Sequence[Place]) -> str:
    gpus = [gpu for _, own, _, _ in places for gpu in own]
    kind, numbers = ("GPU", sorted(gpus)) if gpus else ("process", [process for _, _, process, _ in places])
    plural = {"GPU": "GPUs", "process": "processes"}[kind] if len(numbers) > 1 else kind
    return f"{plural} {', '.join(map(str, numbers))}"


def _cores(places: Sequence[Place]) -> str:
    if any(gpus for _, gpus, _, _ in places):
        return ""
    threads = places[0][3]
    cores = "a core" if threads == 1 else f"{threads} cores"
    return f", {cores}{' each' if len(places) > 1 else ''}"

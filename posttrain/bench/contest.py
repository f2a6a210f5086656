"""Several systems, each in its own process, measured in alternation: A, B, C, A, B, C.

All are loaded and warmed up first and then held still; only one runs at a time, so drift of the machine hits all alike.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.bench.child import Child, ChildFailed
from posttrain.bench.others import Others
from posttrain.bench.places import bench_folder
from posttrain.bench.progress import Line
from posttrain.bench.systems import System

LOAD_S, RUN_S = 900.0, 1800.0  # deadlines; the first compilation of a peer takes a minute or two

MakeJob = Callable[[System], dict[str, Any]]


@dataclass
class Entry:
    """What became of one system: its answers, or why there are none."""

    system: System
    facts: dict[str, Any] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.system.what,
            "problem": self.problem,
            "given_settings": self.system.settings,
            "variables": {
                **self.system.variables,
                **({"LD_PRELOAD": self.system.preload} if self.system.preload else {}),
            },
            **self.facts,
            "runs": self.answers,
        }


def disturbance(entries: Sequence[Entry]) -> str:
    """How much others used the cores while something was measured, as words."""
    shares = [answer["others"] for entry in entries for answer in entry.answers if answer.get("others") is not None]
    if not shares:
        return "what others used meanwhile is not known"
    return f"others used {sum(shares) / len(shares):.0%} of the cores meanwhile, {max(shares):.0%} at most"


def install_missing(systems: Sequence[System], line: Line) -> None:
    """`--install`: make the environments of those that have none yet."""
    for system in systems:
        if (place := system.environment) is not None and not place.installed():
            place.install(line.show)


def measure(
    systems: Sequence[System], make_job: MakeJob, *, module: str, threads: int, repeat: int, warm_ups: int, line: Line
) -> list[Entry]:
    """`repeat` answers of every system that runs; the others carry their problem."""
    entries = [Entry(system) for system in systems]
    logs = bench_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        jobs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-bench-")))
        running: list[tuple[Entry, Child]] = []
        for entry in entries:
            system = entry.system
            if system.environment is not None and not system.environment.installed():
                entry.problem = "not installed (--install)"
                continue
            job = jobs / f"{system.name}.json"
            job.write_text(json.dumps(make_job(system)))
            log = logs / f"{module}-{system.name}.log"
            child = Child(system.command(job, module), system.variables_for(threads), log)
            stack.callback(child.close)
            if _load(entry, child, warm_ups, line):
                running.append((entry, child))
            child.pause()
        for number in range(repeat):
            for entry, child in running:
                words = f"{entry.system.name}: run {number + 1} of {repeat}"
                child.go_on()
                _ask(entry, child, {"seed": number + warm_ups}, words, line)
                child.pause()
    line.clear()
    return entries


def _load(entry: Entry, child: Child, warm_ups: int, line: Line) -> bool:
    words = f"{entry.system.name}: loading"
    line.show(words)
    try:
        entry.facts = child.ready(lambda s: line.waiting(words, s), LOAD_S)
    except ChildFailed as failed:
        entry.problem = str(failed)
        return False
    for number in range(warm_ups):
        _ask(entry, child, {"seed": number}, f"{entry.system.name}: warming up", line)
    entry.answers.clear()
    return entry.problem is None


def _ask(entry: Entry, child: Child, request: dict[str, Any], words: str, line: Line) -> None:
    if entry.problem is not None:
        return
    line.show(words)
    others = Others(child.process.pid)
    try:
        answer = child.ask(request, lambda s: line.waiting(words, s), RUN_S)
        entry.answers.append({**answer, "others": others.share()})
    except ChildFailed as failed:
        entry.problem = str(failed)

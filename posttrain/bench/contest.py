"""Several systems, each in its own process, measured in alternation: A, B, C, A, B, C.

All are loaded and warmed up first and then held still; only one runs at a time, so drift of the machine hits all alike.
On a CUDA device one system after the other is loaded, measured and ended: what a process holds there, no other has.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.bench import bench_folder
from posttrain.bench.child import Child, ChildFailed, UsedByOthers
from posttrain.bench.place import Place
from posttrain.bench.systems import HERE, System
from posttrain.bench.table import Line

LOAD_S, RUN_S = 900.0, 1800.0  # deadlines; the first compilation of a peer takes a minute or two

MakeJob = Callable[[System], dict[str, Any]]


@dataclass
class Entry:
    """What became of one system: its answers, or why there are none."""

    system: System
    facts: dict[str, Any] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None

    def version(self) -> str:
        """Name and version of the package that a system is; of ours also where its code is, if that is not this."""
        packages, name = self.facts.get("packages", {}), self.system.package
        name = f"{name}-cpu" if f"{name}-cpu" in packages else name
        text, code = f"{name} {packages.get(name, '')}".strip(), self.facts.get("code")
        other = self.system.ours and code and ("PYTHONPATH" in self.system.variables or code != str(HERE))
        return f"{text} from {code}" if other else text

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
            **({"warm_ups": figures(self.facts["warm_ups"])} if "warm_ups" in self.facts else {}),
            "runs": figures(self.answers),
        }


def figures(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers without rows that were sampled, which are no figures."""
    return [{key: value for key, value in answer.items() if key != "sampled"} for answer in answers]


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


@dataclass
class Contest:
    """How systems are measured: `module` names our runner, `place` the device, `deadline` the seconds that a system may
    take to load, or for one run."""

    module: str
    place: Place
    threads: int
    repeat: int
    warm_ups: int
    line: Line
    deadline: float | None = None
    # Called with all entries whenever one is done: what was measured is there if the next one never ends.
    keep: Callable[[list[Entry]], None] = lambda entries: None

    # What a system is asked in each of its runs, one after the other, beside the seed.
    asks: Sequence[Mapping[str, Any]] = ({},)
    # What goes with the asks while a peer warms up; ours compile what they need when they first need it, and are asked
    # in full.
    warming: Mapping[str, Any] = field(default_factory=dict)

    def measure(self, systems: Sequence[System], make_job: MakeJob) -> list[Entry]:
        """`repeat` answers to each ask of every system that runs; the others carry their problem."""
        entries = [Entry(system) for system in systems]
        alone = self.place.kind == "cuda"
        for group in [[entry] for entry in entries] if alone else [entries]:
            self._alternate(group, make_job)
            self.keep(entries)
        self.line.clear()
        return entries

    def _alternate(self, entries: Sequence[Entry], make_job: MakeJob) -> None:
        logs = bench_folder() / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            jobs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-bench-")))
            running: list[tuple[Entry, Child]] = []
            for entry in entries:
                system = entry.system
                entry.problem = system.missing(self.place.kind)
                if entry.problem is not None:
                    continue
                job = jobs / f"{system.name}.json"
                job.write_text(json.dumps({**make_job(system), "device": self.place.kind}))
                log = logs / f"{self.module}-{system.name}.log"
                variables = system.variables_for(self.threads, self.place.kind)
                child = Child(system.command(job, self.module, self.place.kind), variables, log)
                stack.callback(child.close)
                if self._load(entry, child):
                    running.append((entry, child))
                child.pause()
            for number in range(self.repeat):
                for entry, child in running:
                    words = f"{entry.system.name}: run {number + 1} of {self.repeat}"
                    child.go_on()
                    for ask in self.asks:
                        self._ask(entry, child, {"seed": number + self.warm_ups, **ask}, words)
                    child.pause()

    def _load(self, entry: Entry, child: Child) -> bool:
        words = f"{entry.system.name}: loading"
        self.line.show(words)
        started = time.monotonic()
        try:
            entry.facts = child.ready(lambda s: self.line.waiting(words, s), self.deadline or LOAD_S)
        except ChildFailed as failed:
            entry.problem = str(failed)
            return False
        entry.facts["code"] = entry.system.code(self.place.kind)
        entry.facts["load_s"] = time.monotonic() - started
        more = {} if entry.system.ours else self.warming
        for number in range(self.warm_ups):
            for ask in self.asks:
                self._ask(entry, child, {"seed": number, **ask, **more}, f"{entry.system.name}: warming up")
        entry.facts["warm_ups"] = entry.answers[:]
        entry.answers.clear()
        return entry.problem is None

    def _ask(self, entry: Entry, child: Child, request: dict[str, Any], words: str) -> None:
        if entry.problem is not None:
            return
        self.line.show(words)
        others = UsedByOthers(child.process.pid)
        try:
            answer = child.ask(request, lambda s: self.line.waiting(words, s), self.deadline or RUN_S)
            asked = {key: request[key] for key in request if key != "seed"}
            entry.answers.append({**answer, **asked, "others": others.share()})
        except ChildFailed as failed:
            entry.problem = str(failed)

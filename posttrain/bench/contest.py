"""What `rollout`, `step`, `train` and `sync` share: the options of a comparison, its measurement and its table.

`--set SYSTEM:KEY=VALUE` and `--env SYSTEM:NAME=VALUE` change the settings of a system; `--also NEW=SYSTEM` adds it a
second time under another name, so that two sets of settings are measured in the same alternation.

Each system runs in its own process. All are loaded and warmed up first, then measured in alternation (A, B, C, A, B, C)
while the others are paused, so a machine that slows down affects all alike. On CUDA one system after the other is
loaded, measured and ended, because each takes most of the device's memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.bench.child import Child, ChildFailed, OtherLoad, start_runner
from posttrain.bench.device import Device, Shape, check_writable, describe_machine, find_device, shape_of, write_json
from posttrain.bench.output import StatusLine, factor, render
from posttrain.bench.systems import HERE, System, choose
from posttrain.bench.workload import Model, default_model, fill_in_sizes, find_model
from posttrain.errors import UserError

LOAD_S, RUN_S = 900.0, 1800.0  # deadlines; the first compilation of a peer takes a minute or two

MakeJob = Callable[[System], dict[str, Any]]
Figures = Callable[["Entry"], dict[str, float]]  # `best`, `median` and more of an entry; empty without answers


@dataclass
class Entry:
    """What became of one system: its answers, or why there are none."""

    system: System
    facts: dict[str, Any] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None

    def version(self) -> str:
        """Package and version; of ours also the folder of its code, if that is not this checkout."""
        packages, name = self.facts.get("packages", {}), self.system.package
        name = f"{name}-cpu" if f"{name}-cpu" in packages else name
        text, code = f"{name} {packages.get(name, '')}".strip(), self.facts.get("code")
        other = self.system.ours and code and ("PYTHONPATH" in self.system.variables or code != str(HERE))
        return f"{text} from {code}" if other else text

    def times(self) -> dict[str, float]:
        """The best and the median seconds of its answers; empty without any."""
        times = [answer["seconds"] for answer in self.answers]
        return {"best": min(times), "median": statistics.median(times)} if times else {}

    def as_json(self) -> dict[str, Any]:
        preload = {"LD_PRELOAD": self.system.preload} if self.system.preload else {}
        return {
            "what": self.system.what,
            "problem": self.problem,
            "given_settings": self.system.settings,
            "variables": {**self.system.variables, **preload},
            **self.facts,
            **({"warm_ups": _without_samples(self.facts["warm_ups"])} if "warm_ups" in self.facts else {}),
            "runs": _without_samples(self.answers),
        }


def _without_samples(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in answer.items() if key != "sampled"} for answer in answers]


def disturbance(entries: Sequence[Entry]) -> str:
    """A sentence on how much other processes used the cores during the measurement."""
    shares = [answer["others"] for entry in entries for answer in entry.answers if answer.get("others") is not None]
    if not shares:
        return "what others used meanwhile is not known"
    return f"others used {sum(shares) / len(shares):.0%} of the cores meanwhile, {max(shares):.0%} at most"


def comparison(
    entries: Sequence[Entry],
    head: Sequence[str],
    figures: Figures,
    cells: Callable[[Entry, dict[str, float]], list[str]],
    *,
    nothing: str,
    floor: tuple[str, float, str, str] | None = None,
) -> str:
    """A table with a row per system: its name, what `cells` gives, and a note.

    The column whose head ends with `vs` is filled here: medians relative to the first system of ours that ran.
    `nothing` is the note of a system without answers; `floor` is the last row: (name, value, its text, note).
    """
    # Relative to ours, by medians: the best run of many favours the system with the larger spread.
    base = next((entry for entry in entries if entry.system.ours and entry.answers), None)
    ours = figures(base)["median"] if base else None
    head, versus = list(head), next(number for number, title in enumerate(head) if title.endswith("vs"))
    head[versus] += f" {base.system.name}" if base else " ours"
    rows = []
    for entry in entries:
        found = figures(entry)
        if entry.problem or not found:
            rows.append([entry.system.name, *["-"] * (len(head) - 2), entry.problem or nothing])
        else:
            row = [entry.system.name, *cells(entry, found)]
            rows.append([*row[:versus], factor(found["median"], ours), *row[versus:]])
    if floor:
        name, value, text, note = floor
        empty = [""] * (len(head) - 4)
        rows.append([name, text, *empty[: versus - 2], factor(value, ours), *empty[versus - 2 :], note])
    return render(head, rows, left=(0, len(head) - 1))


@dataclass
class Contest:
    """How systems are measured. `module` names our runner; a system may take `deadline` seconds to load or to run."""

    module: str
    place: Device
    threads: int
    repeat: int
    warm_ups: int
    line: StatusLine
    deadline: float | None = None
    # Called with all entries whenever one is done, so that results are on disk if the next system never ends.
    keep: Callable[[list[Entry]], None] = lambda entries: None
    requests: Sequence[Mapping[str, Any]] = ({},)  # what each run of a system consists of; a seed is added
    # Added to a peer's requests while it warms up. Ours compile at first use, so they warm up with full requests.
    warm_up: Mapping[str, Any] = field(default_factory=dict)

    def measure(self, systems: Sequence[System], make_job: MakeJob) -> list[Entry]:
        """`repeat` answers to each request from every system that runs; the others carry their problem."""
        entries = [Entry(system) for system in systems]
        alone = self.place.kind == "cuda"
        for group in [[entry] for entry in entries] if alone else [entries]:
            self._alternate(group, make_job)
            self.keep(entries)
        self.line.clear()
        return entries

    def _alternate(self, entries: Sequence[Entry], make_job: MakeJob) -> None:
        with ExitStack() as stack:
            loaded: list[tuple[Entry, Child]] = []
            for entry in entries:
                system, kind = entry.system, self.place.kind
                entry.problem = system.why_missing(kind)
                if entry.problem is not None:
                    continue
                job, name = {**make_job(system), "device": kind}, f"{self.module}-{system.name}"
                runner = start_runner(system, self.module, job, name, threads=self.threads, kind=kind)
                child = stack.enter_context(runner)
                if self._load(entry, child):
                    loaded.append((entry, child))
                # Threads that keep spinning after their work would slow the next system: after an unpaused vLLM,
                # `native` generated 23,000 instead of 37,000 tokens a second.
                child.pause()
            for number in range(self.repeat):
                for entry, child in loaded:
                    text = f"{entry.system.name}: run {number + 1} of {self.repeat}"
                    child.resume()
                    for request in self.requests:
                        self._ask(entry, child, {"seed": number + self.warm_ups, **request}, text)
                    child.pause()

    def _load(self, entry: Entry, child: Child) -> bool:
        started = time.monotonic()
        try:
            waiting = self.line.begin(f"{entry.system.name}: loading")
            entry.facts = child.ready(waiting, self.deadline or LOAD_S)
        except ChildFailed as failed:
            entry.problem = str(failed)
            return False
        entry.facts["code"] = entry.system.code(self.place.kind)
        entry.facts["load_s"] = time.monotonic() - started
        more = {} if entry.system.ours else self.warm_up
        for number in range(self.warm_ups):
            for request in self.requests:
                self._ask(entry, child, {"seed": number, **request, **more}, f"{entry.system.name}: warming up")
        # Warm-ups are kept, apart: they show what compiling and filling caches cost.
        entry.facts["warm_ups"] = entry.answers[:]
        entry.answers.clear()
        return entry.problem is None

    def _ask(self, entry: Entry, child: Child, request: dict[str, Any], text: str) -> None:
        if entry.problem is not None:
            return
        # Around each run: a figure that was measured beside a compiler can be seen and left out.
        others = OtherLoad(child.process.pid)
        try:
            answer = child.ask(request, self.line.begin(text), self.deadline or RUN_S)
            asked = {key: request[key] for key in request if key != "seed"}
            entry.answers.append({**answer, **asked, "others": others.share()})
        except ChildFailed as failed:
            entry.problem = str(failed)


@dataclass
class Bench:
    """A comparison that is ready to be measured."""

    options: argparse.Namespace
    place: Device
    systems: list[System]
    model: Model
    record: dict[str, Any]
    path: Path | None
    line: StatusLine

    @property
    def shape(self) -> Shape | None:
        """None for a model to which the floor's formula does not apply."""
        try:
            return shape_of(self.model.config, self.model.dtype)
        except KeyError:
            return None

    def job(self, system: System, **more: Any) -> dict[str, Any]:
        return {
            "model": str(self.model.folder),
            "dtype": self.model.dtype,
            "threads": self.options.threads,
            "engine": system.engine,
            "settings": system.settings,
            **more,
        }

    def contest(self, *, warm_ups: int, content: Callable[[list[Entry]], dict[str, Any]], **more: Any) -> Contest:
        """Writes `content` of the entries after each system that is done."""
        options = self.options

        def keep(entries: list[Entry]) -> None:
            if self.path is not None:
                facts = {"name": self.model.name, "dtype": self.model.dtype, "config": self.model.config}
                write_json(self.path, {**self.record, "model": facts, **content(entries)})

        return Contest(
            module=options.job,
            place=self.place,
            threads=options.threads,
            repeat=options.repeat,
            warm_ups=warm_ups,
            line=self.line,
            deadline=options.deadline,
            keep=keep,
            **more,
        )

    def print_results(self, entries: Sequence[Entry], work: str, table: str) -> int:
        """Print what was measured where, and the table; the exit status is 1 if there are no answers."""
        where = self.place.words(self.record["cpu"], self.options.threads)
        print(f"\n{self.model.name} in {self.model.dtype}: {work}\n{where}; {disturbance(entries)}\n")
        print(table)
        return 0 if any(entry.answers for entry in entries) else 1


def prepare(
    options: argparse.Namespace,
    cpu: tuple[System, ...],
    cuda: tuple[System, ...] | None = None,
    check: Callable[[argparse.Namespace], None] = lambda options: None,
) -> Bench:
    """Reject wrong options (`check` has a job's own rules) before anything slow, then find device, model, systems."""
    # Checked before anything is loaded: an hour of measuring must not end in a path that does not exist.
    path = check_writable(options.json)
    place, line = find_device(options.device), StatusLine()
    fill_in_sizes(options, place)
    options.model = options.model or default_model(place)
    check(options)
    known = cpu if place.kind == "cpu" or cuda is None else cuda
    systems = apply_options(choose(known, options.only), options.env, options.set, options.also, options.python)
    if options.install and place.kind == "cuda":
        raise UserError(
            "--install makes environments for the CPU; install the peers beside posttrain, or give --python SYSTEM=PATH"
        )
    line.begin(f"model {options.model}")
    model = find_model(options.model, place.kind)
    record = describe_machine(options.threads, place)
    for system in systems if options.install else ():
        if (environment := system.environment) is not None and not environment.is_installed():
            environment.install(line.begin)
    return Bench(options, place, systems, model, record, path, line)


def apply_options(
    systems: Sequence[System],
    variables: Sequence[str],
    settings: Sequence[str],
    also: Sequence[str] = (),
    pythons: Sequence[str] = (),
) -> list[System]:
    """The systems with these options applied; an empty value removes a variable."""
    wanted = {system.name: system for system in systems}
    for text in also:
        new, _, name = text.partition("=")
        if name not in wanted or new in wanted or not new.replace("-", "").replace("_", "").isalnum():
            raise UserError(f"--also {text}: give NEWNAME=SYSTEM, SYSTEM being {', '.join(wanted)}")
        wanted[new] = replace(wanted[name], name=new)
    for text in pythons:
        name, _, path = text.partition("=")
        if name not in wanted or not path or wanted[name].ours:
            peers = ", ".join(system.name for system in wanted.values() if not system.ours)
            raise UserError(f"--python {text}: give SYSTEM=PATH, SYSTEM being {peers}")
        wanted[name] = replace(wanted[name], python=path)
    for option, texts in (("--env", variables), ("--set", settings)):
        for text in texts:
            name, colon, rest = text.partition(":")
            key, equals, value = rest.partition("=")
            if not colon or not equals or not key or name not in wanted:
                raise UserError(f"{option} {text}: give SYSTEM:KEY=VALUE, SYSTEM being {', '.join(wanted)}")
            system = wanted[name]
            if option == "--set":
                wanted[name] = replace(system, settings={**system.settings, key: _read(value)})
            elif key == "LD_PRELOAD" and not value:
                wanted[name] = replace(system, preload=None)
            else:
                change = {key: value} if value else {}
                kept = {k: v for k, v in system.variables.items() if k != key} | change
                cuda = system.cuda and {k: v for k, v in system.cuda.items() if k != key} | change
                wanted[name] = replace(system, variables=kept, cuda=cuda)
    return list(wanted.values())


def _read(value: str) -> Any:
    try:
        return json.loads(value)  # a number, true, false, null or a JSON object
    except ValueError:
        return value

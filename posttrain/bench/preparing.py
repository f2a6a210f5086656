"""What `rollout`, `step`, `train` and `sync` do before they measure: device, sizes, model, systems, and the contest.

`--set SYSTEM:KEY=VALUE` and `--env SYSTEM:NAME=VALUE` give a system other settings than those it has here; `--also
NEW=SYSTEM` adds a second row of one, so that two sets of settings are measured in the same alternation.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.bench.contest import Contest, Entry, install_missing
from posttrain.bench.floor import Shape, shape_of
from posttrain.bench.place import Place, circumstances, find_place, writable, write_json
from posttrain.bench.presets import Model, find_model
from posttrain.bench.systems import System, choose
from posttrain.bench.table import Line
from posttrain.bench.workload import default_model, fill_in_sizes
from posttrain.errors import UserError


@dataclass
class Prepared:
    """A bench that is ready to be run, and what it writes."""

    options: argparse.Namespace
    place: Place
    systems: list[System]
    model: Model
    record: dict[str, Any]
    path: Path | None
    line: Line

    @property
    def shape(self) -> Shape | None:
        """None for a model that the floor's formula does not fit."""
        try:
            return shape_of(self.model.config, self.model.dtype)
        except KeyError:
            return None

    def contest(self, *, warm_ups: int, content: Callable[[list[Entry]], dict[str, Any]], **more: Any) -> Contest:
        """Writes `content` of the entries after each of them that is done."""
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

    def where(self) -> str:
        return self.place.words(self.record["cpu"], self.options.threads)


def prepare(
    options: argparse.Namespace,
    cpu: tuple[System, ...],
    cuda: tuple[System, ...] | None = None,
    check: Callable[[argparse.Namespace], None] = lambda options: None,
) -> Prepared:
    """Refuse what is wrong (`check` has a job's own rules) before anything heavy is done; then find device, model and
    systems."""
    path = writable(options.json)
    place, line = find_place(options.device), Line()
    fill_in_sizes(options, place)
    options.model = options.model or default_model(place)
    check(options)
    known = cpu if place.kind == "cpu" or cuda is None else cuda
    systems = tuned(choose(known, options.only), options.env, options.set, options.also, options.python)
    if options.install and place.kind == "cuda":
        raise UserError(
            "--install makes environments for the CPU; install the peers beside posttrain, or give --python SYSTEM=PATH"
        )
    line.show(f"model {options.model}")
    model = find_model(options.model, place.kind)
    record = circumstances(options.threads, place)
    if options.install:
        install_missing(systems, line)
    return Prepared(options, place, systems, model, record, path, line)


def tuned(
    systems: Sequence[System],
    variables: Sequence[str],
    settings: Sequence[str],
    also: Sequence[str] = (),
    pythons: Sequence[str] = (),
) -> list[System]:
    """The systems with these on top of their own; `also` adds a second row of one, under another name.

    An empty value takes a variable away.
    """
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
            if option == "--env" and key == "LD_PRELOAD" and not value:
                wanted[name] = replace(system, preload=None)
            elif option == "--env":
                change = {key: value} if value else {}
                kept = {k: v for k, v in system.variables.items() if k != key} | change
                cuda = system.cuda and {k: v for k, v in system.cuda.items() if k != key} | change
                wanted[name] = replace(system, variables=kept, cuda=cuda)
            else:
                wanted[name] = replace(system, settings={**system.settings, key: _read(value)})
    return list(wanted.values())


def _read(value: str) -> Any:
    """A number, true, false, null or a JSON object; anything else is text."""
    try:
        return json.loads(value)
    except ValueError:
        return value

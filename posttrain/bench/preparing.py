"""What `rollout`, `step`, `train` and `sync` do before they measure: device, sizes, model, systems, and the contest."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.bench.chips import Place, find_place
from posttrain.bench.contest import Contest, Entry, install_missing
from posttrain.bench.floor import Shape, shape_of
from posttrain.bench.presets import Model, find_model
from posttrain.bench.progress import Line
from posttrain.bench.record import circumstances, writable, write_json
from posttrain.bench.systems import System, choose
from posttrain.bench.tuning import tuned
from posttrain.bench.works import default_model, settle
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
    settle(options, place)
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

"""`posttrain bench sweep`: time per token of one engine by rows, by length and by model, beside the machine's floor."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.bench import bench_folder
from posttrain.bench.child import Child, ChildFailed
from posttrain.bench.chips import Place, find_place
from posttrain.bench.contest import LOAD_S, RUN_S
from posttrain.bench.floor import Shape, floor_seconds, shape_of
from posttrain.bench.plot import write_plot
from posttrain.bench.presets import PRESETS, Model, find_shape
from posttrain.bench.progress import Line
from posttrain.bench.record import circumstances, read_json, writable, write_json
from posttrain.bench.sweep_report import AXES, Point, panels, report, title
from posttrain.bench.systems import System
from posttrain.bench.works import default_model
from posttrain.errors import UserError

ROWS = [2**power for power in range(10)]
LENGTHS = [2**power for power in range(4, 13)]


def main(options: argparse.Namespace) -> int:
    """Measure, print a table for each axis, write the file and the picture; `--from` shows what a file holds."""
    json_path, svg_path = writable(options.json), writable(options.svg)
    if options.from_json is None:
        found = measured(options, json_path)
    else:
        found = read_json(options.from_json)
    print(report(found))
    if svg_path is not None:
        write_plot(svg_path, found["engine"], title(found), panels(found))
    if problem := found.get("problem"):
        print(f"\n{problem}")
    return 1 if problem else 0


def measured(options: argparse.Namespace, path: Path | None) -> dict[str, Any]:
    """Every point, or those before a `problem`; the file is written after each of them."""
    place, line = find_place(options.device), Line()
    name = options.model or default_model(place)
    options.tail = options.tail or (512 if place.kind == "cuda" else 128)
    sizes = Sizes(options)
    found: dict[str, Any] = {"model": find_shape(name).name, "engine": options.engine, "models": {}}
    found = {**circumstances(options.threads, place), **found, **{f"by_{by}": [] for by in AXES}}

    def keep() -> None:
        if path is not None:
            write_json(path, found)

    try:
        for model in map(find_shape, sizes.models(name)):
            with opened(model, options, sizes, place, line) as sweep:
                measure(sweep, found, keep)
    except ChildFailed as failed:
        found["problem"] = f"--engine {options.engine}: {failed}"
        if not any(found[f"by_{by}"] for by in AXES):
            raise UserError(found["problem"]) from None
    finally:
        line.clear()
    keep()
    return found


class Sizes:
    """The points of the sweep: rows, tokens of a response, and the part of it that is a given prefix."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows = options.rows or ROWS
        self.lengths = options.lengths or LENGTHS
        unknown = [name for name in options.models or () if name not in PRESETS]
        if unknown:
            raise UserError(f"--models {','.join(unknown)}: give presets, of {', '.join(PRESETS)}")

    def models(self, name: str) -> list[str]:
        """The sweep's own model and those that are compared with it, each once."""
        return list(dict.fromkeys([name, *(self.options.models or ())]))

    def by_rows(self) -> list[Point]:
        return [{"rows": rows, "tokens": self.options.row_tokens} for rows in self.rows]

    def by_length(self) -> list[Point]:
        return [self._of_length(tokens) for tokens in self.lengths]

    def fixed(self) -> Point:
        """The point at which models are compared."""
        return {"rows": self.options.length_rows, "tokens": self.options.row_tokens}

    def _of_length(self, tokens: int) -> Point:
        """Rows as long as `--whole` are decoded from end to end. Of longer ones `--tail` tokens are, after a given
        prefix that puts them where a row has half of its tokens: a token's time grows evenly with what lies before it,
        so theirs is the whole row's mean. The first half of them only shows that all rows have begun."""
        options = self.options
        if tokens <= options.whole:
            return {"rows": options.length_rows, "tokens": tokens}
        prefix = max(1, options.prompt_tokens + tokens // 2 - 3 * options.tail // 4)
        rows = max(1, min(options.length_rows, options.most_tokens // (prefix + options.tail)))
        return {"rows": rows, "tokens": tokens, "prefix": prefix, "made": options.tail}

    def slots(self) -> int:
        return max(*self.rows, self.options.length_rows)


class Sweep:
    """Asks the process of one model's engine for one point after another."""

    def __init__(self, child: Child, model: Model, options: argparse.Namespace, sizes: Sizes, line: Line) -> None:
        self.child, self.model, self.options, self.sizes, self.line = child, model, options, sizes, line
        self.known: dict[tuple, Point] = {}
        self.chip: dict[str, Any] | None = None
        self.facts: dict[str, Any] = {}

    def machine(self) -> dict[str, Any]:
        """What the data sheet says of a known chip, which is above what a small matrix reaches; measured otherwise."""
        if self.chip is not None:
            return self.chip
        found = self._ask({"machine": True}, "measuring what this machine can do")
        return {**found, "bandwidth": {int(size): rate for size, rate in found["bandwidth"].items()}}

    def point(self, wanted: Point) -> Point:
        """Microseconds per token: the best of the runs after one that warms up (after a prefix each does so itself)."""
        key = tuple(sorted(wanted.items()))
        if key not in self.known:
            rows, tokens, prefix = wanted["rows"], wanted["tokens"], wanted.get("prefix")
            words = f"{self.model.name}: {rows} rows x {tokens} tokens"
            request = {"rows": rows, "tokens": wanted.get("made", tokens), "prefix": prefix}
            runs = range(self.options.repeat if prefix else self.options.repeat + 1)
            answers = [self._ask({**request, "seed": run}, words) for run in runs][0 if prefix else 1 :]
            best = min(answers, key=lambda answer: answer["seconds"] / answer["tokens"])
            found = {"us_per_token": best["seconds"] * 1e6 / best["tokens"], "timed": best["tokens"] / rows}
            self.known[key] = {**wanted, **found, "seconds": [answer["seconds"] for answer in answers]}
        return dict(self.known[key])

    def _ask(self, request: dict[str, Any], words: str) -> dict[str, Any]:
        if not request.get("seed"):
            self.line.show(words)
        return self.child.ask(request, lambda s: self.line.waiting(words, s), RUN_S)


@contextmanager
def opened(model: Model, options: argparse.Namespace, sizes: Sizes, place: Place, line: Line) -> Iterator[Sweep]:
    """The engine over this model in a process of its own, ready."""
    system = System(options.engine, "", engine=options.engine)
    job = {
        "model": str(model.folder),
        "drawn": model.name in PRESETS,
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "threads": options.threads,
        "engine": options.engine,
        "prompt_tokens": options.prompt_tokens,
        "slots": sizes.slots(),
        "device": place.kind,
        "settings": {},
    }
    logs = bench_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        log = logs / f"sweep-{options.engine}-{model.name}.log"
        child = Child(system.command(path, "sweep"), system.variables_for(options.threads), log)
        try:
            words = f"{options.engine}, {model.name}: loading"
            line.show(words)
            sweep = Sweep(child, model, options, sizes, line)
            sweep.facts = child.ready(lambda s: line.waiting(words, s), LOAD_S)
            if (chip := place.chip) is not None:
                sweep.chip = {"peak_flops": chip.flops, "bandwidth": {1: chip.bandwidth}}
            yield sweep
        finally:
            child.close()


def measure(sweep: Sweep, found: dict[str, Any], keep: Callable[[], None]) -> None:
    """Add the model's points to `found`, one after the other: of the first model those of rows and length, of each its
    place among models."""
    sizes, options, model = sweep.sizes, sweep.options, sweep.model
    axes = {"rows": sizes.by_rows(), "length": sizes.by_length()} if not found["models"] else {}
    axes |= {"model": [sizes.fixed()]} if options.models else {}
    machine, shape, points = sweep.machine(), shape_of(model.config, model.dtype), []
    size = PRESETS[model.name].parameters if model.name in PRESETS else shape.weights
    for by, wanted in ((by, wanted) for by, all_wanted in axes.items() for wanted in all_wanted):
        point = sweep.point(wanted) | ({"model": model.name, "parameters": size} if by == "model" else {})
        point["floor_us"] = floor_us(shape, machine, point, options.prompt_tokens)
        points.append(point)
        found[f"by_{by}"].append(point)
        found["models"][model.name] = {"dtype": model.dtype, "config": model.config, **sweep.facts, "machine": machine}
        keep()
    found["by_model"].sort(key=lambda point: point["parameters"])
    machine = found["models"][model.name]["machine"] = better(machine, sweep.machine())
    for point in points:
        point["floor_us"] = floor_us(shape, machine, point, options.prompt_tokens)


def better(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The higher of two measurements of each limit: a neighbour's work can only lower them."""
    rates = {int(size): max(rate, other["bandwidth"][size]) for size, rate in one["bandwidth"].items()}
    return {"peak_flops": max(one["peak_flops"], other["peak_flops"]), "bandwidth": rates}


def floor_us(shape: Shape, machine: dict[str, Any], point: Point, prompt: int) -> float:
    """Microseconds per token below which this machine cannot go."""
    timed = round(point["timed"])
    begin = point["prefix"] + point["made"] - timed if "prefix" in point else prompt
    least = floor_seconds(
        shape,
        rows=point["rows"],
        prompt=begin,
        tokens=timed,
        peak=machine["peak_flops"],
        bandwidth=machine["bandwidth"],
    )
    return least * 1e6 / (point["rows"] * timed)

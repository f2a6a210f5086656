"""`posttrain bench sweep`: time per token of one engine by rows, by length and by model, beside the machine's floor."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.bench import bench_folder
from posttrain.bench.child import Child, ChildFailed
from posttrain.bench.chips import Place, find_place
from posttrain.bench.contest import LOAD_S, RUN_S
from posttrain.bench.floor import Shape, floor_seconds, shape_of
from posttrain.bench.plot import Panel, write_plot
from posttrain.bench.presets import PRESETS, Model, find_shape
from posttrain.bench.progress import Line
from posttrain.bench.record import circumstances, writable, write_json
from posttrain.bench.systems import System
from posttrain.bench.table import render
from posttrain.bench.works import default_model
from posttrain.errors import UserError

ROWS = [2**power for power in range(10)]
LENGTHS = [2**power for power in range(4, 13)]
AXES = ("rows", "length", "model")

Point = dict[str, Any]


def main(options: argparse.Namespace) -> int:
    """Measure, print a table for each axis, write the file and the picture."""
    json_path, svg_path = writable(options.json), writable(options.svg)
    place, line = find_place(options.device), Line()
    name = options.model or default_model(place)
    options.tail = options.tail or (512 if place.kind == "cuda" else 128)
    sizes = Sizes(options)
    record = circumstances(options.threads, place)
    found: dict[str, Any] = {"model": find_shape(name).name, "engine": options.engine, "models": {}, "by_model": []}
    try:
        for model in map(find_shape, sizes.models(name)):
            with opened(model, options, sizes, place, line) as sweep:
                measure(sweep, found, main=not found["models"])
            if json_path is not None:
                write_json(json_path, {**record, **found})
    except ChildFailed as failed:
        raise UserError(f"--engine {options.engine}: {failed}") from None
    finally:
        line.clear()
    print(_head(found, record, options))
    print("\n\n".join(table(by, found[f"by_{by}"]) for by in AXES if found.get(f"by_{by}")))
    if svg_path is not None:
        write_plot(svg_path, options.engine, _title(found), panels(found))
    return 0


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
        return self.chip or self._ask({"machine": True}, "measuring what this machine can do")

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


def measure(sweep: Sweep, found: dict[str, Any], *, main: bool) -> None:
    """Add the model's points to `found`: of the main one those of rows and length, of each its place among models."""
    sizes, options, model = sweep.sizes, sweep.options, sweep.model
    before = sweep.machine()
    if main:
        found["by_rows"] = [sweep.point(wanted) for wanted in sizes.by_rows()]
        found["by_length"] = [sweep.point(wanted) for wanted in sizes.by_length()]
    of_model = [sweep.point(sizes.fixed())] if options.models else []
    machine = better(before, sweep.machine())
    points = [*of_model, *((found["by_rows"] + found["by_length"]) if main else [])]
    shape = shape_of(model.config, model.dtype)
    for point in points:
        point["floor_us"] = floor_us(shape, machine, point, options.prompt_tokens)
    for point in of_model:
        size = PRESETS[model.name].parameters if model.name in PRESETS else shape.weights
        found["by_model"].append({"model": model.name, "parameters": size, **point})
    found["by_model"].sort(key=lambda point: point["parameters"])
    found["models"][model.name] = {"dtype": model.dtype, "config": model.config, **sweep.facts, "machine": machine}


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


TITLES = {"rows": "by rows decoded side by side", "length": "by length of the response", "model": "by model"}


def table(by: str, points: list[Point]) -> str:
    """One line per point, with the number of times the floor."""
    head = ["rows", "tokens", "us/token", "tok/s", "floor us", "x floor"]
    lines = [
        [
            str(point["rows"]),
            str(point["tokens"]),
            f"{point['us_per_token']:.1f}",
            f"{1e6 / point['us_per_token']:,.0f}",
            f"{point['floor_us']:.2f}",
            f"{point['us_per_token'] / point['floor_us']:.1f}",
        ]
        for point in points
    ]
    if by == "model":
        head, lines = ["model", *head], [[p["model"], *line] for p, line in zip(points, lines, strict=True)]
    last = [(p["tokens"], p["prefix"] + p["made"], p["timed"]) for p in points if "prefix" in p]
    notes = [f"of {tokens} those from {end - timed:.0f} to {end}" for tokens, end, timed in last]
    under = f"\nby tokens in the middle of a row: {', '.join(notes)}" if notes else ""
    return f"{TITLES[by]}\n{render(head, lines, left=())}{under}"


def panels(found: dict[str, Any]) -> list[Panel]:
    """One for each axis that was swept; points with other rows than their neighbours have words."""
    made = []
    for by, key in (("rows", "rows"), ("length", "tokens"), ("model", "parameters")):
        points = found.get(f"by_{by}")
        if not points:
            continue
        first = points[0]
        label = {
            "rows": f"rows decoded side by side (responses of {first['tokens']} tokens)",
            "length": f"tokens per response ({first['rows']} rows side by side)",
            "model": f"parameters ({first['rows']} rows x {first['tokens']} tokens)",
        }[by]
        marks = [f"{p['rows']} rows" if by == "length" and p["rows"] != first["rows"] else "" for p in points]
        made.append(Panel(points, key, label, marks, [p["model"] for p in points] if by == "model" else None))
    return made


def _title(found: dict[str, Any]) -> str:
    return f"{found['model']} in {found['models'][found['model']]['dtype']}"


def _head(found: dict[str, Any], record: dict[str, Any], options: argparse.Namespace) -> str:
    model = found["models"][found["model"]]
    machine = model["machine"]
    sizes = ", ".join(f"{size >> 20} MiB {rate / 1e9:.0f}" for size, rate in machine["bandwidth"].items() if size > 1)
    rates = f"GB/s read by size: {sizes}" if sizes else f"{machine['bandwidth'][1] / 1e9:,.0f} GB/s by its data sheet"
    where = record.get("gpu") or f"{record['cpu']}; {options.threads} threads"
    return (
        f"\n{options.engine}, {found['model']} in {model['dtype']}; {where}; load before {record['load_before'][0]}\n"
        f"this machine: {machine['peak_flops'] / 1e9:,.0f} GFLOP/s in {model['dtype']}; {rates}\n"
    )

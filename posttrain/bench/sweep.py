"""`posttrain bench sweep`: time per token of one engine by rows, by length and by model, beside the machine's floor;
as tables and as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.bench.child import Child, ChildFailed, running
from posttrain.bench.contest import LOAD_S, RUN_S
from posttrain.bench.floor import better, floor_us, shape_of
from posttrain.bench.pictures import Panel, write_plot
from posttrain.bench.place import Place, circumstances, find_place, read_json, writable, write_json
from posttrain.bench.presets import PRESETS, Model, find_shape
from posttrain.bench.systems import System
from posttrain.bench.table import Line, render
from posttrain.bench.workload import Point, SweepSizes, default_model
from posttrain.errors import UserError


def main(options: argparse.Namespace) -> int:
    """Measure, print a table for each axis, write the file and the picture; `--from` shows what a file holds."""
    json_path, svg_path = writable(options.json), writable(options.svg)
    if options.from_json is None:
        found = measured(options, json_path)
    else:
        found = read_json(options.from_json, "sweep", ("engine", "models"))
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
    sizes = SweepSizes(options)
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


class Sweep:
    """Asks the process of one model's engine for one point after another."""

    def __init__(self, child: Child, model: Model, options: argparse.Namespace, sizes: SweepSizes, line: Line) -> None:
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
def opened(model: Model, options: argparse.Namespace, sizes: SweepSizes, place: Place, line: Line) -> Iterator[Sweep]:
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
    with running(system, "sweep", job, f"sweep-{options.engine}-{model.name}", threads=options.threads) as child:
        words = f"{options.engine}, {model.name}: loading"
        line.show(words)
        sweep = Sweep(child, model, options, sizes, line)
        sweep.facts = child.ready(lambda s: line.waiting(words, s), LOAD_S)
        if (chip := place.chip) is not None:
            sweep.chip = {"peak_flops": chip.flops, "bandwidth": {1: chip.bandwidth}}
        yield sweep


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


AXES = ("rows", "length", "model")

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


def title(found: dict[str, Any]) -> str:
    return f"{found['model']} in {found['models'][found['model']]['dtype']}"


def report(found: dict[str, Any]) -> str:
    """Where it was measured, and a table for each axis."""
    model = found["models"][found["model"]]
    machine, bandwidth = model["machine"], {int(size): rate for size, rate in model["machine"]["bandwidth"].items()}
    sizes = ", ".join(f"{size >> 20} MiB {rate / 1e9:.0f}" for size, rate in bandwidth.items() if size > 1)
    rates = f"GB/s read by size: {sizes}" if sizes else f"{bandwidth[1] / 1e9:,.0f} GB/s by its data sheet"
    where = found.get("gpu") or f"{found['cpu']}; {found['threads']} threads"
    head = (
        f"\n{found['engine']}, {title(found)}; {where}; load before {found['load_before'][0]}\n"
        f"this machine: {machine['peak_flops'] / 1e9:,.0f} GFLOP/s in {model['dtype']}; {rates}\n"
    )
    return "\n\n".join([head, *(table(by, points) for by in AXES if (points := found.get(f"by_{by}")))])

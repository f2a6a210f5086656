"""`posttrain bench sweep`: time per token of one engine by rows, by length and by model, beside the machine's floor.

Each model has one process, in which its engine measures one point (rows x tokens) after another.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.bench.child import Child, ChildFailed, start_runner
from posttrain.bench.contest import LOAD_S, RUN_S
from posttrain.bench.device import (
    Device,
    check_writable,
    describe_machine,
    find_device,
    floor_us,
    higher_rates,
    read_json,
    shape_of,
    write_json,
)
from posttrain.bench.output import Panel, StatusLine, render, write_plot
from posttrain.bench.systems import System
from posttrain.bench.workload import PRESETS, Model, default_model, find_shape
from posttrain.errors import UserError

AXES = ("rows", "length", "model")
ROWS, LENGTHS = [2**power for power in range(10)], [2**power for power in range(4, 13)]

# `rows` and `tokens`; a point of long rows also has `prefix` (tokens given) and `made` (tokens decoded after them).
# Measured points have `us_per_token`, `timed` (tokens of a row that were timed), `seconds` of each run and `floor_us`.
Point = dict[str, Any]
Found = dict[str, Any]  # what `--json` writes: the machine, `models`, and the points `by_rows`, `by_length`, `by_model`


def main(options: argparse.Namespace) -> int:
    """Measure, print a table for each axis, write the file and the picture; `--from` shows what a file holds."""
    json_path, svg_path = check_writable(options.json), check_writable(options.svg)
    if options.from_json is None:
        found = measure_all(options, json_path)
    else:
        found = read_json(options.from_json, "sweep", ("engine", "models"))
    print(report(found))
    if svg_path is not None:
        write_plot(svg_path, found["engine"], title(found), panels(found))
    if problem := found.get("problem"):
        print(f"\n{problem}")
    return 1 if problem else 0


def measure_all(options: argparse.Namespace, path: Path | None) -> Found:
    """Every point, or those before a `problem`; the file is written after each of them."""
    place, line = find_device(options.device), StatusLine()
    name = options.model or default_model(place)
    options.tail = options.tail or (512 if place.kind == "cuda" else 128)
    options.rows, options.lengths = options.rows or ROWS, options.lengths or LENGTHS
    if unknown := [model for model in options.models or () if model not in PRESETS]:
        raise UserError(f"--models {','.join(unknown)}: give presets, of {', '.join(PRESETS)}")
    found: Found = {"model": find_shape(name).name, "engine": options.engine, "models": {}}
    found = {**describe_machine(options.threads, place), **found, **{f"by_{by}": [] for by in AXES}}

    def save() -> None:
        if path is not None:
            write_json(path, found)

    try:
        for model in map(find_shape, dict.fromkeys([name, *(options.models or ())])):
            with open_engine(model, options, place, line) as engine:
                measure_model(engine, found, save)
    except ChildFailed as failed:
        found["problem"] = f"--engine {options.engine}: {failed}"
        if not any(found[f"by_{by}"] for by in AXES):
            raise UserError(found["problem"]) from None
    finally:
        line.clear()
    save()
    return found


def point_of_length(options: argparse.Namespace, tokens: int) -> Point:
    """Rows up to `--whole` tokens are decoded from end to end, of longer ones only `--tail` tokens in the middle."""
    if tokens <= options.whole:
        return {"rows": options.length_rows, "tokens": tokens}
    # A token's time grows linearly with the tokens before it, so the middle token of a row takes the row's mean time.
    # Only the second half of the tail is timed (the first shows that all rows have begun), hence 3/4 of it.
    prefix = max(1, options.prompt_tokens + tokens // 2 - 3 * options.tail // 4)
    rows = max(1, min(options.length_rows, options.most_tokens // (prefix + options.tail)))
    return {"rows": rows, "tokens": tokens, "prefix": prefix, "made": options.tail}


class EngineProcess:
    """The process of one model's engine, which is asked for one point after another."""

    def __init__(
        self, child: Child, model: Model, options: argparse.Namespace, place: Device, line: StatusLine
    ) -> None:
        self.child, self.model, self.options, self.chip, self.line = child, model, options, place.chip, line
        self.known: dict[tuple, Point] = {}  # a point may lie on two axes
        self.facts = child.ready(line.begin(f"{options.engine}, {model.name}: loading"), LOAD_S)

    def machine(self) -> dict[str, Any]:
        """Rates of the machine: a known chip's data sheet, which no small matrix reaches, or else measured."""
        if self.chip is not None:
            return {"peak_flops": self.chip.flops, "bandwidth": {1: self.chip.bandwidth}}
        found = self._ask({"machine": True}, "measuring what this machine can do")
        return {**found, "bandwidth": {int(size): rate for size, rate in found["bandwidth"].items()}}

    def point(self, wanted: Point) -> Point:
        """The point with its best time per token, out of `--repeat` runs."""
        key = tuple(sorted(wanted.items()))
        if key not in self.known:
            rows, tokens, prefix = wanted["rows"], wanted["tokens"], wanted.get("prefix")
            text = f"{self.model.name}: {rows} rows x {tokens} tokens"
            request = {"rows": rows, "tokens": wanted.get("made", tokens), "prefix": prefix}
            warm_ups = 0 if prefix else 1  # the untimed tokens after a prefix warm up in every run
            runs = range(self.options.repeat + warm_ups)
            answers = [self._ask({**request, "seed": run}, text) for run in runs][warm_ups:]
            # The best of several runs: other processes only ever add time.
            best = min(answers, key=lambda answer: answer["seconds"] / answer["tokens"])
            found = {"us_per_token": best["seconds"] * 1e6 / best["tokens"], "timed": best["tokens"] / rows}
            self.known[key] = {**wanted, **found, "seconds": [answer["seconds"] for answer in answers]}
        return dict(self.known[key])

    def _ask(self, request: dict[str, Any], text: str) -> dict[str, Any]:
        if not request.get("seed"):
            self.line.begin(text)
        return self.child.ask(request, lambda seconds: self.line.wait(text, seconds), RUN_S)


@contextmanager
def open_engine(model: Model, options: argparse.Namespace, place: Device, line: StatusLine) -> Iterator[EngineProcess]:
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
        "slots": max(*options.rows, options.length_rows),
        "device": place.kind,
        "settings": {},
    }
    with start_runner(system, "sweep", job, f"sweep-{options.engine}-{model.name}", threads=options.threads) as child:
        yield EngineProcess(child, model, options, place, line)


def measure_model(engine: EngineProcess, found: Found, save: Callable[[], None]) -> None:
    """Add a model's points to `found`: of the first model by rows and by length, of each its point among models."""
    options, model = engine.options, engine.model
    wanted: list[tuple[str, Point]] = []
    if not found["models"]:
        wanted += [("rows", {"rows": rows, "tokens": options.row_tokens}) for rows in options.rows]
        wanted += [("length", point_of_length(options, tokens)) for tokens in options.lengths]
    if options.models:
        wanted.append(("model", {"rows": options.length_rows, "tokens": options.row_tokens}))
    # In the engine's own process, whose threads and types the points are measured with.
    machine, shape, points = engine.machine(), shape_of(model.config, model.dtype), []
    size = PRESETS[model.name].parameters if model.name in PRESETS else shape.weights
    for by, planned in wanted:
        point = engine.point(planned) | ({"model": model.name, "parameters": size} if by == "model" else {})
        point["floor_us"] = floor_us(shape, machine, point, options.prompt_tokens)
        points.append(point)
        found[f"by_{by}"].append(point)
        found["models"][model.name] = {"dtype": model.dtype, "config": model.config, **engine.facts, "machine": machine}
        save()
    found["by_model"].sort(key=lambda point: point["parameters"])
    # Rates that are measured before and after: another process can only have lowered them.
    machine = found["models"][model.name]["machine"] = higher_rates(machine, engine.machine())
    for point in points:
        point["floor_us"] = floor_us(shape, machine, point, options.prompt_tokens)


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

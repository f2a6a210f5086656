"""`posttrain bench sweep`: time per token of one engine by rows and by length, beside the machine's floor."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from posttrain.bench import bench_folder
from posttrain.bench.child import Child, ChildFailed
from posttrain.bench.chips import Place, find_place
from posttrain.bench.contest import LOAD_S, RUN_S
from posttrain.bench.floor import Shape, floor_seconds, shape_of
from posttrain.bench.plot import write_plot
from posttrain.bench.presets import Model, find_model
from posttrain.bench.progress import Line
from posttrain.bench.record import circumstances, writable, write_json
from posttrain.bench.systems import System
from posttrain.bench.table import render
from posttrain.bench.works import default_model
from posttrain.errors import UserError

ROWS = [2**power for power in range(10)]
LENGTHS = [2**power for power in range(4, 13)]

Point = dict[str, Any]


def main(options: argparse.Namespace) -> int:
    """Measure, print both tables, write the file and the picture."""
    json_path, svg_path = writable(options.json), writable(options.svg)
    place, line = find_place(options.device), Line()
    model = find_model(options.model or default_model(place), place.kind)
    record = circumstances(options.threads, place)
    try:
        facts, machine, by_rows, by_length = measure(model, options, line, place)
    except ChildFailed as failed:
        raise UserError(f"--engine {options.engine}: {failed}") from None
    finally:
        line.clear()
    print(_head(model, machine, record, options))
    print(table("rows", by_rows) + "\n\n" + table("tokens", by_length))
    if json_path is not None:
        content = {"model": model.name, "dtype": model.dtype, "config": model.config, **facts, "machine": machine}
        points = {"engine": options.engine, "by_rows": by_rows, "by_length": by_length}
        write_json(json_path, {**record, **content, **points})
    if svg_path is not None:
        write_plot(svg_path, options.engine, f"{model.name} in {model.dtype}", by_rows, by_length)
    return 0


def measure(
    model: Model, options: argparse.Namespace, line: Line, place: Place
) -> tuple[dict[str, Any], dict[str, Any], list[Point], list[Point]]:
    """(facts of the engine, the machine's limits, points by rows, points by length)."""
    system = System(options.engine, "", engine=options.engine)
    job = {
        "model": str(model.folder),
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "threads": options.threads,
        "engine": options.engine,
        "prompt_tokens": options.prompt_tokens,
        "slots": max(options.rows or ROWS),
        "device": place.kind,
        "settings": {},
    }
    logs = bench_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        child = Child(
            system.command(path, "sweep"), system.variables_for(options.threads), logs / f"sweep-{options.engine}.log"
        )
        try:
            line.show(f"{options.engine}: loading")
            facts = child.ready(lambda s: line.waiting(f"{options.engine}: loading", s), LOAD_S)
            sweep = _Sweep(child, options, line)
            before = sweep.machine()
            by_rows = [sweep.point(rows, options.row_tokens) for rows in options.rows or ROWS]
            by_length = [sweep.point(options.length_rows, tokens) for tokens in options.lengths or LENGTHS]
            machine = better(before, sweep.machine())
            if (chip := place.chip) is not None:  # the data sheet's rates are above what a small matrix reaches
                machine = {"peak_flops": chip.flops, "bandwidth": {1: chip.bandwidth}}
        finally:
            child.close()
    shape = shape_of(model.config, model.dtype)
    for point in (*by_rows, *by_length):
        point["floor_us"] = floor_us(shape, machine, point, options.prompt_tokens)
    return facts, machine, by_rows, by_length


def better(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The higher of two measurements of each limit: a neighbour's work can only lower them."""
    rates = {int(size): max(rate, other["bandwidth"][size]) for size, rate in one["bandwidth"].items()}
    return {"peak_flops": max(one["peak_flops"], other["peak_flops"]), "bandwidth": rates}


def floor_us(shape: Shape, machine: dict[str, Any], point: Point, prompt: int) -> float:
    """Microseconds per token below which this machine cannot go."""
    rows, tokens = point["rows"], point["tokens"]
    least = floor_seconds(
        shape, rows=rows, prompt=prompt, tokens=tokens, peak=machine["peak_flops"], bandwidth=machine["bandwidth"]
    )
    return least * 1e6 / (rows * tokens)


class _Sweep:
    """Asks the engine's process for one size after another."""

    def __init__(self, child: Child, options: argparse.Namespace, line: Line) -> None:
        self.child, self.options, self.line = child, options, line

    def machine(self) -> dict[str, Any]:
        return self._ask({"machine": True}, "measuring what this machine can do")

    def point(self, rows: int, tokens: int) -> Point:
        """Microseconds per token: the best of the runs after one that warms up."""
        runs = range(self.options.repeat + 1)
        words = f"{rows} rows x {tokens} tokens"
        answers = [self._ask({"rows": rows, "tokens": tokens, "seed": run}, words) for run in runs]
        seconds = [answer["seconds"] for answer in answers[1:]]
        return {
            "rows": rows,
            "tokens": tokens,
            "us_per_token": min(seconds) * 1e6 / (rows * tokens),
            "seconds": seconds,
        }

    def _ask(self, request: dict[str, Any], words: str) -> dict[str, Any]:
        if not request.get("seed"):
            self.line.show(words)
        return self.child.ask(request, lambda s: self.line.waiting(words, s), RUN_S)


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
    title = "by rows decoded side by side" if by == "rows" else "by length of the response"
    return f"{title}\n{render(head, lines, left=())}"


def _head(model: Model, machine: dict[str, Any], record: dict[str, Any], options: argparse.Namespace) -> str:
    sizes = ", ".join(f"{size >> 20} MiB {rate / 1e9:.0f}" for size, rate in machine["bandwidth"].items())
    return (
        f"\n{options.engine}, {model.name} in {model.dtype}; {record['cpu']}; {options.threads} threads; "
        f"load before {record['load_before'][0]}\n"
        f"this machine: {machine['peak_flops'] / 1e9:,.0f} GFLOP/s in {model.dtype}; GB/s read by size: {sizes}\n"
    )

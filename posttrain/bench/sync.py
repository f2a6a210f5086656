"""`posttrain bench sync`: seconds from new weights in the trainer to a rollout engine that computes with them."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from posttrain.bench.contest import Entry, disturbance
from posttrain.bench.preparing import Prepared, prepare
from posttrain.bench.systems import SYNC, System
from posttrain.bench.table import factor, render

WARM_UPS = 1


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file; the status is 1 if nothing could be measured."""
    bench = prepare(options, SYNC)
    model = bench.model

    def job(system: System) -> dict[str, Any]:
        return {
            "model": str(model.folder),
            "dtype": model.dtype,
            "threads": options.threads,
            "engine": system.engine,
            "settings": system.settings,
        }

    def content(entries: list[Entry]) -> dict[str, Any]:
        results = {entry.system.name: entry.as_json() | figures(entry) for entry in entries}
        return {"floor_s": floor(bench, entries), "systems": results}

    entries = bench.contest(warm_ups=WARM_UPS, content=content).measure(bench.systems, job)
    print(f"\n{model.name} in {model.dtype}: new weights for the rollout\n{bench.where()}; {disturbance(entries)}\n")
    print(table(entries, floor(bench, entries)))
    return 0 if any(entry.answers for entry in entries) else 1


def floor(bench: Prepared, entries: Sequence[Entry]) -> float | None:
    """Seconds in which the chip reads the weights once and writes them once; sharing them is below that."""
    sizes = [answer["bytes"] for entry in entries for answer in entry.answers]
    return None if bench.place.chip is None or not sizes else 2 * max(sizes) / bench.place.chip.bandwidth


def figures(entry: Entry) -> dict[str, float]:
    times = [answer["seconds"] for answer in entry.answers]
    return {"best": min(times), "median": statistics.median(times)} if times else {}


def table(entries: Sequence[Entry], limit: float | None = None) -> str:
    base = next((entry for entry in entries if entry.system.ours and entry.answers), None)
    ours = figures(base)["median"] if base else None
    rows = []
    for entry in entries:
        found = figures(entry)
        if entry.problem or not found:
            rows.append([entry.system.name, *["-"] * 4, entry.problem or "no runs"])
            continue
        moved = f"{entry.answers[-1]['moved'] / 2**30:.2f}"
        times = [f"{1000 * found[key]:.2f}" for key in ("best", "median")]
        rows.append([entry.system.name, *times, factor(found["median"], ours), moved, entry.version()])
    if limit:
        rows.append(["floor of a copy", f"{1000 * limit:.2f}", "", factor(limit, ours), "", "the chip's bandwidth"])
    versus = f"time vs {base.system.name}" if base else "time vs ours"
    return render(["system", "best ms", "median ms", versus, "GiB moved", "note"], rows, left=(0, 5))

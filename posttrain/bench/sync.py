"""`posttrain bench sync`: seconds from new weights in the trainer to a rollout engine that computes with them."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from posttrain.bench.contest import Entry, comparison, prepare
from posttrain.bench.systems import SYNC

HEAD = ("system", "best ms", "median ms", "time vs", "GiB moved", "note")


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file; the status is 1 if nothing could be measured."""
    bench = prepare(options, SYNC)
    chip = bench.place.chip

    def floor(entries: list[Entry]) -> float | None:
        # A copy reads the weights once and writes them once; an engine that shares them is below that.
        sizes = [answer["bytes"] for entry in entries for answer in entry.answers]
        return None if chip is None or not sizes else 2 * max(sizes) / chip.bandwidth

    def content(entries: list[Entry]) -> dict[str, Any]:
        results = {entry.system.name: entry.as_json() | figures(entry) for entry in entries}
        return {"floor_s": floor(entries), "systems": results}

    entries = bench.contest(warm_ups=1, content=content).measure(bench.systems, bench.job)
    limit = floor(entries)
    row = ("floor of a copy", limit, f"{1000 * limit:.2f}", "the chip's bandwidth") if limit else None
    table = comparison(entries, HEAD, figures, _cells, nothing="no runs", floor=row)
    return bench.print_results(entries, "new weights for the rollout", table)


def figures(entry: Entry) -> dict[str, float]:
    times = [answer["seconds"] for answer in entry.answers]
    return {"best": min(times), "median": statistics.median(times)} if times else {}


def _cells(entry: Entry, found: dict[str, float]) -> list[str]:
    times = [f"{1000 * found[key]:.2f}" for key in ("best", "median")]
    return [*times, f"{entry.answers[-1]['moved'] / 2**30:.2f}", entry.version()]

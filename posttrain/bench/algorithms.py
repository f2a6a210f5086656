"""`posttrain bench algorithms`: what every algorithm learns on the embedded task, by several seeds.

Runs are processes side by side. `--json FILE` is written after every run, and what it holds already is not run again:
the same command goes on where it was stopped, on another machine too.
"""

from __future__ import annotations

import argparse
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from posttrain.bench.learning.entries import choose, entries
from posttrain.bench.learning.results import (
    HEAD,
    Record,
    as_text,
    check_page,
    fill_page,
    gains,
    lines,
    markdown,
    stored,
    take_missing,
)
from posttrain.bench.learning.training import Run, side_by_side
from posttrain.bench.pictures import write_panels
from posttrain.bench.place import circumstances, default_threads, writable
from posttrain.bench.table import render
from posttrain.tracking.atomic import replace_file
from posttrain.version import __version__

PACKAGES = ("torch", "transformers")


def main(options: argparse.Namespace) -> int:
    """Train what is missing, print the table, write page and picture; the status is 1 if a run failed."""
    chosen = choose(options.only)
    path, svg = writable(options.json), writable(options.svg)
    check_page(options.markdown)
    record = stored(options.from_json or path, required=options.from_json is not None)
    failed: list[dict[str, Any]] = []
    if options.from_json is None:
        threads = options.threads or max(1, default_threads() // options.jobs)
        wanted = [
            Run(entry, seed, options.steps) for seed in range(1, options.seeds + 1) for entry in chosen
        ]  # seed by seed: a table that was stopped early has every algorithm
        failed = train(wanted, record, path, jobs=options.jobs, threads=threads)
    found = [row for row in gains(entries(), record) if row.runs]
    if found:
        print("\n" + render(HEAD, lines([row for row in found if row.entry in chosen]), left=(0, 1)))
        if options.markdown:
            fill_page(options.markdown, markdown(found, record))
        if svg is not None:
            write_panels(svg, found, f"Accuracy on held-out sums over {record['steps']} steps")
    elif not failed:
        print(f"{options.from_json}: there are no runs in it; `posttrain bench algorithms --json FILE` makes them")
    for run in failed:
        print(f"{run['algorithm']} seed {run['seed']} failed: {run['problem']}")
    return 1 if failed or not found else 0


def train(wanted: list[Run], record: Record, path: Path | None, *, jobs: int, threads: int) -> list[dict[str, Any]]:
    """Make the runs that `record` does not hold, adding each as it ends; gives those that failed."""
    missing = take_missing(record, wanted)
    if not missing:
        return []
    _prepare()
    packages = {"posttrain": __version__, **{name: version(name) for name in PACKAGES}}
    session = {**circumstances(threads), "jobs": jobs, "packages": packages}
    session["command"] = without_folders(session["command"])
    record["sessions"].append(session)
    number = len(record["sessions"]) - 1
    failed = []
    for result in side_by_side(missing, jobs=jobs, threads=threads):
        if "problem" in result:
            failed.append(result)
            continue
        record["runs"].append({**result, "session": number})
        if path is not None:
            replace_file(path, as_text(record).encode())
    return failed


def without_folders(command: str) -> str:
    """Absolute paths as the names of their files: the rest says nothing on another machine."""
    return re.sub(r" (?:/[^/\s]+)*/", " ", command)


def _prepare() -> None:
    """What all runs share is made once, before they start side by side: model, data, compiled kernels."""
    from posttrain.kernels.compiled import why_not
    from posttrain.trainer.embedded import ensure_embedded

    ensure_embedded(print)
    why_not()

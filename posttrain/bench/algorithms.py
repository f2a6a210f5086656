"""`posttrain bench algorithms`: what every algorithm learns on the embedded task, by several seeds.

Runs are processes side by side. `--json FILE` is written after every run, and what it holds already is not run again:
the same command goes on where it was stopped, on another machine too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from posttrain.bench.entries import choose, entries
from posttrain.bench.gains import HEAD, gains, lines
from posttrain.bench.pages import check_page, fill_page, markdown
from posttrain.bench.places import bench_folder
from posttrain.bench.progress import Line
from posttrain.bench.record import circumstances, default_threads, writable
from posttrain.bench.strips import write_strips
from posttrain.bench.table import render
from posttrain.bench.training import Process, Run
from posttrain.errors import UserError
from posttrain.tracking.atomic import replace_file

PACKAGES = ("torch", "transformers")
POLL_S = 0.5


def main(options: argparse.Namespace) -> int:
    """Train what is missing, print the table, write page and picture; the status is 1 if a run failed."""
    chosen = choose(options.only)
    path, svg = writable(options.json), writable(options.svg)
    check_page(options.markdown)
    record = _stored(options.from_json or path, required=options.from_json is not None)
    failed: list[dict[str, Any]] = []
    if options.from_json is None:
        threads = options.threads or max(1, default_threads() // options.jobs)
        wanted = [
            Run(entry, seed, options.steps) for seed in range(1, options.seeds + 1) for entry in chosen
        ]  # seed by seed: a table that was stopped early has every algorithm
        failed = train(wanted, record, path, jobs=options.jobs, threads=threads)
    rows = gains(entries(), record)
    found = [row for row in rows if row.runs]
    if found:
        print("\n" + render(HEAD, lines([row for row in found if row.entry in chosen]), left=(0, 1)))
        if options.markdown:
            fill_page(options.markdown, markdown(rows, record))
        if svg is not None:
            write_strips(svg, found, f"Accuracy on held-out sums over {record['steps']} steps")
    for run in failed:
        print(f"{run['algorithm']} seed {run['seed']} failed: {run['problem']}")
    return 1 if failed or not found else 0


def _stored(path: Path | None, *, required: bool) -> dict[str, Any]:
    """The record so far; empty where there is no file yet."""
    if path is None or (not path.exists() and not required):
        return {"steps": 0, "sessions": [], "runs": []}
    try:
        record = json.loads(path.read_text())
        return {"steps": record["steps"], "sessions": record["sessions"], "runs": record["runs"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not a file that `posttrain bench algorithms --json` wrote") from None


def as_text(record: dict[str, Any]) -> str:
    """The record as JSON with a line per session and per run."""
    parts = [f' "steps": {record["steps"]}']
    for key in ("sessions", "runs"):
        rows = ",\n".join(f"  {json.dumps(row)}" for row in record[key])
        parts.append(f' "{key}": [\n{rows}\n ]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def train(
    wanted: Sequence[Run], record: dict[str, Any], path: Path | None, *, jobs: int, threads: int
) -> list[dict[str, Any]]:
    """Make the runs that `record` does not hold, adding each as it ends; gives those that failed."""
    missing = [run for run in wanted if not any(_same(run, kept) for kept in record["runs"])]
    record["runs"] = [kept for kept in record["runs"] if not any(_replaces(run, kept) for run in missing)]
    record["steps"] = wanted[0].steps
    if not missing:
        return []
    _prepare()
    packages = {"posttrain": version("posttrain"), **{name: version(name) for name in PACKAGES}}
    session = {**circumstances(threads), "jobs": jobs, "packages": packages}
    record["sessions"].append(session)
    number = len(record["sessions"]) - 1
    failed = []
    for result in _side_by_side(missing, jobs=jobs, threads=threads):
        if "problem" in result:
            failed.append(result)
            continue
        record["runs"].append({**result, "session": number})
        if path is not None:
            replace_file(path, as_text(record).encode())
    return failed


def _same(run: Run, kept: dict[str, Any]) -> bool:
    return all(kept.get(key) == value for key, value in run.identity.items())


def _replaces(run: Run, kept: dict[str, Any]) -> bool:
    """An old run of this algorithm and seed, with other settings or another length."""
    return kept.get("algorithm") == run.entry.name and kept.get("seed") == run.seed


def _prepare() -> None:
    """What all runs share is made once, before they start side by side: model, data, compiled kernels."""
    from posttrain.kernels.compiled import why_not
    from posttrain.trainer.embedded import ensure_embedded

    ensure_embedded(print)
    why_not()


def _side_by_side(missing: Sequence[Run], *, jobs: int, threads: int):
    """Yields the result of each run as it ends; at most `jobs` go on at a time."""
    line, started, waiting = Line(), time.monotonic(), list(missing)
    total, done, ended = sum(run.steps for run in missing), 0, 0
    logs = bench_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    going: dict[Path, Process] = {}
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        try:
            while waiting or going:
                while waiting and len(going) < jobs:
                    run = waiting.pop(0)
                    own = Path(folder) / f"{run.entry.name}-{run.seed}"
                    going[own] = Process(run, own, logs / f"algorithms-{own.name}.log", threads)
                for own, process in [item for item in going.items() if item[1].ended()]:
                    del going[own]
                    result = process.result()
                    process.end()
                    shutil.rmtree(own, ignore_errors=True)
                    done, ended = done + process.run.steps, ended + 1
                    line.show(f"{_said(process.run, result)}; {ended} of {len(missing)} runs")
                    yield result
                now = done + sum(process.steps_done() for process in going.values())
                left = (time.monotonic() - started) / now * (total - now) if now else 0.0
                words = f"{ended} of {len(missing)} runs done, {len(going)} going on, step {now} of {total}"
                line.waiting(f"{words}, about {left / 60:.0f} min left,", time.monotonic() - started)
                time.sleep(POLL_S)
        finally:
            line.clear()
            for process in going.values():
                process.end()


def _said(run: Run, result: dict[str, Any]) -> str:
    if "problem" in result:
        return f"{run.title}: {result['problem']}"
    curve = result["curve"]
    return f"{run.title}: {curve[0][1]:.3f} -> {curve[-1][1]:.3f}, {result['step_s']:.2f} s per step"

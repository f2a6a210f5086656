"""`posttrain bench algorithms`: what every algorithm learns on the embedded task, by several seeds.

Runs are processes side by side. `--json FILE` is written after every run, and runs that it holds are not repeated: the
same command continues where it was stopped, on another machine too. `--markdown PAGE` puts the table between two
markers of a page.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from posttrain.bench.algorithm_runs import Algorithm, Run, all_algorithms, choose_algorithms, run_all
from posttrain.bench.device import check_writable, describe_machine
from posttrain.bench.pictures import write_panels
from posttrain.bench.table import render
from posttrain.cores import usable
from posttrain.errors import UserError
from posttrain.tracking.safe_files import replace_file
from posttrain.version import __version__

PACKAGES = ("torch", "transformers")


def main(options: argparse.Namespace) -> int:
    """Train what is missing, print the table, write page and picture; the status is 1 if a run failed."""
    chosen = choose_algorithms(options.only)
    path, svg = check_writable(options.json), check_writable(options.svg)
    if options.markdown is not None:
        _page(options.markdown)  # without the markers it is rejected before anything is measured
    record = read_record(options.from_json or path, required=options.from_json is not None)
    failed: list[dict[str, Any]] = []
    if options.from_json is None:
        threads = options.threads or max(1, usable() // options.jobs)
        # Seed by seed, so that a table that was stopped early has every algorithm.
        seeds = range(1, options.seeds + 1)
        wanted = [Run(algorithm, seed, options.steps) for seed in seeds for algorithm in chosen]
        failed = train(wanted, record, path, jobs=options.jobs, threads=threads)
    found = [row for row in gains(all_algorithms(), record) if row.runs]
    if found:
        print("\n" + render(HEAD, lines([row for row in found if row.algorithm in chosen]), left=(0, 1)))
        if options.markdown:
            fill_page(options.markdown, markdown(found, record))
        if svg is not None:
            curves = {row.algorithm.name: row.curves for row in found}
            write_panels(svg, curves, f"Accuracy on held-out sums over {record['steps']} steps")
    elif not failed:
        print(f"{options.from_json}: there are no runs in it; `posttrain bench algorithms --json FILE` makes them")
    for run in failed:
        print(f"{run['algorithm']} seed {run['seed']} failed: {run['problem']}")
    return 1 if failed or not found else 0


def train(wanted: list[Run], record: Record, path: Path | None, *, jobs: int, threads: int) -> list[dict[str, Any]]:
    """Make the runs that `record` does not hold, adding each as it ends; gives those that failed."""
    missing = find_missing(record, wanted)
    if not missing:
        return []
    _prepare()
    packages = {"posttrain": __version__, **{name: version(name) for name in PACKAGES}}
    session = {**describe_machine(threads), "jobs": jobs, "packages": packages}
    session["command"] = without_folders(session["command"])
    record["sessions"].append(session)
    number = len(record["sessions"]) - 1
    failed = []
    for result in run_all(missing, jobs=jobs, threads=threads):
        if "problem" in result:
            failed.append(result)
            continue
        record["runs"].append({**result, "session": number})
        if path is not None:
            replace_file(path, as_text(record).encode())
    return failed


def without_folders(command: str) -> str:
    """The command with file names in place of absolute paths, which mean nothing on another machine."""
    return re.sub(r" (?:/[^/\s]+)*/", " ", command)


def _prepare() -> None:
    # Model, data and compiled kernels are made once, before the runs start side by side and all make them.
    from posttrain.kernels.compiled import why_not
    from posttrain.trainer.embedded import ensure_embedded

    ensure_embedded(print)
    why_not()


# `steps` of the newest call, `sessions` (machine and versions of each call), `runs` (each with its session's number).
Record = dict[str, Any]


def read_record(path: Path | None, *, required: bool) -> Record:
    """The record so far; empty without a file."""
    if path is None or (not path.exists() and not required):
        return {"steps": 0, "sessions": [], "runs": []}
    try:
        record = json.loads(path.read_text())
        return {"steps": record["steps"], "sessions": record["sessions"], "runs": record["runs"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not a file that `posttrain bench algorithms --json` wrote") from None


def as_text(record: Record) -> str:
    """The record as JSON with a line per session and per run."""
    parts = [f' "steps": {record["steps"]}']
    for key in ("sessions", "runs"):
        rows = ",\n".join(f"  {json.dumps(row)}" for row in record[key])
        parts.append(f' "{key}": [\n{rows}\n ]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def find_missing(record: Record, wanted: list[Run]) -> list[Run]:
    """The runs that the record lacks; runs of the same name with other settings or length are dropped from it."""
    same = lambda run, kept: all(kept.get(key) == value for key, value in run.identity.items())  # noqa: E731
    missing = [run for run in wanted if not any(same(run, kept) for kept in record["runs"])]
    replaced = {(run.algorithm.name, run.seed) for run in missing}
    record["runs"] = [kept for kept in record["runs"] if (kept["algorithm"], kept["seed"]) not in replaced]
    record["steps"] = wanted[0].steps
    return missing


@dataclass(frozen=True)
class Gain:
    """One row of the table. The gain is accuracy after the last step minus accuracy before the first."""

    algorithm: Algorithm
    runs: Sequence[dict[str, Any]]

    @property
    def curves(self) -> list[list[list[float]]]:
        return [run["curve"] for run in self.runs]

    def cells(self) -> list[str]:
        if not self.runs:
            return ["-"] * 5 + ["0", "-"]
        accuracy = [f"{statistics.fmean(curve[at][1] for curve in self.curves):.3f}" for at in (0, -1)]
        gains = [curve[-1][1] - curve[0][1] for curve in self.curves]
        gain = [f"{statistics.fmean(gains):+.3f}", f"{min(gains):+.3f}", f"{max(gains):+.3f}"]
        rate = 1 / statistics.median(run["step_s"] for run in self.runs)
        return [*accuracy, *gain, str(len(gains)), f"{rate:.2f}"]


HEAD = ["algorithm", "kind", "before", "after", "gain", "least", "most", "seeds", "steps/s"]


def gains(rows: Iterable[Algorithm], record: dict[str, Any]) -> list[Gain]:
    """A row for every algorithm, with its runs of the record's length; older ones of another length do not compare."""
    runs = [run for run in record["runs"] if run["steps"] == record["steps"]]
    return [Gain(algorithm, [run for run in runs if run["algorithm"] == algorithm.name]) for algorithm in rows]


def lines(found: Sequence[Gain]) -> list[list[str]]:
    return [[gain.algorithm.name, gain.algorithm.kind, *gain.cells()] for gain in found]


BEGIN, END = "<!-- made: bench algorithms -->", "<!-- end -->"
_BETWEEN = re.compile(rf"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.S)


def fill_page(path: Path, text: str) -> None:
    """Replace the text between the markers."""
    replace_file(path, _BETWEEN.sub(lambda found: f"{found[1]}{text}{found[2]}", _page(path)).encode())


def between(text: str) -> str:
    """The text between the markers of a page."""
    found = _BETWEEN.search(text)
    return found[0].removeprefix(found[1]).removesuffix(found[2]) if found else ""


def _page(path: Path) -> str:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not _BETWEEN.search(text):
        raise UserError(f"{path}: not a page with the lines `{BEGIN}` and `{END}`, between which the table belongs")
    return text


def markdown(found: Sequence[Gain], record: dict[str, Any]) -> str:
    """How it was made, the table, and settings that differ from the presets."""
    parts = [_describe_runs(found, record), table(HEAD, lines(found))]
    tuned = [(gain.algorithm.name, *gain.algorithm.tuned) for gain in found if gain.algorithm.tuned[0]]
    if tuned:
        rows = [[name, " ".join(f"`{setting}`" for setting in settings), why] for name, settings, why in tuned]
        parts.append("Settings in addition to the preset `embedded` and the algorithm's own preset:")
        parts.append(table(["algorithm", "settings", "why"], rows))
    return "\n\n".join(parts) + "\n"


def _describe_runs(found: Sequence[Gain], record: dict[str, Any]) -> str:
    runs = [run for gain in found for run in gain.runs]
    seeds = ", ".join(str(seed) for seed in sorted({run["seed"] for run in runs}))
    sentences = [f"{record['steps']} steps; seeds {seeds}. Made by"]
    for number in sorted({run["session"] for run in runs}):  # each call of the command that made a run of the table
        session = record["sessions"][number]
        versions = ", ".join(f"{name} {version}" for name, version in session["packages"].items())
        sentences.append(
            f"`{session['command']}`, {session['date'][:10]}: {session['cpu']}, "
            f"{session['cores']} cores, runs at a time: {session['jobs']}, threads of each: {session['threads']}; "
            f"Python {session['python']}, {versions}."
        )
    return "\n".join(sentences)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])

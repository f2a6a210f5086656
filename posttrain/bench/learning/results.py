"""Finished runs: the file of `posttrain bench algorithms --json`, read back to go on; the runs of one algorithm with
several seeds as one row; and these rows as Markdown, put into a page between two markers, so that one command brings
the page up to date."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.bench.learning.entries import Entry
from posttrain.bench.learning.training import Run
from posttrain.errors import UserError
from posttrain.tracking.atomic import replace_file

# `steps` of the newest call, `sessions` (circumstances of each call), `runs` (each with the number of its session).
Record = dict[str, Any]


def stored(path: Path | None, *, required: bool) -> Record:
    """The record so far; empty where there is no file yet."""
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


def take_missing(record: Record, wanted: list[Run]) -> list[Run]:
    """The runs that the record does not hold; older ones in their place, of other settings or length, are dropped."""
    missing = [run for run in wanted if not any(_same(run, kept) for kept in record["runs"])]
    replaced = {(run.entry.name, run.seed) for run in missing}
    record["runs"] = [kept for kept in record["runs"] if (kept["algorithm"], kept["seed"]) not in replaced]
    record["steps"] = wanted[0].steps
    return missing


def _same(run: Run, kept: dict[str, Any]) -> bool:
    return all(kept.get(key) == value for key, value in run.identity.items())


@dataclass(frozen=True)
class Gain:
    """One row; without runs a row of dashes. The gain is accuracy after the last step minus that before the first."""

    entry: Entry
    runs: Sequence[dict[str, Any]]

    @property
    def start(self) -> float:
        return statistics.fmean(run["curve"][0][1] for run in self.runs)

    @property
    def end(self) -> float:
        return statistics.fmean(run["curve"][-1][1] for run in self.runs)

    @property
    def gains(self) -> list[float]:
        return [run["curve"][-1][1] - run["curve"][0][1] for run in self.runs]

    @property
    def steps_per_second(self) -> float:
        return 1 / statistics.median(run["step_s"] for run in self.runs)

    def cells(self) -> list[str]:
        if not self.runs:
            return ["-"] * 5 + ["0", "-"]
        gains = self.gains
        accuracy = [f"{self.start:.3f}", f"{self.end:.3f}"]
        gain = [f"{statistics.fmean(gains):+.3f}", f"{min(gains):+.3f}", f"{max(gains):+.3f}"]
        return [*accuracy, *gain, str(len(gains)), f"{self.steps_per_second:.2f}"]


HEAD = ["algorithm", "kind", "before", "after", "gain", "least", "most", "seeds", "steps/s"]


def gains(rows: Iterable[Entry], record: dict[str, Any]) -> list[Gain]:
    """A row for every algorithm, with its runs of the record's length; older ones of another length do not compare."""
    runs = [run for run in record["runs"] if run["steps"] == record["steps"]]
    return [Gain(entry, [run for run in runs if run["algorithm"] == entry.name]) for entry in rows]


def lines(found: Sequence[Gain]) -> list[list[str]]:
    return [[gain.entry.name, gain.entry.kind, *gain.cells()] for gain in found]


BEGIN, END = "<!-- made: bench algorithms -->", "<!-- end -->"
_BETWEEN = re.compile(rf"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.S)


def check_page(path: Path | None) -> None:
    """Refuse a page without the markers before anything is measured."""
    if path is not None:
        _page(path)


def fill_page(path: Path, text: str) -> None:
    """Replace what stands between the markers."""
    replace_file(path, _BETWEEN.sub(lambda found: f"{found[1]}{text}{found[2]}", _page(path)).encode())


def between(text: str) -> str:
    """What stands between the markers of a page."""
    found = _BETWEEN.search(text)
    return found[0].removeprefix(found[1]).removesuffix(found[2]) if found else ""


def _page(path: Path) -> str:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not _BETWEEN.search(text):
        raise UserError(f"{path}: not a page with the lines `{BEGIN}` and `{END}`, between which the table belongs")
    return text


def markdown(found: Sequence[Gain], record: dict[str, Any]) -> str:
    """How it was made, the table, and what was set beside the presets."""
    parts = [_made(found, record), table(HEAD, lines(found))]
    tuned = [(gain.entry.name, *gain.entry.tuned) for gain in found if gain.entry.tuned[0]]
    if tuned:
        rows = [[name, " ".join(f"`{setting}`" for setting in settings), why] for name, settings, why in tuned]
        parts.append("Set beside the preset `embedded` and the algorithm's own:")
        parts.append(table(["algorithm", "settings", "why"], rows))
    return "\n\n".join(parts) + "\n"


def _made(found: Sequence[Gain], record: dict[str, Any]) -> str:
    """A sentence for each call of the command that made a run of the table."""
    runs = [run for gain in found for run in gain.runs]
    seeds = ", ".join(str(seed) for seed in sorted({run["seed"] for run in runs}))
    said = [f"{record['steps']} steps; seeds {seeds}. Made by"]
    for number in sorted({run["session"] for run in runs}):
        session = record["sessions"][number]
        versions = ", ".join(f"{name} {version}" for name, version in session["packages"].items())
        said.append(
            f"`{session['command']}`, {session['date'][:10]}: {session['cpu']}, "
            f"{session['cores']} cores, runs at a time: {session['jobs']}, threads of each: {session['threads']}; "
            f"Python {session['python']}, {versions}."
        )
    return "\n".join(said)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])

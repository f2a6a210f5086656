"""Runs of one algorithm with several seeds as one row: accuracy before and after, the gain, the speed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.bench.learning.entries import Entry


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

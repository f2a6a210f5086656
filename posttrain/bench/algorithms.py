"""`posttrain bench algorithms`: what every algorithm learns on the embedded task, by several seeds.

Every preset runs, and every estimator and loss that no preset has: an estimator with the loss `vanilla`, a loss with
the estimator `grpo`. Settings that differ from a preset's own values are in `TUNED` alone, each with its reason.

Runs are processes side by side. `--json FILE` is written after every run, and runs that it holds are not repeated: the
same command continues where it was stopped, on another machine too. `--markdown PAGE` puts the table between two
markers of a page.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from posttrain.bench.child import OF_EVERY_RUN, TrainingProcess, log_file
from posttrain.bench.device import check_writable, describe_machine
from posttrain.bench.output import StatusLine, render, write_panels
from posttrain.bench.systems import choose
from posttrain.config.choices import ESTIMATORS, POLICY_LOSSES, PRESETS
from posttrain.cores import usable
from posttrain.errors import UserError
from posttrain.tracking.safe_files import replace_file
from posttrain.version import __version__

_ACTOR = "actor_rollout_ref.actor"
_ESTIMATOR, _LOSS = "algorithm.adv_estimator", f"{_ACTOR}.policy_loss.loss_mode"
_GROUP = "algorithm/"

Tuning = tuple[tuple[str, ...], str]

# Name -> (settings, why).
TUNED: dict[str, Tuning] = {
    "dapo": (
        ("actor_rollout_ref.rollout.n=5", "algorithm.filter_groups.metric=score", "reward.overlong_buffer.len=1"),
        "groups of 5 as all others, not 16; the reward is one number; answers use at most 3 of the 4 allowed tokens",
    ),
    "remax": (
        ("actor_rollout_ref.rollout.n=5",),
        "1,000 responses a step as all others, not 200",
    ),
    "ppo": (
        ("critic.optim.lr=1e-3",),
        "the critic starts from a model that never saw a value; at its default 1e-5 it needs thousands of updates",
    ),
    "gpg_loss": (
        ("algorithm.adv_estimator=gpg", f"{_ACTOR}.ppo_mini_batch_size=200", f"{_ACTOR}.optim.lr=1e-3"),
        "only valid with one update per batch and the estimator `gpg`; it makes a quarter of the updates, so the "
        "learning rate is higher",
    ),
    "geo_mean": ((f"{_ACTOR}.clip_ratio_low=0.4",), "the paper's clip"),
    "dppo_tv": (
        (f"{_ACTOR}.clip_ratio_low=0.2", f"{_ACTOR}.clip_ratio_high=0.2", f"{_ACTOR}.clip_ratio_c=20"),
        "its clip threshold is a difference of probabilities, typically 0.1 to 0.2",
    ),
    "dppo_kl": (
        (f"{_ACTOR}.clip_ratio_low=0.05", f"{_ACTOR}.clip_ratio_high=0.05", f"{_ACTOR}.clip_ratio_c=20"),
        "its clip threshold is a KL divergence, typically 0.05",
    ),
}


@dataclass(frozen=True)
class Algorithm:
    """One row of the table. `kind` says what the name is: preset, estimator or loss."""

    name: str
    kind: str
    chosen: tuple[str, ...]  # the settings that select it

    @property
    def settings(self) -> tuple[str, ...]:
        return (*self.chosen, *self.tuned[0])

    @property
    def tuned(self) -> Tuning:
        return TUNED.get(self.name, ((), ""))


def all_algorithms() -> list[Algorithm]:
    """All rows, newly registered algorithms included."""
    presets = {name.removeprefix(_GROUP): values for name, (_, values) in PRESETS.items() if name.startswith(_GROUP)}
    covered = {values.get(key) for values in presets.values() for key in (_ESTIMATOR, _LOSS)} | {"vanilla"}
    rows = [Algorithm(name, "preset", (f"algorithm={name}",)) for name in presets]
    rows += [Algorithm(name, "estimator", (f"{_ESTIMATOR}={name}",)) for name in ESTIMATORS if name not in covered]
    taken = {row.name for row in rows}
    for name in POLICY_LOSSES:
        if name not in covered:
            rows.append(Algorithm(f"{name}_loss" if name in taken else name, "loss", (f"{_LOSS}={name}",)))
    return rows


METRIC = "val/math_reasoning/mean@1"
COMMON = (*OF_EVERY_RUN, "trainer.device=cpu")


@dataclass(frozen=True)
class Run:
    """One algorithm with one seed."""

    algorithm: Algorithm
    seed: int
    steps: int

    @property
    def title(self) -> str:
        return f"{self.algorithm.name} seed {self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """A run that was made with all of this the same need not be made again."""
        return {
            "algorithm": self.algorithm.name,
            "seed": self.seed,
            "steps": self.steps,
            "settings": list(self.algorithm.settings),
        }

    def command(self, folder: Path) -> list[str]:
        own = [f"trainer.seed={self.seed}", f"trainer.total_training_steps={self.steps}"]
        settings = [*COMMON, f"trainer.default_local_dir={folder}", *own, *self.algorithm.settings]
        return [sys.executable, "-m", "posttrain.trainer.main_ppo", *settings]


class Process(TrainingProcess):
    """A run in a process of its own."""

    def __init__(self, run: Run, folder: Path, log: Path, threads: int) -> None:
        super().__init__(run.command(folder), folder, log, OMP_NUM_THREADS=str(threads))
        self.run = run

    def steps_done(self) -> int:
        return max((line["step"] for line in self.steps()), default=0)

    def result(self) -> dict[str, Any]:
        """What is kept of a finished run; `problem` instead of figures where it failed."""
        if problem := self.problem():
            return {**self.run.identity, "problem": problem}
        lines = self.steps()
        curve = [[line["step"], line[METRIC]] for line in lines if METRIC in line]
        seconds = [line["timing_s/step"] - line.get("timing_s/validation", 0.0) for line in lines if line["step"] > 0]
        return {**self.run.identity, "curve": curve, "step_s": round(statistics.median(seconds), 4)}


def run_all(missing: Sequence[Run], *, jobs: int, threads: int) -> Iterator[dict[str, Any]]:
    """Yield the result of each run as it ends; at most `jobs` run at a time."""
    line, started, waiting = StatusLine(), time.monotonic(), list(missing)
    total, done, finished = sum(run.steps for run in missing), 0, 0
    going: dict[Path, Process] = {}
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        try:
            while waiting or going:
                while waiting and len(going) < jobs:
                    run = waiting.pop(0)
                    own = Path(folder) / f"{run.algorithm.name}-{run.seed}"
                    going[own] = Process(run, own, log_file(f"algorithms-{own.name}"), threads)
                for own, process in [item for item in going.items() if item[1].has_ended()]:
                    del going[own]
                    result = process.result()
                    process.end()
                    shutil.rmtree(own, ignore_errors=True)
                    done, finished = done + process.run.steps, finished + 1
                    line.begin(f"{_summary(process.run, result)}; {finished} of {len(missing)} runs")
                    yield result
                # The time left is estimated from all steps so far, those of unfinished runs included.
                now = done + sum(process.steps_done() for process in going.values())
                left = (time.monotonic() - started) / now * (total - now) if now else 0.0
                words = f"{finished} of {len(missing)} runs done, {len(going)} going on, step {now} of {total}"
                line.wait(f"{words}, about {left / 60:.0f} min left,", time.monotonic() - started)
                time.sleep(0.5)
        finally:
            line.clear()
            for process in going.values():
                process.end()


def _summary(run: Run, result: dict[str, Any]) -> str:
    if "problem" in result:
        return f"{run.title}: {result['problem']}"
    curve = result["curve"]
    return f"{run.title}: {curve[0][1]:.3f} -> {curve[-1][1]:.3f}, {result['step_s']:.2f} s per step"


PACKAGES = ("torch", "transformers")


def main(options: argparse.Namespace) -> int:
    """Train what is missing, print the table, write page and picture; the status is 1 if a run failed."""
    chosen = choose(all_algorithms(), options.only)
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

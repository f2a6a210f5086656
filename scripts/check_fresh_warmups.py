#!/usr/bin/env python3
"""Default runs from fresh warm-ups: check_fresh_warmups.py OUT [--warmups 0,1] [--seeds 1,2] [--paired]
[--jobs 8] [--threads 2] [key=value ...]

Every warm-up model is made anew with its own initial weights and order of rows, a harder change than the rounding of
another processor, which starts from those of seed 0. Every warm-up meets every seed, or with --paired one of them.
All runs are on the CPU. With --jobs several go on at a time, each with --threads cores of its own.
Prints a row per run as it ends (warm-up, seed, accuracy by step, responses cut off at the last step, seconds) and a
summary. A run that fails is a row that says so. Runs that OUT has already are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

METRIC = "val/math_reasoning/mean@1"
REWARD = Path(__file__).parents[1] / "reward_func.py"
SHOWN = (0, 50, 100, 150)
ENOUGH = 0.95
HEADER = f"| warm-up | seed | {' | '.join(map(str, SHOWN))} | end | cut off | seconds: warm-up + run |\n|{'---|' * 9}"
CHILD = [sys.executable, __file__]


def make_warm_up(out: Path, warmup: int) -> None:
    """In a process of its own: the model under `cache-N`, and how long it took."""
    from posttrain.trainer import embedded

    make, fit = embedded.build_model, embedded.fit_pairs
    embedded.build_model = lambda tokenizer, seed: make(tokenizer, seed=warmup)
    embedded.fit_pairs = lambda *args, **kwargs: fit(*args, **(kwargs | {"seed": warmup}))  # pyright: ignore
    started = time.monotonic()
    embedded.ensure_embedded(print)
    _write(_result(out, warmup), {"seconds": time.monotonic() - started})


def make_run(out: Path, warmup: int, seed: int, settings: list[str]) -> None:
    """In a process of its own, as a user would start it: a run from that warm-up."""
    import posttrain

    given = [f"custom_reward_function.path={REWARD}", f"trainer.default_local_dir={out / 'runs'}", *settings]
    name = f"warmup-{warmup}-seed-{seed}"
    own = ["trainer.project_name=embedded", f"trainer.experiment_name={name}", f"trainer.seed={seed}"]
    shutil.rmtree(out / "runs" / "embedded" / name, ignore_errors=True)  # one that was cut short
    started = time.monotonic()
    result = posttrain.train(["preset=embedded", "trainer.device=cpu", *own, *given])
    found = {
        "curve": [[step, values[METRIC]] for step, values in result.validation],
        "cut_off": result.metrics[-1]["response_length/clip_ratio"],
        "seconds": time.monotonic() - started,
        "settings": settings,
    }
    _write(_result(out, warmup, seed), found)


class Children:
    """Starts the processes above: each with its own cores, where it is said how many, and its words in a log."""

    def __init__(self, out: Path, jobs: int, threads: int | None) -> None:
        self.out, self.threads = out, threads
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        own = [cores[i * (threads or 0) : (i + 1) * (threads or 0)] for i in range(jobs)]
        self.places: queue.Queue[list[int]] = queue.Queue()
        for place in own if threads and jobs * threads <= len(cores) else [[]] * jobs:
            self.places.put(place)

    def result(self, warmup: int, seed: int | None, settings: Sequence[str] = ()) -> dict[str, Any]:
        """What the process found, or `problem` where it failed."""
        place, path = self.places.get(), _result(self.out, warmup, seed)
        try:
            if not path.exists():
                return self._started(place, path, warmup, seed, settings)
            found = json.loads(path.read_text())
            if found.get("settings", []) != list(settings):
                return {"problem": f"{path} was made with other settings ({found['settings']}): give another folder"}
            return found
        except (OSError, ValueError) as error:
            return {"problem": str(error)}
        finally:
            self.places.put(place)

    def _started(self, place, path: Path, warmup: int, seed: int | None, settings: Sequence[str]) -> dict[str, Any]:
        one = [f"--warmups={warmup}", *([] if seed is None else [f"--seeds={seed}"]), f"--cores={_listed(place)}"]
        variables = {**os.environ, "POSTTRAIN_CACHE": str(self.out / f"cache-{warmup}")}
        if self.threads:
            variables |= {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        log = path.with_suffix(".log")
        with log.open("w") as words:
            command = [*CHILD, str(self.out), "--one", *one, *settings]
            status = subprocess.run(command, stdout=words, stderr=words, env=variables).returncode
        if status or not path.exists():
            return {"problem": f"status {status}: {_last_words(log)} ({log})"}
        return json.loads(path.read_text())


def check(out: Path, pairs: list[tuple[int, int]], jobs: int, threads: int | None, settings: list[str]) -> bool:
    """Makes warm-ups, then runs; True if none failed."""
    children, rows = Children(out, jobs, threads), []
    warmups = sorted({warmup for warmup, _ in pairs})
    with ThreadPoolExecutor(jobs) as pool:
        try:
            warm = dict(zip(warmups, pool.map(lambda warmup: children.result(warmup, None), warmups), strict=True))
            print(HEADER, flush=True)
            for pair in pairs:
                if "problem" in warm[pair[0]]:
                    rows.append(warm[pair[0]])
                    print(_row(*pair, warm[pair[0]], warm[pair[0]]), flush=True)
            going = {
                pool.submit(children.result, *pair, settings): pair for pair in pairs if "problem" not in warm[pair[0]]
            }
            for done in as_completed(going):
                warmup, seed = going[done]
                found = done.result()
                rows.append(found | {"warm": warm[warmup].get("seconds", 0.0)})
                print(_row(warmup, seed, warm[warmup], found), flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    print("\n" + summary(rows), flush=True)
    return not any("problem" in row for row in rows)


def _row(warmup: int, seed: int, warm: dict[str, Any], found: dict[str, Any]) -> str:
    if "problem" in found:
        return f"| {warmup} | {seed} | failed: {found['problem']} |"
    curve = dict(map(tuple, found["curve"]))
    last = max(curve)
    by_step = [f"{curve[step]:.3f}" if step in curve and step < last else "" for step in SHOWN]
    seconds = f"{warm['seconds']:.0f} + {found['seconds']:.0f}"
    shown = [warmup, seed, *by_step, f"{curve[last]:.3f}", f"{found['cut_off']:.1%}", seconds]
    return f"| {' | '.join(map(str, shown))} |"


def summary(rows: list[dict[str, Any]]) -> str:
    """One row over all runs: how many, least and mean accuracy at the end, share that is enough, seconds."""
    ended = [row for row in rows if "problem" not in row]
    text = f"| runs | failed | least | mean | share >= {ENOUGH} | cut off at most | mean seconds |\n|{'---|' * 7}\n"
    if not ended:
        return f"{text}| 0 | {len(rows)} | | | | | |"
    last = [max(map(tuple, row["curve"]))[1] for row in ended]
    seconds = sum(row["warm"] + row["seconds"] for row in ended) / len(ended)
    numbers = [f"{min(last):.3f}", f"{sum(last) / len(last):.3f}", f"{sum(x >= ENOUGH for x in last) / len(rows):.0%}"]
    worst = max(row["cut_off"] for row in ended)
    numbers += [f"{worst:.1%}", f"{seconds:.0f}"]
    return f"{text}| {len(ended)} | {len(rows) - len(ended)} | {' | '.join(numbers)} |"


def _result(out: Path, warmup: int, seed: int | None = None) -> Path:
    return out / (f"warmup-{warmup}.json" if seed is None else f"warmup-{warmup}-seed-{seed}.json")


def _write(path: Path, found: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.rename(path)


def _last_words(log: Path) -> str:
    words = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return words[-1] if words else "no message"


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--warmups", type=_numbers, default=[0, 1, 2, 3, 4])
    parser.add_argument("--seeds", type=_numbers)
    parser.add_argument("--paired", action="store_true", help="the first warm-up with the first seed, and so on")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1)")
    parser.add_argument("--threads", type=int, help="threads of each, on cores of its own (as the machine has)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=_numbers, default=[], help=argparse.SUPPRESS)
    options, settings = parser.parse_known_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.one:
        if options.cores:
            os.sched_setaffinity(0, options.cores)
        (warmup,) = options.warmups
        return make_run(out, warmup, *options.seeds, settings) if options.seeds else make_warm_up(out, warmup)
    seeds = options.seeds or [1, 2, 3, 11, 12]
    if options.paired and len(seeds) != len(options.warmups):
        parser.error(f"--paired wants as many seeds as warm-ups: {len(options.warmups)} and {len(seeds)} were given")
    meet = zip if options.paired else itertools.product
    sys.exit(0 if check(out, list(meet(options.warmups, seeds)), options.jobs, options.threads, settings) else 1)


if __name__ == "__main__":
    main()

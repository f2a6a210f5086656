#!/usr/bin/env python3
"""Default runs from fresh warm-ups: check_fresh_warmups.py OUT [--warmups 0,1] [--seeds 1,2] [--paired] [key=value ...]

Every warm-up model is made anew with its own initial weights and order of rows, a harder change than the rounding of
another processor, which starts from those of seed 0. Every warm-up meets every seed, or with --paired one of them.
Prints one row per run: warm-up, seed, accuracy by step, seconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

METRIC = "val/math_reasoning/mean@1"
REWARD = Path(__file__).parents[1] / "reward_func.py"
SHOWN = (0, 50, 100, 150, 200)


def one(out: Path, warmup: int, seed: int, settings: list[str]) -> None:
    """A warm-up (unless it is there) and a run, in this process; prints its row."""
    os.environ["POSTTRAIN_CACHE"] = str(out / f"cache-{warmup}")
    from posttrain.trainer import embedded

    make, fit = embedded.build_model, embedded.fit_pairs
    embedded.build_model = lambda tokenizer, seed: make(tokenizer, seed=warmup)
    embedded.fit_pairs = lambda *args, **kwargs: fit(*args, **(kwargs | {"seed": warmup}))  # pyright: ignore
    started = time.monotonic()
    embedded.ensure_embedded(print)
    import posttrain

    warm = time.monotonic()
    given = [f"custom_reward_function.path={REWARD}", f"trainer.default_local_dir={out}", *settings]
    name = f"trainer.experiment_name=warmup-{warmup}-seed-{seed}"
    result = posttrain.train(["preset=embedded", f"trainer.seed={seed}", name, *given])
    ended = time.monotonic()
    curve = {step: found[METRIC] for step, found in result.validation}
    last = max(curve)
    numbers = " | ".join(f"{curve[step]:.3f}" for step in [*(s for s in SHOWN if s in curve and s != last), last])
    with (out / "table.md").open("a") as table:
        table.write(f"| {warmup} | {seed} | {numbers} | {warm - started:.0f} + {ended - warm:.0f} |\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--warmups", default="0,1,2,3,4")
    parser.add_argument("--seeds", default="1,2,3,11,12")
    parser.add_argument("--paired", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options, settings = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    warmups, seeds = ([int(number) for number in text.split(",")] for text in (options.warmups, options.seeds))
    pairs = zip(warmups, seeds, strict=True) if options.paired else itertools.product(warmups, seeds)
    for warmup, seed in pairs:
        if options.one:
            one(options.out.resolve(), warmup, seed, settings)
            continue
        # Each run in a process of its own, as a user would start it.
        command = [sys.executable, __file__, str(options.out), "--one", f"--warmups={warmup}", f"--seeds={seed}"]
        subprocess.run([*command, *settings], check=True)
    if not options.one:
        print((options.out / "table.md").read_text(), end="")


if __name__ == "__main__":
    main()

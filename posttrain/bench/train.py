"""`posttrain bench train`: seconds of one GRPO update on packed rows, and its share of the chip's arithmetic.

The share (MFU) counts (6 N + 6 L H T) floating-point operations for every token of every row (`floor.update_flops`;
4 N with adapters, as the base has no gradient). `counted` takes only the tokens that were computed: a prompt that
responses share is computed once.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from posttrain.bench.contest import Bench, Entry, comparison, prepare
from posttrain.bench.device import update_flops
from posttrain.bench.systems import TRAIN, System
from posttrain.bench.workload import Workload, workload_of

BUDGET = 16384
SIZES = ("work", "prompts", "n", "prompt_tokens", "tokens", "lengths", "mean_tokens", "repeat", "budget")
SIZES += ("lora_rank", "checkpointing")
HEAD = ("system", "best s", "median s", "time vs", "tok/s", "MFU", "counted", "GiB", "note")


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file; the status is 1 if nothing could be measured."""
    bench = prepare(options, TRAIN)
    options.budget = options.budget or BUDGET
    vocabulary = bench.model.vocab_size
    # A fixed seed: all systems, and the next bench, train on the same tokens.
    work, draw = workload_of(options, vocabulary), random.Random(1)
    responses = [[draw.randrange(vocabulary) for _ in range(n)] for n in work.lengths]

    def job(system: System) -> dict[str, Any]:
        sizes = {key: getattr(options, key) for key in ("n", "budget", "checkpointing")}
        more = {"prompts": work.prompts, "responses": responses, "lora_rank": options.lora_rank or 0}
        return bench.job(system, **sizes, **more)

    def content(entries: list[Entry]) -> dict[str, Any]:
        sizes = {key: getattr(options, key) for key in SIZES}
        results = {entry.system.name: entry.as_json() | figures(bench, work, entry) for entry in entries}
        return {"workload": sizes | {"total_tokens": total(work)}, "floor_s": floor(bench, work), "systems": results}

    def cells(entry: Entry, found: dict[str, float]) -> list[str]:
        shares = [f"{found[key]:.1%}" if key in found else "-" for key in ("mfu", "mfu_counted")]
        peak = f"{found['peak_gib']:.1f}" if "peak_gib" in found else "-"
        rate = f"{total(work) / found['median']:,.0f}"
        return [f"{found['best']:.4f}", f"{found['median']:.4f}", rate, *shares, peak, entry.version()]

    entries = bench.contest(warm_ups=2, content=content).measure(bench.systems, job)
    table = comparison(entries, HEAD, lambda entry: figures(bench, work, entry), cells, nothing="no updates")
    adapters = f", adapters of rank {options.lora_rank}" if options.lora_rank else ""
    again = ", activations computed again" if options.checkpointing else ""
    text = (
        f"one update on {options.prompts} prompts of {options.prompt_tokens} tokens x n={options.n}, {options.lengths} "
        f"lengths up to {options.tokens}, {total(work):,} tokens, passes of {options.budget:,}{adapters}{again}"
    )
    return bench.print_results(entries, text, table)


def row_lengths(work: Workload) -> list[int]:
    return [len(prompt) + n for prompt, n in zip(work.prompts, work.lengths, strict=True)]


def total(work: Workload) -> int:
    return sum(row_lengths(work))


def floor(bench: Bench, work: Workload) -> float | None:
    """Seconds of the update's arithmetic at the chip's rate."""
    chip, shape = bench.place.chip, bench.shape
    if chip is None or shape is None:
        return None
    return update_flops(shape, row_lengths(work), frozen=bool(bench.options.lora_rank)) / chip.flops


def figures(bench: Bench, work: Workload, entry: Entry) -> dict[str, float]:
    """Best and median seconds, peak memory, and the shares of the chip's rate at the best."""
    times = [answer["seconds"] for answer in entry.answers]
    if not times:
        return {}
    found = {"best": min(times), "median": statistics.median(times)}
    peaks = [answer["peak_gib"] for answer in entry.answers if answer.get("peak_gib")]
    least = floor(bench, work)
    if least is not None:
        # Against the best run: the share is a property of the code, other load is not.
        found["mfu"] = least / found["best"]
        found["mfu_counted"] = found["mfu"] * entry.answers[-1]["computed"] / total(work)
    return found | ({"peak_gib": max(peaks)} if peaks else {})

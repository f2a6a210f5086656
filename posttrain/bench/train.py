"""`posttrain bench train`: seconds of one GRPO update on packed rows, and its share of the chip's arithmetic.

The share (MFU) counts (6 N + 6 L H T) floating-point operations for every token of every row (`floor.update_flops`;
4 N beside adapters, as the base has no gradient). `counted` takes the tokens that were really computed, as a prompt
that its responses share is computed once.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import Any

from posttrain.bench.contest import Entry, disturbance
from posttrain.bench.floor import update_flops
from posttrain.bench.preparing import Prepared, prepare
from posttrain.bench.systems import TRAIN, System
from posttrain.bench.table import factor, render
from posttrain.bench.workload import Workload, workload_of

WARM_UPS = 2
BUDGET = 16384
SIZES = ("work", "prompts", "n", "prompt_tokens", "tokens", "lengths", "mean_tokens", "repeat", "budget")
SIZES += ("lora_rank", "checkpointing")


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file; the status is 1 if nothing could be measured."""
    bench = prepare(options, TRAIN)
    model = bench.model
    options.budget = options.budget or BUDGET
    work = workload_of(options, model.vocab_size)
    draw = random.Random(1)
    responses = [[draw.randrange(model.vocab_size) for _ in range(n)] for n in work.lengths]

    def job(system: System) -> dict[str, Any]:
        return {
            "model": str(model.folder),
            "dtype": model.dtype,
            "threads": options.threads,
            "prompts": work.prompts,
            "responses": responses,
            "n": options.n,
            "budget": options.budget,
            "lora_rank": options.lora_rank or 0,
            "checkpointing": options.checkpointing,
            "settings": system.settings,
        }

    def content(entries: list[Entry]) -> dict[str, Any]:
        sizes = {key: getattr(options, key) for key in SIZES}
        results = {entry.system.name: entry.as_json() | figures(bench, work, entry) for entry in entries}
        return {"workload": sizes | {"total_tokens": total(work)}, "floor_s": floor(bench, work), "systems": results}

    entries = bench.contest(warm_ups=WARM_UPS, content=content).measure(bench.systems, job)
    print(_head(bench, work, entries))
    print(table(bench, work, entries))
    return 0 if any(entry.answers for entry in entries) else 1


def row_lengths(work: Workload) -> list[int]:
    return [len(prompt) + n for prompt, n in zip(work.prompts, work.lengths, strict=True)]


def total(work: Workload) -> int:
    return sum(row_lengths(work))


def floor(bench: Prepared, work: Workload) -> float | None:
    """Seconds of the update's arithmetic at the chip's rate."""
    chip, shape = bench.place.chip, bench.shape
    if chip is None or shape is None:
        return None
    return update_flops(shape, row_lengths(work), frozen=bool(bench.options.lora_rank)) / chip.flops


def figures(bench: Prepared, work: Workload, entry: Entry) -> dict[str, float]:
    """Best and median seconds, peak memory, and the shares of the chip's rate at the best."""
    times = [answer["seconds"] for answer in entry.answers]
    if not times:
        return {}
    found = {"best": min(times), "median": statistics.median(times)}
    peaks = [answer["peak_gib"] for answer in entry.answers if answer.get("peak_gib")]
    least = floor(bench, work)
    if least is not None:
        found["mfu"] = least / found["best"]
        found["mfu_counted"] = found["mfu"] * entry.answers[-1]["computed"] / total(work)
    return found | ({"peak_gib": max(peaks)} if peaks else {})


def table(bench: Prepared, work: Workload, entries: Sequence[Entry]) -> str:
    base = next((entry for entry in entries if entry.system.ours and entry.answers), None)
    ours = figures(bench, work, base)["median"] if base else None
    rows = []
    for entry in entries:
        found = figures(bench, work, entry)
        if entry.problem or not found:
            rows.append([entry.system.name, *["-"] * 7, entry.problem or "no updates"])
            continue
        shares = [f"{found[key]:.1%}" if key in found else "-" for key in ("mfu", "mfu_counted")]
        rows.append(
            [
                entry.system.name,
                f"{found['best']:.4f}",
                f"{found['median']:.4f}",
                factor(found["median"], ours),
                f"{total(work) / found['median']:,.0f}",
                *shares,
                f"{found['peak_gib']:.1f}" if "peak_gib" in found else "-",
                entry.version(),
            ]
        )
    versus = f"time vs {base.system.name}" if base else "time vs ours"
    head = ["system", "best s", "median s", versus, "tok/s", "MFU", "counted", "GiB", "note"]
    return render(head, rows, left=(0, 8))


def _head(bench: Prepared, work: Workload, entries: Sequence[Entry]) -> str:
    options, model = bench.options, bench.model
    adapters = f", adapters of rank {options.lora_rank}" if options.lora_rank else ""
    again = ", activations computed again" if options.checkpointing else ""
    return (
        f"\n{model.name} in {model.dtype}: one update on {options.prompts} prompts of {options.prompt_tokens} tokens x "
        f"n={options.n}, {options.lengths} lengths up to {options.tokens}, {total(work):,} tokens, passes of "
        f"{options.budget:,}{adapters}{again}\n{bench.where()}; {disturbance(entries)}\n"
    )

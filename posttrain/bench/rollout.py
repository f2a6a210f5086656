"""`posttrain bench rollout`: useful tokens per second of each system on the same rows."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from posttrain.bench.contest import Entry, disturbance
from posttrain.bench.floor import decoding_floor
from posttrain.bench.preparing import Prepared, prepare
from posttrain.bench.systems import ROLLOUT, System
from posttrain.bench.table import factor, render
from posttrain.bench.workload import Workload, as_job, make_workload

WARM_UPS = 2  # the second shows what the first had to compile or allocate
SIZES = ("work", "prompts", "n", "prompt_tokens", "tokens", "lengths", "mean_tokens", "slots", "repeat")


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file; the status is 1 if nothing could be measured."""
    bench = prepare(options, ROLLOUT)
    model = bench.model
    work = make_workload(
        prompts=options.prompts,
        n=options.n,
        prompt_tokens=options.prompt_tokens,
        tokens=options.tokens,
        kind=options.lengths,
        mean=options.mean_tokens,
        vocab_size=model.vocab_size,
    )
    least = floor(bench, work)

    def job(system: System) -> dict[str, Any]:
        common = as_job(work, model=str(model.folder), dtype=model.dtype, threads=options.threads)
        return {**common, "engine": system.engine, "slots": options.slots, "settings": system.settings}

    def content(entries: list[Entry]) -> dict[str, Any]:
        sizes = {key: getattr(options, key) for key in SIZES}
        work_json = {"rows": len(work.lengths), "total_tokens": work.tokens, "row_lengths": work.lengths}
        systems = {entry.system.name: entry.as_json() | rates(entry) for entry in entries}
        return {"workload": sizes | work_json, "floor_s": least, "systems": systems}

    entries = bench.contest(warm_ups=WARM_UPS, content=content).measure(bench.systems, job)
    print(_head(bench, work, entries))
    print(table(entries, least and work.tokens / least))
    return 0 if any(entry.answers for entry in entries) else 1


def floor(bench: Prepared, work: Workload) -> float | None:
    """Seconds below which the chip cannot go; None where its rates are not known (`bench sweep` measures a CPU's)."""
    chip, shape = bench.place.chip, bench.shape
    if chip is None or shape is None:
        return None
    return decoding_floor(
        shape, work.prompts, work.lengths, slots=bench.options.slots, peak=chip.flops, bandwidth=chip.bandwidth
    )


def rates(entry: Entry) -> dict[str, float]:
    """Useful tokens per second: of the best run and of the median one."""
    values = [answer["tokens"] / answer["seconds"] for answer in entry.answers]
    return {"best": max(values), "median": statistics.median(values)} if values else {}


def table(entries: Sequence[Entry], limit: float | None = None) -> str:
    """One row per system; `vs` compares medians with the first of our engines that ran. `limit` is the chip's tok/s."""
    base = next((entry for entry in entries if entry.system.ours and entry.answers), None)
    ours = rates(base)["median"] if base else None
    rows = []
    for entry in entries:
        found = rates(entry)
        if entry.problem or not found:
            rows.append([entry.system.name, "-", "-", "-", "-", entry.problem or "no runs"])
            continue
        log_probs = "yes" if all(answer["log_probs"] for answer in entry.answers) else "no"
        rates_shown = [f"{found['best']:,.0f}", f"{found['median']:,.0f}", factor(found["median"], ours)]
        rows.append([entry.system.name, *rates_shown, log_probs, note(entry)])
    if limit:
        rows.append(["floor", f"{limit:,.0f}", "", factor(limit, ours), "", "the chip's rates, nothing else"])
    versus = f"vs {base.system.name}" if base else "vs ours"
    return render(["system", "best tok/s", "median", versus, "log-probs", "note"], rows, left=(0, 5))


def note(entry: Entry) -> str:
    """Which package made it, and how much it computed beyond what was asked."""
    text = entry.version()
    extra = entry.answers[-1]["computed"] / entry.answers[-1]["tokens"]
    return text if extra < 1.005 else f"{text}; computed {extra:.1f} tokens for each one used"


def _head(bench: Prepared, work: Workload, entries: Sequence[Entry]) -> str:
    options = bench.options
    lengths = f"{options.tokens} tokens each" if options.lengths == "fixed" else f"1 to {options.tokens} tokens"
    slots = f" over {options.slots} slots" if options.slots else ""
    return (
        f"\n{bench.model.name} in {bench.model.dtype}: {options.prompts} prompts of {options.prompt_tokens} tokens "
        f"x n={options.n}{slots}, {options.lengths}, {lengths}, {work.tokens:,} in all; temperature 1\n"
        f"{bench.where()}; {disturbance(entries)}\n"
    )

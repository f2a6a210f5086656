"""What rollout engines are measured on: `posttrain bench rollout` and `posttrain bench sync`.

rollout     useful tokens per second of each system on the same rows; with `--truth ROWS` also how far a system's
            log-probs are from those of the same model in float32
sync        seconds from new weights in the trainer to a rollout engine that computes with them
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.bench.child import ChildFailed, start_runner
from posttrain.bench.contest import LOAD_S, RUN_S, Bench, Entry, comparison, prepare
from posttrain.bench.device import decoding_floor
from posttrain.bench.output import render
from posttrain.bench.systems import ROLLOUT, SYNC, System
from posttrain.bench.workload import Workload, fill_in_sizes, workload_of
from posttrain.errors import UserError

WARM_UPS = 2  # the second shows what the first had to compile or allocate
# Tokens of a response in a peer's single warm-up on CUDA: peers compile and capture graphs while they load.
WARM_UP_TOKENS = 64
HEAD = ("system", "best tok/s", "median", "vs", "log-probs", "note")
SIZES = ("work", "prompts", "n", "prompt_tokens", "tokens", "lengths", "mean_tokens", "slots", "repeat")


@dataclass
class Work:
    """Rows under their name; `options` are its sizes."""

    options: argparse.Namespace
    rows: Workload
    floor_s: float | None

    def answers_to(self, entries: Sequence[Entry], number: int) -> list[Entry]:
        """The entries with their answers to this work alone, the `number`th that was asked for."""
        return [replace(entry, answers=[a for a in entry.answers if a["work"] == number]) for entry in entries]

    def as_json(self, entries: Sequence[Entry]) -> dict[str, Any]:
        sizes = {key: getattr(self.options, key) for key in SIZES}
        made = {"rows": len(self.rows.lengths), "total_tokens": self.rows.tokens, "row_lengths": self.rows.lengths}
        systems = {entry.system.name: entry.as_json() | rates(entry) for entry in entries}
        return {"workload": sizes | made, "floor_s": self.floor_s, "systems": systems}

    def describe(self) -> str:
        options = self.options
        lengths = f"{options.tokens} tokens each" if options.lengths == "fixed" else f"1 to {options.tokens} tokens"
        slots = f" over {options.slots} slots" if options.slots else ""
        return (
            f"{options.prompts} prompts of {options.prompt_tokens} tokens x n={options.n}{slots}, {options.lengths}, "
            f"{lengths}, {self.rows.tokens:,} in all; temperature 1"
        )


def main(options: argparse.Namespace) -> int:
    """Measure, print a table for each work, write the file; the status is 1 if nothing could be measured."""
    names = options.work.split(",") if options.work else [None]
    given = [argparse.Namespace(**{**vars(options), "work": name}) for name in names]
    bench = prepare(given[0], ROLLOUT)
    for other in given[1:]:
        fill_in_sizes(other, bench.place)
    works = [make_work(bench, sizes) for sizes in given]
    # Several works share one loading of each system, which has one number of slots.
    slots = {work.options.slots or len(work.rows.lengths) for work in works}
    if len(slots) > 1 and any(work.options.slots for work in works):
        raise UserError(f"--work {options.work}: their slots differ ({slots}), and a system is loaded with one number")
    rows = [{"prompts": work.rows.prompts, "lengths": work.rows.lengths} for work in works]
    truth: dict[str, Any] = {}

    def job(system: System) -> dict[str, Any]:
        return bench.job(system, temperature=1.0, works=rows, slots=max(slots))

    def content(entries: list[Entry]) -> dict[str, Any]:
        found = [work.as_json(work.answers_to(entries, number)) for number, work in enumerate(works)]
        against = {"truth": truth} if options.truth else {}
        return {**(found[0] if len(found) == 1 else {"works": dict(zip(names, found, strict=True))}), **against}

    short, wanted = bench.place.kind == "cuda", {"sample": options.truth} if options.truth else {}
    contest = bench.contest(
        warm_ups=1 if short else WARM_UPS,
        content=content,
        requests=[{"work": number, **({} if number else wanted)} for number in range(len(works))],
        warm_up={"most": WARM_UP_TOKENS} if short else {},
    )
    entries = contest.measure(bench.systems, job)
    for number, work in enumerate(works):
        mine = work.answers_to(entries, number)
        bench.print_results(mine, work.describe(), table(mine, work.floor_s and work.rows.tokens / work.floor_s))
    if options.truth:
        truth.update(compare_with_float32(bench, works[0].rows, entries))
        contest.keep(entries)
        ours = {system.name for system in bench.systems if system.ours}
        print("\n" + truth_table(truth, bench.model.dtype, ours))
    return 0 if any(entry.answers for entry in entries) else 1


def make_work(bench: Bench, sizes: argparse.Namespace) -> Work:
    """The rows of a work and its floor; None where the chip's rates are not known (`bench sweep` measures a CPU's)."""
    rows = workload_of(sizes, bench.model.vocab_size)
    chip, shape, least = bench.place.chip, bench.shape, None
    if chip is not None and shape is not None:
        least = decoding_floor(
            shape, rows.prompts, rows.lengths, slots=sizes.slots, peak=chip.flops, bandwidth=chip.bandwidth
        )
    return Work(sizes, rows, least)


def rates(entry: Entry) -> dict[str, float]:
    """Useful tokens per second: of the best run and of the median one."""
    values = [answer["tokens"] / answer["seconds"] for answer in entry.answers]
    return {"best": max(values), "median": statistics.median(values)} if values else {}


def table(entries: Sequence[Entry], limit: float | None = None) -> str:
    """One row per system; `limit` is the chip's tok/s."""
    row = ("floor", limit, f"{limit:,.0f}", "the chip's rates, nothing else") if limit else None
    return comparison(entries, HEAD, rates, _cells, nothing="no runs", floor=row)


def _cells(entry: Entry, found: dict[str, float]) -> list[str]:
    log_probs = "yes" if all(answer["log_probs"] for answer in entry.answers) else "no"
    note, extra = entry.version(), entry.answers[-1]["computed"] / entry.answers[-1]["tokens"]
    if extra >= 1.005:  # a padded batch runs until its longest row is done
        note += f"; computed {extra:.1f} tokens for each one used"
    return [f"{found['best']:,.0f}", f"{found['median']:,.0f}", log_probs, note]


Found = dict[str, Any]

LINES = {
    "rollout": "{}: its rollout, against float32",
    "transformers": "{}: transformers in {} on its tokens, against float32",
    "trainer": "{}: our trainer on its tokens, against float32",
    "rollout_trainer": "{}: its rollout, against our trainer",
}


def compare_with_float32(bench: Bench, rows: Workload, entries: Sequence[Entry]) -> dict[str, Found]:
    """System -> the distances of the log-probs of its last run (`float32` in `ours/engines.py`), or a problem."""
    asked = {entry.system.name: [a["sampled"] for a in entry.answers if "sampled" in a] for entry in entries}
    sampled = {name: answers[-1] for name, answers in asked.items() if answers}
    options, kind, system = bench.options, bench.place.kind, System("truth", "", engine="truth")
    found: dict[str, Found] = {}
    job = bench.job(system, device=kind)
    with start_runner(system, "truth", job, "truth", threads=options.threads, kind=kind) as child:
        try:
            child.ready(bench.line.begin("float32: loading"), options.deadline or LOAD_S)
            for name, given in sampled.items():
                request = {**given, "prompts": [rows.prompts[row] for row in given["rows"]]}
                waiting = bench.line.begin(f"float32: the tokens of {name}")
                found[name] = child.ask(request, waiting, options.deadline or RUN_S)
        except ChildFailed as failed:
            found |= {name: {"problem": str(failed)} for name in sampled if name not in found}
        finally:
            bench.line.clear()
    return found


def truth_table(found: Mapping[str, Found], dtype: str, ours: set[str]) -> str:
    """A line for each pair. Transformers and our trainer score only our own systems' tokens: a peer's add nothing."""
    lines, problems = [], []
    for name, pairs in found.items():
        if "problem" in pairs:
            problems.append(f"{name}: {pairs['problem']}")
            continue
        for key, words in LINES.items():
            if key == "rollout" or name in ours:
                pair = pairs[key]
                numbers = [*(f"{pair[key]:.2g}" for key in ("mean", "max", "kl")), f"{pair['tokens']:,}"]
                lines.append([words.format(name, dtype), *numbers])
    head = ["log-probs, nats", "mean", "max", "KL", "tokens"]
    return "\n".join([render(head, lines), *problems])


SYNC_HEAD = ("system", "best ms", "median ms", "time vs", "GiB moved", "note")


def main_sync(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file; the status is 1 if nothing could be measured."""
    bench = prepare(options, SYNC)
    chip = bench.place.chip

    def floor(entries: list[Entry]) -> float | None:
        # A copy reads the weights once and writes them once; an engine that shares them is below that.
        sizes = [answer["bytes"] for entry in entries for answer in entry.answers]
        return None if chip is None or not sizes else 2 * max(sizes) / chip.bandwidth

    def content(entries: list[Entry]) -> dict[str, Any]:
        results = {entry.system.name: entry.as_json() | entry.times() for entry in entries}
        return {"floor_s": floor(entries), "systems": results}

    entries = bench.contest(warm_ups=1, content=content).measure(bench.systems, bench.job)
    limit = floor(entries)
    row = ("floor of a copy", limit, f"{1000 * limit:.2f}", "the chip's bandwidth") if limit else None
    table = comparison(entries, SYNC_HEAD, Entry.times, _sync_cells, nothing="no runs", floor=row)
    return bench.print_results(entries, "new weights for the rollout", table)


def _sync_cells(entry: Entry, found: dict[str, float]) -> list[str]:
    times = [f"{1000 * found[key]:.2f}" for key in ("best", "median")]
    return [*times, f"{entry.answers[-1]['moved'] / 2**30:.2f}", entry.version()]

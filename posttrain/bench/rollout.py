"""`posttrain bench rollout`: useful tokens per second of each system on the same rows.

With `--truth ROWS` also how far a system's log-probs are from those of the same model in float32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.bench.child import ChildFailed, running
from posttrain.bench.contest import LOAD_S, RUN_S, Entry, disturbance
from posttrain.bench.floor import decoding_floor
from posttrain.bench.preparing import Prepared, prepare
from posttrain.bench.systems import ROLLOUT, System
from posttrain.bench.table import factor, render
from posttrain.bench.workload import Workload, as_job, fill_in_sizes, workload_of
from posttrain.errors import UserError

WARM_UPS = 2  # the second shows what the first had to compile or allocate
WARMING = 64  # tokens of a response in a peer's one warm-up on a CUDA device; it compiles and captures while loading
SIZES = ("work", "prompts", "n", "prompt_tokens", "tokens", "lengths", "mean_tokens", "slots", "repeat")


@dataclass
class Work:
    """Rows under their name; `options` are its sizes."""

    options: argparse.Namespace
    rows: Workload
    floor_s: float | None

    def of(self, entries: Sequence[Entry], number: int) -> list[Entry]:
        """The entries with their answers to this work alone, the `number`th that was asked for."""
        return [replace(entry, answers=[a for a in entry.answers if a["work"] == number]) for entry in entries]

    def as_json(self, entries: Sequence[Entry]) -> dict[str, Any]:
        sizes = {key: getattr(self.options, key) for key in SIZES}
        made = {"rows": len(self.rows.lengths), "total_tokens": self.rows.tokens, "row_lengths": self.rows.lengths}
        systems = {entry.system.name: entry.as_json() | rates(entry) for entry in entries}
        return {"workload": sizes | made, "floor_s": self.floor_s, "systems": systems}


def main(options: argparse.Namespace) -> int:
    """Measure, print a table for each work, write the file; the status is 1 if nothing could be measured."""
    names = options.work.split(",") if options.work else [None]
    given = [argparse.Namespace(**{**vars(options), "work": name}) for name in names]
    bench = prepare(given[0], ROLLOUT)
    for other in given[1:]:
        fill_in_sizes(other, bench.place)
    works = [make_work(bench, sizes) for sizes in given]
    slots = {work.options.slots or len(work.rows.lengths) for work in works}
    if len(slots) > 1 and any(work.options.slots for work in works):
        raise UserError(f"--work {options.work}: their slots differ ({slots}), and a system is loaded with one number")

    def job(system: System) -> dict[str, Any]:
        model = bench.model
        rows = [work.rows for work in works]
        common = as_job(rows, model=str(model.folder), dtype=model.dtype, threads=options.threads)
        return {**common, "engine": system.engine, "slots": max(slots), "settings": system.settings}

    truth: dict[str, Any] = {}

    def content(entries: list[Entry]) -> dict[str, Any]:
        found = [work.as_json(work.of(entries, number)) for number, work in enumerate(works)]
        against = {"truth": truth} if options.truth else {}
        return {**(found[0] if len(found) == 1 else {"works": dict(zip(names, found, strict=True))}), **against}

    short, wanted = bench.place.kind == "cuda", {"sample": options.truth} if options.truth else {}
    contest = bench.contest(
        warm_ups=1 if short else WARM_UPS,
        content=content,
        asks=[{"work": number, **({} if number else wanted)} for number in range(len(works))],
        warming={"most": WARMING} if short else {},
    )
    entries = contest.measure(bench.systems, job)
    for number, work in enumerate(works):
        mine = work.of(entries, number)
        print(_head(bench, work, mine))
        print(table(mine, work.floor_s and work.rows.tokens / work.floor_s))
    if options.truth:
        truth.update(distances(bench, works[0].rows, sampled_by(entries)))
        contest.keep(entries)
        ours = {system.name for system in bench.systems if system.ours}
        print("\n" + truth_table(truth, bench.model.dtype, ours))
    return 0 if any(entry.answers for entry in entries) else 1


def make_work(bench: Prepared, sizes: argparse.Namespace) -> Work:
    """The rows of a work, and the seconds below which the chip cannot go; None where its rates are not known (`bench
    sweep` measures a CPU's)."""
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


def _head(bench: Prepared, work: Work, entries: Sequence[Entry]) -> str:
    options = work.options
    lengths = f"{options.tokens} tokens each" if options.lengths == "fixed" else f"1 to {options.tokens} tokens"
    slots = f" over {options.slots} slots" if options.slots else ""
    return (
        f"\n{bench.model.name} in {bench.model.dtype}: {options.prompts} prompts of {options.prompt_tokens} tokens "
        f"x n={options.n}{slots}, {options.lengths}, {lengths}, {work.rows.tokens:,} in all; temperature 1\n"
        f"{bench.where()}; {disturbance(entries)}\n"
    )


Found = dict[str, Any]

LINES = {
    "rollout": "{}: its rollout, against float32",
    "transformers": "{}: transformers in {} on its tokens, against float32",
    "trainer": "{}: our trainer on its tokens, against float32",
    "rollout_trainer": "{}: its rollout, against our trainer",
}


def sampled_by(entries: Sequence[Entry]) -> dict[str, Found]:
    """System -> the rows of its last run."""
    asked = {entry.system.name: [a["sampled"] for a in entry.answers if "sampled" in a] for entry in entries}
    return {name: rows[-1] for name, rows in asked.items() if rows}


def distances(bench: Prepared, rows: Workload, sampled: Mapping[str, Found]) -> dict[str, Found]:
    """System -> what `ours/truth.py` found, or the problem that it had."""
    options, system = bench.options, System("truth", "", engine="truth")
    job = {
        "model": str(bench.model.folder),
        "dtype": bench.model.dtype,
        "threads": options.threads,
        "device": bench.place.kind,
    }
    found: dict[str, Found] = {}
    with running(system, "truth", job, "truth", threads=options.threads, kind=bench.place.kind) as child:
        try:
            bench.line.show("float32: loading")
            child.ready(lambda s: bench.line.waiting("float32: loading", s), options.deadline or LOAD_S)
            for name, given in sampled.items():
                words = f"float32: the tokens of {name}"
                bench.line.show(words)
                asked = {**given, "prompts": [rows.prompts[row] for row in given["rows"]]}
                show = lambda s, words=words: bench.line.waiting(words, s)  # noqa: E731
                found[name] = child.ask(asked, show, options.deadline or RUN_S)
        except ChildFailed as failed:
            found |= {name: {"problem": str(failed)} for name in sampled if name not in found}
        finally:
            bench.line.clear()
    return found


def truth_table(found: Mapping[str, Found], dtype: str, ours: set[str]) -> str:
    """A line for each pair; what transformers and our trainer make of a peer's tokens adds nothing."""
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

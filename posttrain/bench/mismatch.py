"""`posttrain bench rollout --truth ROWS`: how far a system's log-probs lie from those of the same model in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.bench.child import ChildFailed, running
from posttrain.bench.contest import LOAD_S, RUN_S, Entry
from posttrain.bench.preparing import Prepared
from posttrain.bench.systems import System
from posttrain.bench.table import render
from posttrain.bench.workload import Workload

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


def table(found: Mapping[str, Found], dtype: str, ours: set[str]) -> str:
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

"""`posttrain bench rollout --truth ROWS`: how far a system's log-probs lie from those of the same model in float32."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.bench import bench_folder
from posttrain.bench.child import Child, ChildFailed
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


def take(entries: Sequence[Entry]) -> dict[str, Found]:
    """System -> the rows of its last run, taken out of its answers: they are not to be kept in a file of figures."""
    taken = {}
    for entry in entries:
        for answer in [*entry.facts.get("warm_ups", []), *entry.answers]:
            if (sampled := answer.pop("sampled", None)) is not None:
                taken[entry.system.name] = sampled
    return taken


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
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        log = bench_folder() / "logs" / "truth.log"
        child = Child(system.command(path, "truth"), system.variables_for(options.threads, bench.place.kind), log)
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
            child.close()
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

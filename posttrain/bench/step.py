"""`posttrain bench step`: seconds of a whole GRPO step (rollout, reward, advantage, update), here and in TRL."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.bench.contest import Entry, disturbance, install_missing, measure
from posttrain.bench.presets import PRESETS, Model, find_model
from posttrain.bench.progress import Line
from posttrain.bench.record import circumstances, writable, write_json
from posttrain.bench.systems import STEP, System, choose
from posttrain.bench.table import factor, render
from posttrain.bench.tuning import tuned
from posttrain.errors import UserError

FIRST_COUNTED = 5
FRAME = 3  # tokens that the chat template puts around a prompt of the presets
LR, WEIGHT_DECAY = 1e-5, 0.0


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file; the status is 1 if nothing could be measured."""
    path = writable(options.json)
    _check(options)
    systems = tuned(choose(STEP, options.only), options.env, options.set, options.also)
    model, line = find_model(options.model), Line()
    record = circumstances(options.threads)
    if options.install:
        install_missing(systems, line)
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-model-") as folder:
        given = str(model.folder if options.lengths == "fixed" else ending_model(model, options.tokens, Path(folder)))
        entries = measure(
            systems,
            lambda system: make_job(system, model, given, options),
            module="step",
            threads=options.threads,
            repeat=options.repeat,
            warm_ups=0,
            line=line,
        )
    print(_head(model, options, record, entries))
    print(table(entries))
    if path is not None:
        keys = ("prompts", "n", "prompt_tokens", "tokens", "lengths", "steps", "repeat")
        facts = {"name": model.name, "dtype": model.dtype, "config": model.config}
        results = {entry.system.name: entry.as_json() | seconds(entry) for entry in entries}
        work = {key: getattr(options, key) for key in keys} | {"lr": LR, "weight_decay": WEIGHT_DECAY}
        write_json(path, {**record, "model": facts, "workload": work, "systems": results})
    return 0 if any(entry.answers for entry in entries) else 1


def _check(options: argparse.Namespace) -> None:
    if options.n < 2:
        raise UserError(f"--n {options.n}: GRPO compares the responses of a group; give 2 or more")
    if options.prompt_tokens <= FRAME:
        raise UserError(f"--prompt-tokens {options.prompt_tokens}: the chat template alone takes {FRAME}; give more")
    if options.lengths == "long-tail" and options.model not in PRESETS:
        raise UserError(
            "--lengths long-tail: a trained model ends its responses itself; this needs random weights, "
            f"--model {' or '.join(PRESETS)}"
        )


def make_job(system: System, model: Model, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a runner reads: a fresh set of prompts for every step, the same for all systems."""
    draw = random.Random(0)
    rows = options.prompts * (options.steps + 1)
    size = options.prompt_tokens - FRAME
    return {
        "model": folder,
        "dtype": model.dtype,
        "threads": options.threads,
        "engine": system.engine,
        "prompts": options.prompts,
        "n": options.n,
        "tokens": options.tokens,
        "prompt_tokens": options.prompt_tokens,
        "lengths": options.lengths,
        "steps": options.steps,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "texts": ["".join(draw.choices(string.ascii_lowercase, k=size)) for _ in range(rows)],
        "settings": system.settings,
    }


def ending_model(model: Model, tokens: int, folder: Path) -> Path:
    """The model with so many end tokens that random weights end a response after a quarter of `tokens` on average.

    Both trainers read them from `generation_config.json`, so lengths come about in the same way in each.
    """
    for file in model.folder.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    ends = list(range(max(1, round(model.vocab_size * 4 / tokens))))
    found = json.loads((model.folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**found, "eos_token_id": ends}))
    return folder


def counted(answer: dict[str, Any], key: str = "wall") -> list[float]:
    """Times from the fifth step on; of a shorter run, the last."""
    return answer[key][FIRST_COUNTED - 1 :] or answer[key][-1:]


def seconds(entry: Entry) -> dict[str, float]:
    """Best and median seconds per step by the wall clock; the median without what lies between steps."""
    wall = [value for answer in entry.answers for value in counted(answer)]
    if not wall:
        return {}
    inside = [value for answer in entry.answers for value in counted(answer, "inside")]
    lengths = [value for answer in entry.answers for value in counted(answer, "lengths")]
    mean = statistics.fmean(lengths) if lengths else float("nan")
    return {
        "best": min(wall),
        "median": statistics.median(wall),
        "inside": statistics.median(inside),
        "mean_length": mean,
    }


def table(entries: Sequence[Entry]) -> str:
    """One row per system; the factor compares medians with the first of ours that ran."""
    base = next((entry for entry in entries if entry.system.ours and entry.answers), None)
    ours = seconds(base)["median"] if base else None
    rows = []
    for entry in entries:
        found = seconds(entry)
        if entry.problem or not found:
            rows.append([entry.system.name, "-", "-", "-", "-", "-", entry.problem or "no steps"])
            continue
        shown = [f"{found[key]:.4f}" for key in ("best", "median", "inside")]
        packages = entry.facts.get("packages", {})
        name = entry.system.installs or "posttrain"
        rows.append(
            [
                entry.system.name,
                *shown,
                factor(found["median"], ours),
                f"{found['mean_length']:.1f}",
                f"{name} {packages.get(name, '')}",
            ]
        )
    versus = f"time vs {base.system.name}" if base else "time vs ours"
    return render(["system", "best s", "median s", "inside s", versus, "length", "note"], rows, left=(0, 6))


def _head(model: Model, options: argparse.Namespace, record: dict[str, Any], entries: Sequence[Entry]) -> str:
    return (
        f"\n{model.name} in {model.dtype}: GRPO steps of {options.prompts} prompts x n={options.n}, "
        f"{options.lengths} lengths up to {options.tokens} tokens, steps {FIRST_COUNTED} to {options.steps}\n"
        f"{record['cpu']}; {options.threads} threads; {disturbance(entries)}\n"
    )

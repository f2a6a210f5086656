"""`posttrain bench step`: seconds of a whole GRPO step (rollout, reward, advantage, update), here, in TRL, in verl."""

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

from posttrain.bench.contest import Entry, disturbance
from posttrain.bench.floor import decoding_floor, update_flops
from posttrain.bench.preparing import Prepared, prepare
from posttrain.bench.presets import PRESETS, Model
from posttrain.bench.systems import STEP, STEP_CUDA, System
from posttrain.bench.table import factor, render
from posttrain.errors import UserError

FIRST_COUNTED = 5
FRAME = 3  # tokens that the chat template puts around a prompt of the presets
LR, WEIGHT_DECAY = 1e-5, 0.0
SIZES = ("work", "prompts", "n", "prompt_tokens", "tokens", "lengths", "steps", "repeat")
SIZES += ("budget", "lora_rank", "checkpointing")


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file; the status is 1 if nothing could be measured."""
    bench = prepare(options, STEP, STEP_CUDA, _check)
    model = bench.model

    def content(entries: list[Entry]) -> dict[str, Any]:
        work = {key: getattr(options, key) for key in SIZES} | {"lr": LR, "weight_decay": WEIGHT_DECAY}
        results = {entry.system.name: entry.as_json() | seconds(entry) for entry in entries}
        return {"workload": work, "floor_s": floor(bench), "systems": results}

    with tempfile.TemporaryDirectory(prefix="posttrain-bench-model-") as folder:
        given = str(model.folder if options.lengths == "fixed" else ending_model(model, options.tokens, Path(folder)))
        contest = bench.contest(warm_ups=0, content=content)
        entries = contest.measure(bench.systems, lambda system: make_job(system, model, given, options))
    print(_head(bench, entries))
    print(table(entries, floor(bench)))
    return 0 if any(entry.answers for entry in entries) else 1


def floor(bench: Prepared) -> float | None:
    """Seconds of decoding and of the update below which the chip cannot go, with rows of full length; the responses of
    a group share one pass over their prompt."""
    chip, shape, options = bench.place.chip, bench.shape, bench.options
    if chip is None or shape is None or options.lengths != "fixed":
        return None
    rows = options.prompts * options.n
    prompts = [[row // options.n] * options.prompt_tokens for row in range(rows)]
    decoding = decoding_floor(
        shape, prompts, [options.tokens] * rows, slots=None, peak=chip.flops, bandwidth=chip.bandwidth
    )
    frozen, again = bool(options.lora_rank), [options.prompt_tokens] * (rows - options.prompts)
    update = update_flops(shape, [options.prompt_tokens + options.tokens] * rows, frozen=frozen)
    return decoding + (update - update_flops(shape, again, frozen=frozen)) / chip.flops


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
    rows = options.prompts * options.steps
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
        "budget": options.budget,
        "lora_rank": options.lora_rank or 0,
        "checkpointing": options.checkpointing,
        "deadline": options.deadline,
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


def counted_words(steps: int) -> str:
    return f"steps {FIRST_COUNTED} to {steps}" if steps > FIRST_COUNTED else f"step {steps}"


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
        **({"peak_gib": max(peaks)} if (peaks := [a["peak_gib"] for a in entry.answers if a.get("peak_gib")]) else {}),
    }


def table(entries: Sequence[Entry], limit: float | None = None) -> str:
    """One row per system; the factor compares medians with the first of ours that ran. `limit` is the chip's own."""
    base = next((entry for entry in entries if entry.system.ours and entry.answers), None)
    ours = seconds(base)["median"] if base else None
    rows = []
    for entry in entries:
        found = seconds(entry)
        if entry.problem or not found:
            rows.append([entry.system.name, "-", "-", "-", "-", "-", "-", entry.problem or "no steps"])
            continue
        shown = [f"{found[key]:.4f}" for key in ("best", "median", "inside")]
        peak = found.get("peak_gib")
        rows.append(
            [
                entry.system.name,
                *shown,
                factor(found["median"], ours),
                f"{found['mean_length']:.1f}",
                "-" if peak is None else f"{peak:.1f}",
                entry.version(),
            ]
        )
    if limit:
        rows.append(["floor", f"{limit:.4f}", "", "", factor(limit, ours), "", "", "the chip's rates, nothing else"])
    versus = f"time vs {base.system.name}" if base else "time vs ours"
    head = ["system", "best s", "median s", "inside s", versus, "length", "GiB", "note"]
    return render(head, rows, left=(0, 7))


def _head(bench: Prepared, entries: Sequence[Entry]) -> str:
    options, model = bench.options, bench.model
    return (
        f"\n{model.name} in {model.dtype}: GRPO steps of {options.prompts} prompts x n={options.n}, "
        f"{options.lengths} lengths up to {options.tokens} tokens, {counted_words(options.steps)}\n"
        f"{bench.where()}; {disturbance(entries)}\n"
    )

"""What trainers are measured on: `posttrain bench step` and `posttrain bench train`.

step        seconds of a whole GRPO step (rollout, reward, advantage, update), here, in TRL, in verl
train       seconds of one GRPO update on packed rows, and its share of the chip's arithmetic

The share (MFU) counts (6 N + 6 L H T) floating-point operations for every token of every row (`device.update_flops`;
4 N with adapters, as the base has no gradient). `counted` takes only the tokens that were computed: a prompt that
responses share is computed once.
"""

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

from posttrain.bench.contest import Bench, Entry, comparison, prepare
from posttrain.bench.device import decoding_floor, update_flops
from posttrain.bench.systems import STEP, STEP_CUDA, TRAIN, System
from posttrain.bench.workload import PRESETS, Model, Workload, workload_of
from posttrain.errors import UserError

FIRST_COUNTED = 5
FRAME = 3  # tokens that the presets' chat template adds to a prompt
LR, WEIGHT_DECAY = 1e-5, 0.0
STEP_SIZES = ("work", "prompts", "n", "prompt_tokens", "tokens", "lengths", "steps", "repeat")
STEP_SIZES += ("budget", "lora_rank", "checkpointing")
STEP_HEAD = ("system", "best s", "median s", "inside s", "time vs", "length", "GiB", "note")


def main_step(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file; the status is 1 if nothing could be measured."""
    bench = prepare(options, STEP, STEP_CUDA, _check)

    def content(entries: list[Entry]) -> dict[str, Any]:
        work = {key: getattr(options, key) for key in STEP_SIZES} | {"lr": LR, "weight_decay": WEIGHT_DECAY}
        results = {entry.system.name: entry.as_json() | step_figures(entry) for entry in entries}
        return {"workload": work, "floor_s": step_floor(bench), "systems": results}

    with tempfile.TemporaryDirectory(prefix="posttrain-bench-model-") as folder:
        model = bench.model
        given = str(
            model.folder if options.lengths == "fixed" else model_with_end_tokens(model, options.tokens, Path(folder))
        )
        contest = bench.contest(warm_ups=0, content=content)
        entries = contest.measure(bench.systems, lambda system: make_job(bench, system, given))
    work = (
        f"GRPO steps of {options.prompts} prompts x n={options.n}, {options.lengths} lengths up to {options.tokens} "
        f"tokens, {counted_steps(options.steps)}"
    )
    return bench.print_results(entries, work, step_table(entries, step_floor(bench)))


def step_floor(bench: Bench) -> float | None:
    """Seconds of decoding and update below which the chip cannot go, for rows of full length."""
    chip, shape, options = bench.place.chip, bench.shape, bench.options
    if chip is None or shape is None or options.lengths != "fixed":
        return None
    rows = options.prompts * options.n
    prompts = [[row // options.n] * options.prompt_tokens for row in range(rows)]
    decoding = decoding_floor(
        shape, prompts, [options.tokens] * rows, slots=None, peak=chip.flops, bandwidth=chip.bandwidth
    )
    # The responses of a group share one pass over their prompt: n - 1 of each n prompts are subtracted.
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


def make_job(bench: Bench, system: System, folder: str) -> dict[str, Any]:
    """What a runner reads: a fresh set of prompts for every step, the same for all systems."""
    options, draw = bench.options, random.Random(0)
    rows, size = options.prompts * options.steps, options.prompt_tokens - FRAME
    same = ("prompts", "n", "tokens", "prompt_tokens", "lengths", "steps", "budget", "checkpointing", "deadline")
    return bench.job(
        system,
        **{key: getattr(options, key) for key in same},
        model=folder,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        lora_rank=options.lora_rank or 0,
        texts=["".join(draw.choices(string.ascii_lowercase, k=size)) for _ in range(rows)],
    )


def model_with_end_tokens(model: Model, tokens: int, folder: Path) -> Path:
    """The model with so many end tokens that random weights end a response after a quarter of `tokens` on average."""
    # All trainers read them from `generation_config.json`, so lengths arise in the same way in each.
    for file in model.folder.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    # Random weights sample nearly uniformly: each step hits an end token with probability ends / vocabulary.
    ends = list(range(max(1, round(model.vocab_size * 4 / tokens))))
    found = json.loads((model.folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**found, "eos_token_id": ends}))
    return folder


def counted_times(answer: dict[str, Any], key: str = "wall") -> list[float]:
    """Times from the fifth step on; of a shorter run, the last."""
    return answer[key][FIRST_COUNTED - 1 :] or answer[key][-1:]


def counted_steps(steps: int) -> str:
    return f"steps {FIRST_COUNTED} to {steps}" if steps > FIRST_COUNTED else f"step {steps}"


def step_figures(entry: Entry) -> dict[str, float]:
    """Best and median seconds per step by the wall clock; and the median without the time between steps."""
    wall = [value for answer in entry.answers for value in counted_times(answer)]
    if not wall:
        return {}
    inside = [value for answer in entry.answers for value in counted_times(answer, "inside")]
    lengths = [value for answer in entry.answers for value in counted_times(answer, "lengths")]
    mean = statistics.fmean(lengths) if lengths else float("nan")
    return {
        "best": min(wall),
        "median": statistics.median(wall),
        "inside": statistics.median(inside),
        "mean_length": mean,
        **_peak(entry),
    }


def step_table(entries: Sequence[Entry], limit: float | None = None) -> str:
    """One row per system; `limit` is the chip's own."""
    row = ("floor", limit, f"{limit:.4f}", "the chip's rates, nothing else") if limit else None
    return comparison(entries, STEP_HEAD, step_figures, _step_cells, nothing="no steps", floor=row)


def _step_cells(entry: Entry, found: dict[str, float]) -> list[str]:
    times = [f"{found[key]:.4f}" for key in ("best", "median", "inside")]
    return [*times, f"{found['mean_length']:.1f}", _peak_cell(found), entry.version()]


BUDGET = 16384
UPDATE_SIZES = ("work", "prompts", "n", "prompt_tokens", "tokens", "lengths", "mean_tokens", "repeat", "budget")
UPDATE_SIZES += ("lora_rank", "checkpointing")
UPDATE_HEAD = ("system", "best s", "median s", "time vs", "tok/s", "MFU", "counted", "GiB", "note")


def main_train(options: argparse.Namespace) -> int:
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
        sizes = {key: getattr(options, key) for key in UPDATE_SIZES}
        results = {entry.system.name: entry.as_json() | update_figures(bench, work, entry) for entry in entries}
        return {
            "workload": sizes | {"total_tokens": total_tokens(work)},
            "floor_s": update_floor(bench, work),
            "systems": results,
        }

    def cells(entry: Entry, found: dict[str, float]) -> list[str]:
        shares = [f"{found[key]:.1%}" if key in found else "-" for key in ("mfu", "mfu_counted")]
        rate = f"{total_tokens(work) / found['median']:,.0f}"
        return [f"{found['best']:.4f}", f"{found['median']:.4f}", rate, *shares, _peak_cell(found), entry.version()]

    entries = bench.contest(warm_ups=2, content=content).measure(bench.systems, job)
    table = comparison(
        entries, UPDATE_HEAD, lambda entry: update_figures(bench, work, entry), cells, nothing="no updates"
    )
    adapters = f", adapters of rank {options.lora_rank}" if options.lora_rank else ""
    again = ", activations computed again" if options.checkpointing else ""
    text = (
        f"one update on {options.prompts} prompts of {options.prompt_tokens} tokens x n={options.n}, {options.lengths} "
        f"lengths up to {options.tokens}, {total_tokens(work):,} tokens, passes of {options.budget:,}{adapters}{again}"
    )
    return bench.print_results(entries, text, table)


def row_lengths(work: Workload) -> list[int]:
    return [len(prompt) + n for prompt, n in zip(work.prompts, work.lengths, strict=True)]


def total_tokens(work: Workload) -> int:
    return sum(row_lengths(work))


def update_floor(bench: Bench, work: Workload) -> float | None:
    """Seconds of the update's arithmetic at the chip's rate."""
    chip, shape = bench.place.chip, bench.shape
    if chip is None or shape is None:
        return None
    return update_flops(shape, row_lengths(work), frozen=bool(bench.options.lora_rank)) / chip.flops


def update_figures(bench: Bench, work: Workload, entry: Entry) -> dict[str, float]:
    """Best and median seconds, peak memory, and the shares of the chip's rate at the best."""
    found = entry.times()
    if not found:
        return {}
    least = update_floor(bench, work)
    if least is not None:
        # Against the best run: the share is a property of the code, other load is not.
        found["mfu"] = least / found["best"]
        found["mfu_counted"] = found["mfu"] * entry.answers[-1]["computed"] / total_tokens(work)
    return found | _peak(entry)


def _peak(entry: Entry) -> dict[str, float]:
    peaks = [answer["peak_gib"] for answer in entry.answers if answer.get("peak_gib")]
    return {"peak_gib": max(peaks)} if peaks else {}


def _peak_cell(found: dict[str, float]) -> str:
    return f"{found['peak_gib']:.1f}" if "peak_gib" in found else "-"

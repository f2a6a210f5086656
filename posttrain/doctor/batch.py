"""The batch in words (prompts -> responses -> mini-batches -> micro-batches -> optimizer steps), and its time.

The time of a step is a rough estimate: the work of its stages over the speed of this device, measured for a moment.
Work is counted in multiplications of weights with tokens: 2 x parameters per token forward, 4 more backward. Decoding
reads all weights once per round of tokens, so its speed is the smaller of what memory and multipliers allow. A step of
a small model is mostly overhead, which the constants below hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from posttrain.algorithms import get_adv_estimator
from posttrain.config import needs_reference
from posttrain.doctor.case import ERROR, NOTE, WARNING, Case, Finding, Run
from posttrain.errors import UserError
from posttrain.models.loading import resolve_dtype
from posttrain.planning.budgets import count_steps, critic_updates, fit_sizes

AREA = "batch"
# From so many prompts per step a mini-batch of one prompt is probably a mistake; a trial run may have it.
FROM_PROMPTS = 4


def check_batch(case: Case) -> Iterator[Finding]:
    """Says the arithmetic; finds sizes that do not fit the data, and warm-ups without an end."""
    if "train" not in case.datasets:
        return
    rows = case.counts["train"]
    if case.is_rl:
        yield from _rl(case, rows)
    else:
        _supervised(case, rows)
    run = case.run
    if run is None:
        return
    key, optim = case.optim
    if optim.lr_warmup_steps >= max(1, run.updates):
        what = (
            f"`{key}.lr_warmup_steps={optim.lr_warmup_steps}`, but the run makes {run.updates} updates: the learning "
        )
        what += f"rate never gets beyond {optim.lr * run.updates / optim.lr_warmup_steps:.2g}."
        do = f"set {key}.lr_warmup_steps to a tenth of the updates ({max(1, run.updates // 10)}), or train longer"
        yield Finding(WARNING, AREA, what, case.where(f"{key}.lr_warmup_steps"), do)


def _rl(case: Case, rows: int) -> Iterator[Finding]:
    config = case.config
    critic = get_adv_estimator(config.algorithm.adv_estimator).needs_critic
    try:
        sizes, notes = fit_sizes(config, case.resolved.explicit, rows, critic=critic)
    except UserError as error:
        yield Finding(ERROR, AREA, str(error), case.where("data.train_batch_size"))
        return
    n, actor = config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    in_pass = max(1, actor.ppo_max_token_len_per_gpu // longest)
    if actor.ppo_micro_batch_size_per_gpu:
        in_pass = min(in_pass, actor.ppo_micro_batch_size_per_gpu)
    mini_rows, parts = sizes.mini_batch_prompts * n, math.ceil(sizes.prompts / sizes.mini_batch_prompts)
    per_epoch = rows // sizes.prompts
    left_out = rows - per_epoch * sizes.prompts
    case.report.fact(
        AREA,
        *notes,
        f"{sizes.prompts} prompts per step, each answered {n} times: {sizes.responses} responses.",
        f"They are split into {parts} mini-batch{'es' * (parts != 1)} of {sizes.mini_batch_words()} and trained for "
        f"{actor.ppo_epochs} epoch{'s' * (actor.ppo_epochs != 1)}: {sizes.updates_per_step} optimizer "
        f"step{'s' * (sizes.updates_per_step != 1)} per step.",
        f"A mini-batch is computed in at least {math.ceil(mini_rows / in_pass)} "
        f"micro-batch{'es' * (mini_rows > in_pass)} of at most {in_pass} sequences of the maximum length ({longest} "
        "tokens); the split changes no result.",
        f"{rows} prompts make {per_epoch} step{'s' * (per_epoch != 1)} per epoch"
        + (f", {left_out} of them are left over in each epoch" if left_out else "")
        + f"; the run has {sizes.total_steps} steps, {sizes.total_steps * sizes.responses:,} responses and "
        f"{sizes.total_updates:,} optimizer steps"
        + (f" ({critic_updates(config, sizes):,} of the critic)." if critic else "."),
    )
    case.run = _run(case, sizes.total_steps, sizes.total_updates)
    if sizes.mini_batch_prompts == 1 and sizes.prompts >= FROM_PROMPTS:
        key = "actor_rollout_ref.actor.ppo_mini_batch_size"
        what = f"`{key}=1`: every optimizer step learns from a single prompt, so that a step makes "
        what += f"{sizes.updates_per_step} noisy updates in a row on one batch."
        do = (
            f"set {key} between {max(2, sizes.prompts // 4)} and data.train_batch_size={sizes.prompts}; to save memory "
        )
        do += "lower ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu, which change no result"
        yield Finding(WARNING, AREA, what, case.where(key), do)


def _supervised(case: Case, rows: int) -> None:
    data = case.config.data
    batch, steps = count_steps(case.config, rows)
    unit = "pairs" if case.is_pairs else "rows"
    in_pass = max(1, data.max_token_len_per_gpu // (data.max_length * (2 if case.is_pairs else 1)))
    in_pass = min(in_pass, data.micro_batch_size_per_gpu or in_pass)
    case.report.fact(
        AREA,
        f"{batch} {unit} per optimizer step, computed in at least {math.ceil(batch / in_pass)} "
        f"micro-batch{'es' * (batch > in_pass)} of at most {in_pass} {unit} of the maximum length ({data.max_length} "
        "tokens each); the split changes no result.",
        f"{rows} {unit} make {math.ceil(rows / batch)} step{'s' * (rows > batch)} per epoch; the run has {steps} "
        "steps.",
    )
    case.run = _run(case, steps, steps)


def _run(case: Case, steps: int, updates: int) -> Run:
    # A new checkpoint is complete before an old one is removed, hence keep + 1.
    freq, keep = case.config.trainer.save_freq, case.config.trainer.max_ckpt_to_keep
    saves = 1 if freq <= 0 else math.ceil(steps / freq)
    return Run(steps, updates, saves if keep is None else min(saves, keep + 1))


# -- how long a step takes ---------------------------------------------------------------------------------------------
TIME = "time"
TRIAL_S = 0.05
EFFICIENCY = 0.45  # share of a bare matrix product's speed that a whole pass reaches
ROUND_S = {"cpu": 1e-3, "cuda": 1.5e-3}  # overhead of one round of decoding
PASS_S = {"cpu": 5e-3, "cuda": 2e-2}  # overhead of one packed pass
LONG_S = 20 * 24 * 3600.0


@dataclass(frozen=True)
class Speed:
    """Multiplications and bytes per second."""

    flops: float
    bytes: float


def measure(device: torch.device, dtype: torch.dtype) -> Speed:
    """The speed of matrix products and of copies, each measured for TRIAL_S."""
    size = 512 if device.type == "cpu" else 4096
    left, right = (torch.rand(size, size, device=device, dtype=dtype) for _ in range(2))
    flops = 2 * size**3 / _seconds(lambda: left @ right, device)
    whole = torch.empty(8 * 2**20 if device.type == "cpu" else 256 * 2**20, device=device, dtype=torch.uint8)
    return Speed(flops, 2 * whole.numel() / _seconds(lambda: whole.clone(), device))


def _seconds(act, device: torch.device) -> float:
    act()
    _wait(device)
    started, count = time.perf_counter(), 0
    # As many as fit into the time: one product alone would measure the clock.
    while time.perf_counter() - started < TRIAL_S:
        act()
        count += 1
    _wait(device)
    return (time.perf_counter() - started) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def check_pace(case: Case) -> Iterator[Finding]:
    """Report the estimate, with a note for a run of weeks."""
    if case.run is None:
        return
    kind = case.device.kind
    device = torch.device(kind)
    if kind == "cuda" and not torch.cuda.is_available():
        return
    dtype = resolve_dtype(case.model.dtype, device)
    stages = (_rl_seconds if case.is_rl else _supervised_seconds)(case, measure(device, dtype), dtype.itemsize)
    seconds = sum(stages.values())
    parts = ", ".join(f"{name} {_span(value)}" for name, value in stages.items())
    total = seconds * case.run.steps
    case.report.fact(
        TIME,
        f"A step takes about {_span(seconds)} here if responses reach half their limit ({parts}), the run's "
        f"{case.run.steps} steps about {_span(total)}; a rough estimate."
        if case.is_rl
        else f"A step takes about {_span(seconds)} here, the run's {case.run.steps} steps about {_span(total)}; a "
        "rough estimate.",
    )
    if total > LONG_S:
        yield Finding(
            NOTE, TIME, f"The run would take about {_span(total)}.", "", "trainer.total_training_steps ends it earlier"
        )


def _rl_seconds(case: Case, speed: Speed, width: int) -> dict[str, float]:
    config, n = case.config, case.parameters
    data, rollout = config.data, config.actor_rollout_ref.rollout
    lengths = [len(item["prompt_ids"]) for item in case.datasets["train"]]
    # How long responses will be is not known before the run; half of the limit is the middle of what is possible.
    prompt, response = sum(lengths) / len(lengths), max(1.0, data.max_response_length / 2)
    prompts, rows = data.train_batch_size, data.train_batch_size * rollout.n
    # A decode step reads all weights once, however many sequences share it, so that memory bandwidth bounds small
    # batches.
    wave = min(rollout.max_num_seqs, rows)
    flops = EFFICIENCY * speed.flops
    rounds = data.max_response_length * -(-rows // wave)  # the longest response decides
    decode = rounds * (n * width / speed.bytes + ROUND_S[case.device.kind]) + 2 * n * (rows * response) / flops
    tokens = prompts * prompt + rows * response  # a prompt is computed once for all its responses
    forward = 2 * n * tokens / flops
    run = case.run
    assert run is not None, "check_pace has seen it"
    scored = int(run.updates > run.steps) + int(needs_reference(config))
    passes = max(1, int(tokens // config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu))
    update = config.actor_rollout_ref.actor.ppo_epochs * 3 * forward
    updates = run.updates / max(1, run.steps)
    generation = 2 * n * prompts * prompt / flops + decode
    waits = max(0.0, case.scoring_s - generation)  # responses are scored while others are generated
    return {
        "generation": generation,
        **({"waiting for rewards": waits} if waits else {}),
        "log-probs": scored * (forward + passes * PASS_S[case.device.kind]),
        "update": update + (passes + updates) * PASS_S[case.device.kind] + updates * 16 * n / speed.bytes,
    }


def _supervised_seconds(case: Case, speed: Speed, width: int) -> dict[str, float]:
    data, items = case.config.data, list(case.datasets["train"])
    each = sum(len(getattr(row, "ids", None) or [*row.chosen, *row.rejected]) for row in items) / len(items)
    tokens = each * min(data.train_batch_size, len(items))
    passes = max(1, int(tokens // data.max_token_len_per_gpu))
    update = 6 * case.parameters * tokens / (EFFICIENCY * speed.flops)
    return {"update": update + passes * PASS_S[case.device.kind] + 16 * case.parameters / speed.bytes}


def _span(seconds: float) -> str:
    for size, word in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"

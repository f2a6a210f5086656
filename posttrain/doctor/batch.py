"""The batch in words: prompts -> responses -> mini-batches -> micro-batches -> optimizer steps, and the whole run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from posttrain.algorithms import get_adv_estimator
from posttrain.doctor.case import Case, Run
from posttrain.doctor.finding import ERROR, WARNING, Finding
from posttrain.errors import UserError
from posttrain.planning.batch_sizes import count_steps, critic_updates, fit_sizes

AREA = "batch"
# Prompts per step from which a mini-batch of one prompt is hardly meant; a trial of two prompts may have it.
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
    mini_rows = sizes.mini_batch_prompts * n
    per_epoch = rows // sizes.prompts
    left_out = rows - per_epoch * sizes.prompts
    case.report.fact(
        AREA,
        *notes,
        f"{sizes.prompts} prompts per step, each answered {n} times: {sizes.responses} responses.",
        f"They are cut into {math.ceil(sizes.prompts / sizes.mini_batch_prompts)} mini-batches of "
        f"{sizes.mini_batch_prompts} prompts ({mini_rows} responses), gone over {actor.ppo_epochs} "
        f"time{'s' * (actor.ppo_epochs != 1)}: {sizes.updates_per_step} optimizer "
        f"step{'s' * (sizes.updates_per_step != 1)} per step.",
        f"A mini-batch is computed in at least {math.ceil(mini_rows / in_pass)} "
        f"pass{'es' * (mini_rows > in_pass)} of at most {in_pass} responses of the longest kind ({longest} tokens); "
        "how it is cut changes no result.",
        f"{rows} prompts make {per_epoch} step{'s' * (per_epoch != 1)} per epoch"
        + (f", {left_out} of them wait for another epoch's order" if left_out else "")
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
        f"pass{'es' * (batch > in_pass)} of at most {in_pass} {unit} of the longest kind ({data.max_length} tokens "
        "each); how it is cut changes no result.",
        f"{rows} {unit} make {math.ceil(rows / batch)} step{'s' * (rows > batch)} per epoch; the run has {steps} "
        "steps.",
    )
    case.run = _run(case, steps, steps)


def _run(case: Case, steps: int, updates: int) -> Run:
    """`saves`: checkpoints that lie on disk at the same time, at most."""
    freq, keep = case.config.trainer.save_freq, case.config.trainer.max_ckpt_to_keep
    saves = 1 if freq <= 0 else math.ceil(steps / freq)
    return Run(steps, updates, saves if keep is None else min(saves, keep + 1))

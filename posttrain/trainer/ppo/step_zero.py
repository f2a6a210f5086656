"""What is proved before the first update: rollout and trainer agree, and the largest batch fits into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from posttrain.algorithms import correction_is_on
from posttrain.config.root import PPOConfig
from posttrain.errors import UserError
from posttrain.protocol import DataProto
from posttrain.tracking.fields import groups_of
from posttrain.tracking.progress import say
from posttrain.trainer.ppo.sizes import Sizes

if TYPE_CHECKING:
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

ROLLOUT_IS_EXACT = 1e-4  # below this difference the rollout's own log-probs serve as the old ones

# Past this, on CPU, the trial of the largest batch would cost more time than a surprise would.
CPU_TRIAL_FLOPS = 2e12


class MismatchError(UserError):
    """Rollout and trainer do not compute the same policy."""


class GroupError(UserError):
    """The responses that are compared with each other are not n responses to one prompt."""


def check_first_batch(trainer: RayPPOTrainer, batch: DataProto) -> bool:
    """Whether the rollout's own log-probs may serve as the old ones; errors where groups are not whole, rollout and
    trainer disagree, or the largest batch does not fit into memory."""
    config, actor = trainer.config, trainer.actor_rollout_wg
    turns = trainer.experience.turns
    check_groups(batch, config.actor_rollout_ref.rollout.n, one_prompt=not (turns and turns.has_agents))
    ours = actor.compute_log_prob(batch).batch["old_log_probs"]
    facts = actor.engine_facts()
    sentence, largest = compare_log_probs(batch, ours, tolerance(config, facts.dtype))
    say(sentence)
    corrected = correction_is_on(config.algorithm.rollout_correction)
    if (words := sampling_words(batch, corrected=corrected)) is not None:
        say(words)
    lengths = largest_rows(config, trainer.sizes)
    if too_slow_to_try(lengths, facts.parameters, trainer.device):
        say(f"The largest batch ({sum(lengths)} tokens) was not tried beforehand: on this CPU it would take long.")
    else:
        actor.dry_run(lengths, config.data.max_prompt_length)
        say(f"The largest batch ({len(lengths)} rows, {sum(lengths)} tokens at once) fits into memory.")
    return largest <= ROLLOUT_IS_EXACT and not corrected


def check_groups(batch: DataProto, n: int, *, one_prompt: bool = True) -> None:
    """Every uid must name exactly `n` rows, all with the same prompt unless agents make their own; otherwise a group
    was split or mixed."""
    prompts = batch.batch["prompts"]
    for rows in groups_of(batch.non_tensor_batch["uid"]):
        uid = batch.non_tensor_batch["uid"][rows[0]]
        what = None
        if len(rows) != n:
            what = f"has {len(rows)} rows instead of {n} (actor_rollout_ref.rollout.n): it was split or joined"
        elif one_prompt and not bool((prompts[rows] == prompts[rows[0]]).all()):
            what = "holds responses to different prompts: groups were mixed"
        if what is not None:
            raise GroupError(
                f"Step 0: the group with uid {uid!r} {what}, so advantages would compare the wrong responses. "
                "Code that changes the batch must keep each row's `uid` beside it."
            )


def tolerance(config: PPOConfig, dtype: torch.dtype) -> float:
    """Largest mean difference of log-probs that a run starts with."""
    if config.trainer.rollout_mismatch_tol is not None:
        return config.trainer.rollout_mismatch_tol
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def compare_log_probs(batch: DataProto, trainer_log_probs: torch.Tensor, allowed: float) -> tuple[str, float]:
    """One sentence on how well rollout and trainer agree, and the largest difference; raises if they do not."""
    real = batch.batch["response_mask"].bool()
    gap = (trainer_log_probs - batch.batch["rollout_log_probs"]).abs()[real]
    ratio = ((trainer_log_probs - batch.batch["rollout_log_probs"]).exp() - 1).abs()[real]
    mean, largest = float(gap.mean()), float(gap.max())
    sentence = (
        f"rollout and trainer log-probs differ by {mean:.2g} on average and {largest:.2g} at most over {gap.numel()} "
        f"tokens; the ratio is 1 within {float(ratio.max()):.2g}"
    )
    if lost := int((~torch.isfinite(trainer_log_probs[real])).sum()):
        raise MismatchError(
            f"Step 0: the trainer's own log-probs of {lost} of {gap.numel()} tokens are NaN or infinite: no rollout "
            "could agree with them. Are the weights sound, is model.dtype wide enough, rollout.temperature usual?"
        )
    if not mean <= allowed:
        raise MismatchError(
            f"Step 0: {sentence}. That is more than {allowed:g}: the policy that samples is not the one that is "
            "trained. Is the model supported by the rollout engine (try actor_rollout_ref.rollout.name=hf), and is "
            "model.dtype the same? trainer.rollout_mismatch_tol sets the limit."
        )
    return f"Step 0: {sentence}.", largest


def sampling_words(batch: DataProto, *, corrected: bool) -> str | None:
    """One sentence on how far what was sampled from is from the policy; None where they are the same."""
    if "sampling_log_probs" not in batch.batch:
        return None
    gap = batch.batch["rollout_log_probs"] - batch.batch["sampling_log_probs"]
    ratio = gap.exp()[batch.batch["response_mask"].bool()]
    done = (
        "algorithm.rollout_correction corrects for it"
        if corrected
        else ("nothing corrects for it (algorithm.rollout_correction.rollout_is=token would)")
    )
    return (
        "Step 0: filters and penalties of actor_rollout_ref.rollout (top_p, top_k, min_p, repetition_penalty) are not "
        "in these log-probs. To what was really sampled from the policy's ratio is "
        f"{float(ratio.mean()):.3g} on average (from {float(ratio.min()):.2g} to {float(ratio.max()):.2g}); {done}."
    )


def largest_rows(config: PPOConfig, sizes: Sizes) -> list[int]:
    """Lengths of the rows of the largest micro-batch that this run can meet."""
    actor = config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    rows = sizes.mini_batch_prompts * config.actor_rollout_ref.rollout.n
    if actor.ppo_micro_batch_size_per_gpu:
        rows = min(rows, actor.ppo_micro_batch_size_per_gpu)
    return [longest] * max(1, min(rows, actor.ppo_max_token_len_per_gpu // longest))


def too_slow_to_try(lengths: list[int], parameters: int, device: torch.device) -> bool:
    return device.type == "cpu" and 6.0 * sum(lengths) * parameters > CPU_TRIAL_FLOPS

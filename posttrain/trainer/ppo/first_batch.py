"""Checks before the first update: rollout and trainer agree, and the largest batch fits into memory."""

from __future__ import annotations

import numpy as np
import torch

from posttrain.algorithms import correction_is_on
from posttrain.batch.samples import sample_of_rows
from posttrain.config.root import PPOConfig
from posttrain.errors import UserError
from posttrain.planning.budgets import Sizes
from posttrain.protocol import DataProto
from posttrain.tracking.metrics import groups_of
from posttrain.tracking.progress import say
from posttrain.workers.groups import ActorRolloutGroup

FP8_TOLERANCE = 0.5  # SmolLM2-135M differs by 0.2 on average
ROLLOUT_IS_EXACT = 1e-4  # below this difference the rollout's own log-probs serve as the old ones

# Past this, on CPU, the trial of the largest batch would cost more time than a surprise would.
CPU_TRIAL_FLOPS = 2e12


class MismatchError(UserError):
    """Rollout and trainer do not compute the same policy."""


class GroupError(UserError):
    """The responses that are compared with each other are not n responses to one prompt."""


class FirstBatchChecks:
    """Checks a process's first batch that the present weights sampled: whole groups, agreement of rollout and trainer,
    and a trial of the largest batch. `one_prompt` is off where conversations make prompts of their own.

    `rollout_is_exact`: on the run's first batch the rollout's log-probs equalled the trainer's, so that they can serve
    as the old ones. It is saved with checkpoints: a resumed run must not decide anew.
    """

    def __init__(
        self, config: PPOConfig, sizes: Sizes, actor: ActorRolloutGroup, device: torch.device, *, one_prompt: bool
    ) -> None:
        self.n, self.one_prompt = config.actor_rollout_ref.rollout.n, one_prompt
        self.corrected = correction_is_on(config.algorithm.rollout_correction)
        self.tolerance = config.trainer.rollout_mismatch_tol
        roles = config.actor_rollout_ref
        if self.tolerance is None and (roles.rollout.quantization or roles.actor.quantization):
            self.tolerance = FP8_TOLERANCE
        if config.trainer.exact:
            self.tolerance = 0.0
        self.lengths, self.prompt_length = largest_rows(config, sizes), config.data.max_prompt_length
        self.actor, self.device = actor, device
        self.done = self.rollout_is_exact = False

    def unchecked(self, batch: DataProto, step: int) -> DataProto | None:
        """The groups of this batch that the weights after `step` updates sampled; None if the checks were made."""
        fresh = np.array(False) if self.done else fresh_groups(batch, step)
        return batch[fresh] if fresh.any() else None

    def run(self, fresh: DataProto, step: int) -> None:
        """Check these groups; an error ends the run before its first update."""
        self.done = True
        # Only fresh groups: older ones were sampled by other weights, and would differ for a good reason.
        exact = self._check(fresh, step)
        if step == 0:
            self.rollout_is_exact = exact

    def _check(self, batch: DataProto, step: int) -> bool:
        check_groups(batch, self.n, one_prompt=self.one_prompt, step=step)
        ours = self.actor.compute_log_prob(batch).batch["old_log_probs"]
        facts = self.actor.engine_facts()
        sentence, largest = compare_log_probs(batch, ours, tolerance(self.tolerance, facts.dtype), step)
        say(sentence)
        if (words := sampling_words(batch, corrected=self.corrected, step=step)) is not None:
            say(words)
        rows, tokens = len(self.lengths), sum(self.lengths)
        if too_slow_to_try(self.lengths, facts.parameters, self.device):
            say(f"The largest batch ({tokens} tokens) was not tried beforehand: on this CPU it would take long.")
        else:
            self.actor.dry_run(self.lengths, self.prompt_length)
            say(f"The largest batch ({rows} rows, {tokens} tokens at once) fits into memory.")
        return largest <= ROLLOUT_IS_EXACT and not self.corrected

    def state_dict(self) -> bool:
        return self.rollout_is_exact

    def load_state_dict(self, state: bool) -> None:
        self.rollout_is_exact = bool(state)


def is_fresh(batch: DataProto, version: int) -> np.ndarray:
    """(B,) whether a response was sampled by this version of the weights. One in which the model wrote nothing is."""
    versions = batch.non_tensor_batch["policy_versions"]
    return np.array([all(sampled == version for sampled, _ in spans) for spans in versions])


def fresh_groups(batch: DataProto, version: int) -> np.ndarray:
    """(B,) whether a response belongs to a group that this version of the weights sampled. Groups stay whole: a
    response in which the model wrote nothing goes with the others of its group."""
    fresh, versions = is_fresh(batch, version), batch.non_tensor_batch["policy_versions"]
    for rows in groups_of(batch.non_tensor_batch["uid"]):
        fresh[rows] = fresh[rows].all() and any(versions[row] for row in rows)
    return fresh


def check_groups(batch: DataProto, n: int, *, one_prompt: bool = True, step: int = 0) -> None:
    """Every uid must name exactly `n` samples, all with the same prompt unless conversations make their own; otherwise
    a group was split or mixed."""
    prompts, sample_B = batch.batch["prompts"], sample_of_rows(batch)
    for rows in groups_of(batch.non_tensor_batch["uid"]):
        uid = batch.non_tensor_batch["uid"][rows[0]]
        what = None
        if (samples := len(set(sample_B[rows].tolist()))) != n:
            what = f"has {samples} rows instead of {n} (actor_rollout_ref.rollout.n): it was split or joined"
        elif one_prompt and not bool((prompts[rows] == prompts[rows[0]]).all()):
            what = "holds responses to different prompts: groups were mixed"
        if what is not None:
            raise GroupError(
                f"Step {step}: the group with uid {uid!r} {what}, so advantages would compare the wrong responses. "
                "Code that changes the batch must keep each row's `uid` beside it."
            )


def tolerance(given: float | None, dtype: torch.dtype) -> float:
    """Largest mean difference of log-probs that a run starts with; `given` is trainer.rollout_mismatch_tol."""
    if given is not None:
        return given
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def compare_log_probs(
    batch: DataProto, trainer_log_probs: torch.Tensor, allowed: float, step: int = 0
) -> tuple[str, float]:
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
            f"Step {step}: the trainer's own log-probs of {lost} of {gap.numel()} tokens are NaN or infinite: no "
            "rollout could agree with them. Are the weights sound, is model.dtype wide enough, the temperature usual?"
        )
    if allowed == 0 and largest > 0:
        raise MismatchError(
            f"Step {step}: trainer.exact=True, but {sentence}; {int((gap > 0).sum())} tokens differ. This is a bug in "
            "posttrain's kernels on this machine: please report it, and set trainer.exact=False meanwhile."
        )
    if not mean <= allowed:  # also where the mean is NaN
        raise MismatchError(
            f"Step {step}: {sentence}. That is more than {allowed:g}: the policy that samples is not the one that is "
            "trained. Is the model supported by the rollout engine (try actor_rollout_ref.rollout.name=hf), and is "
            "model.dtype the same? trainer.rollout_mismatch_tol sets the limit."
        )
    return f"Step {step}: {sentence}.", largest


def sampling_words(batch: DataProto, *, corrected: bool, step: int = 0) -> str | None:
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
        f"Step {step}: filters and penalties of actor_rollout_ref.rollout (top_p, top_k, min_p, repetition_penalty) "
        "are not in these log-probs. To what was really sampled from the policy's ratio is "
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

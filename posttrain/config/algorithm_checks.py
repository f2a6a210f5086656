"""Checks of the algorithm: estimator, policy loss, KL, shaping and off-policy correction that do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from posttrain.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES
from posttrain.config.checked import Checked, Finding, nearest_name
from posttrain.config.choices import GROUP_ESTIMATORS, PER_RESPONSE, PER_RESPONSE_LOSSES, REJECTIONS

_ACTOR = "actor_rollout_ref.actor"


def _kl(checked: Checked) -> Iterator[Finding]:
    algorithm, actor = checked.config.algorithm, checked.config.actor_rollout_ref.actor
    if algorithm.use_kl_in_reward and actor.use_kl_loss and not algorithm.allow_both_kl:
        what = "KL is in the reward (algorithm.use_kl_in_reward) and in the loss (use_kl_loss): it would count twice."
        do = "switch one of them off, or set algorithm.allow_both_kl=True if it is meant"
        yield checked.problem(what, do, "algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss")
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "use_kl_loss=True with kl_loss_coef=0: no KL term is added; no reference model is loaded for the loss."
    if algorithm.adv_estimator not in GROUP_ESTIMATORS:
        return
    name = algorithm.adv_estimator
    if algorithm.use_kl_in_reward and ADV_ESTIMATORS[name].kl_belongs_in_loss:
        yield f"KL is in the reward under {name}; the usual place is the loss ({_ACTOR}.use_kl_loss=True)."
    elif not (actor.use_kl_loss or algorithm.use_kl_in_reward):
        yield f"This {name} run has no KL term and loads no reference model ({_ACTOR}.use_kl_loss=True adds one)."


def _drgrpo(checked: Checked) -> Iterator[Finding]:
    config = checked.config
    actor = config.actor_rollout_ref.actor
    parts = {
        f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm": actor.loss_agg_mode == "seq-mean-token-sum-norm",
        "algorithm.norm_adv_by_std_in_grpo=False": not config.algorithm.norm_adv_by_std_in_grpo,
        f"{_ACTOR}.use_kl_loss=False": not actor.use_kl_loss,
    }
    missing = [key for key, there in parts.items() if not there]
    started = actor.loss_agg_mode == "seq-mean-token-sum-norm" or not config.algorithm.norm_adv_by_std_in_grpo
    if config.algorithm.adv_estimator == "grpo" and started and missing:
        rest = " and ".join(missing)
        yield f"This is a part of DrGRPO; the whole of it also has {rest} (`algorithm=drgrpo` sets all)."


def _estimator(checked: Checked) -> Iterator[Finding]:
    if checked.config.algorithm.adv_estimator == "gae" and "algorithm.adv_estimator" not in checked.explicit:
        yield "The estimator was not set: the default gae builds a critic; for GRPO set algorithm.adv_estimator=grpo."
    warmup, steps = checked.config.trainer.critic_warmup, checked.config.trainer.total_training_steps
    if checked.config.algorithm.adv_estimator == "gae" and steps is not None and warmup >= steps > 0:
        yield f"trainer.critic_warmup={warmup} covers all {steps} steps of the run: the actor never changes."


def _losses_and_shaping(checked: Checked) -> Iterator[Finding]:
    config, actor = checked.config, checked.config.actor_rollout_ref.actor
    name = actor.policy_loss.loss_mode
    loss, estimator = POLICY_LOSSES.get(name), ADV_ESTIMATORS.get(config.algorithm.adv_estimator)
    if name in PER_RESPONSE_LOSSES and actor.loss_agg_mode != PER_RESPONSE:
        yield (
            f"{name} is usually averaged over each response first ({_ACTOR}.loss_agg_mode={PER_RESPONSE}); "
            f"here it is {actor.loss_agg_mode}."
        )
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    if loss is not None and loss.clips_ratio and low > 1:
        key = f"{_ACTOR}.clip_ratio" if actor.clip_ratio_low is None else f"{_ACTOR}.clip_ratio_low"
        what = f"`{key}={low:g}` would let the ratio fall to {1 - low:g}; a ratio of probabilities is never below 0."
        yield checked.problem(what, f"set {_ACTOR}.clip_ratio_low to at most 1, which never clips; 0.2 is usual", key)
    if estimator is not None and estimator.reads_reward_parts and config.algorithm.use_kl_in_reward:
        what = f"{estimator.name} learns from the parts of the reward, so KL in the reward would be lost."
        do = f"set algorithm.use_kl_in_reward=False, and {_ACTOR}.use_kl_loss=True for KL in the loss"
        yield checked.problem(what, do, "algorithm.use_kl_in_reward", "algorithm.adv_estimator")
    buffer, limit = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and buffer.len is not None and buffer.len > limit:
        what = f"reward.overlong_buffer.len={buffer.len} is more than data.max_response_length={limit}."
        yield checked.problem(what, f"set it to at most {limit}", "reward.overlong_buffer.len")
    if config.algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 1:
        what = "algorithm.filter_groups looks for groups whose responses differ, but there is one response per prompt."
        do = "set actor_rollout_ref.rollout.n to 2 or more, or algorithm.filter_groups.enable=False"
        yield checked.problem(what, do, "algorithm.filter_groups.enable", "actor_rollout_ref.rollout.n")


def _sampling(checked: Checked) -> Iterator[Finding]:
    """Filters and penalties make what is sampled from another policy; a correction needs two policies."""
    section, rollout = checked.config.algorithm.rollout_correction, checked.config.actor_rollout_ref.rollout
    plain = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    there = [f"{name}={rollout[name]:g}" for name, value in plain.items() if rollout[name] != value]
    named = [name for name in ("rollout_is", "rollout_rs") if section[name] is not None]
    if there and not named:
        yield (
            f"Responses are sampled with {', '.join(there)}, but trained as if from the whole policy: log-probs are "
            "those before filters and penalties. algorithm.rollout_correction.rollout_is=token weighs by that."
        )
    if named and not there and checked.config.actor_rollout_ref.actor.old_log_probs == "rollout":
        keys = [f"algorithm.rollout_correction.{name}" for name in named]
        what = f"`{' and '.join(keys)}` compares the trainer's log-probs with the rollout's, but "
        what += f"{_ACTOR}.old_log_probs=rollout takes the rollout's for both: nothing would be corrected."
        do = f"set {_ACTOR}.old_log_probs=trainer (or auto), or leave {' and '.join(named)} at null"
        yield checked.problem(what, do, *keys, f"{_ACTOR}.old_log_probs")


def _rollout_correction(checked: Checked) -> Iterator[Finding]:
    section, key = checked.config.algorithm.rollout_correction, "algorithm.rollout_correction"
    if section.rollout_is is not None and not _is_threshold(section.rollout_is_threshold):
        what = f"`{key}.rollout_is_threshold={section.rollout_is_threshold}` is not a threshold."
        do = "give a number above 0, or a range as low_high, e.g. 0.5_5.0"
        yield checked.problem(what, do, f"{key}.rollout_is_threshold")
    if section.rollout_rs is None:
        return
    names = [name.strip() for name in section.rollout_rs.split(",")]
    for name in names:
        if name not in REJECTIONS:
            what = f"`{key}.rollout_rs`: `{name}` is not known; known: {', '.join(REJECTIONS)}."
            yield checked.problem(what, nearest_name(name, REJECTIONS), f"{key}.rollout_rs")
    given = section.rollout_rs_threshold
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [given]
    if len(names) == 1 and isinstance(given, list):
        parts = [given]
    if len(parts) != len(names) or not all(_is_threshold(part) for part in parts):
        what = f"`{key}.rollout_rs={section.rollout_rs}` needs one threshold per name, but there is {given}."
        do = f"set {key}.rollout_rs_threshold, e.g. 0.5_2.0 for k1 or 0.01 for seq_mean_k3"
        yield checked.problem(what, do, f"{key}.rollout_rs_threshold", f"{key}.rollout_rs")


def _is_threshold(value: Any) -> bool:
    """A number above 0, or a pair low < high as text or list."""
    parts = value.split("_") if isinstance(value, str) else value if isinstance(value, list) else [value]
    try:
        numbers = [float(part) for part in parts if not isinstance(part, bool)]
    except (TypeError, ValueError):
        return False
    return (len(numbers) == 1 and numbers[0] > 0) or (len(numbers) == 2 and 0 <= numbers[0] < numbers[1])


ALGORITHM_CHECKS: list[Callable[[Checked], Iterator[Finding]]] = [
    _kl,
    _drgrpo,
    _estimator,
    _losses_and_shaping,
    _sampling,
    _rollout_correction,
]

"""Settings that the user set and that have no effect in this run: a table of reasons, printed as notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from posttrain.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES, critic_estimators
from posttrain.config.parallel import SHARD_SIZES, one_worker, runs_on_cpu
from posttrain.config.schema import ESTIMATOR_KIND, LOSS_KIND, leaves, lookup

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


class Effect(NamedTuple):
    """Keys (or prefixes that end in a dot) that do nothing where the reason is true.

    A reason of the form `KEY is VALUE`, `KEY is not VALUE` or `KEY is not set` is its own condition.
    """

    keys: tuple[str, ...]
    reason: str
    condition: Callable[[Any], bool] | None = None

    def is_idle(self, config: Any) -> bool:
        if self.condition is not None:
            return self.condition(config)
        key, _, said = self.reason.partition(",")[0].partition(" is ")
        value, is_not, said = lookup(config, key), said.startswith("not "), said.removeprefix("not ")
        if said == "set":
            return (value is None) == is_not
        return (value == _VALUES.get(said, said)) != is_not


_VALUES: dict[str, Any] = {"False": False, "null": None, "0": 0}

WITHOUT_RAY = Effect(
    ("trainer.ray_init", "trainer.stopped_worker_timeout_s"), "the run has one worker, which needs no Ray", one_worker
)
DETERMINISTIC_ON_CPU = Effect(("trainer.deterministic",), "runs on the CPU are deterministic anyway", runs_on_cpu)


def without_validation(*keys: str) -> Effect:
    return Effect(keys, "there is no validation file (data.val_files)", lambda c: c.data.val_files is None)


# Setting of `algorithm` that several estimators read -> what they do with it.
SHARED_BY_ESTIMATORS = {
    "gamma": ("discounts", "discount", ""),
    "norm_adv_by_std_in_grpo": ("divides", "divide", "by the deviation of a group"),
}
# Settings of the actor that several policy losses read.
SHARED_BY_LOSSES = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def _estimator_effects(config: Any) -> Iterator[Effect]:
    """Settings that the chosen estimator does not read, by its declaration; one that declares nothing may read all."""
    chosen = ADV_ESTIMATORS.get(config.algorithm.adv_estimator)
    if chosen is None or chosen.reads is None:
        return
    if not chosen.needs_critic:
        own = [key for one in ADV_ESTIMATORS.values() if one.needs_critic for key in ESTIMATOR_KIND.own_keys(one)]
        reason = _only(critic_estimators(), "has", "have", "a critic")
        yield _idle("critic.", "trainer.critic_warmup", *own, reason=reason)
    for name, what in SHARED_BY_ESTIMATORS.items():
        readers = [one.name for one in ADV_ESTIMATORS.values() if name in (one.reads or ())]
        if name not in chosen.reads:
            yield _idle(f"algorithm.{name}", reason=_only(readers, *what))
    for one in ADV_ESTIMATORS.values():
        if one is not chosen and one.settings is not None:
            reason = f"{ESTIMATOR_KIND.key} is not {one.name}"
            if one.reads_reward_parts:
                reason = f"only the estimator {one.name} reads the parts of the reward"
            yield _idle(*ESTIMATOR_KIND.own_keys(one), reason=reason)


def _loss_effects(config: Any) -> Iterator[Effect]:
    """The same for the chosen policy loss."""
    chosen = POLICY_LOSSES.get(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    if chosen is None or chosen.reads is None:
        return
    unread = [name for name in SHARED_BY_LOSSES if name not in chosen.reads]
    if len(unread) == len(SHARED_BY_LOSSES):
        yield _idle(*(f"{_ACTOR}.{name}" for name in unread), reason="this policy loss clips nothing")
    for name in unread:
        reason = "this policy loss has no dual clip" if name == "clip_ratio_c" else "this policy loss does not read it"
        yield _idle(f"{_ACTOR}.{name}", reason=reason)
    for one in POLICY_LOSSES.values():
        if one is not chosen and one.settings is not None:
            yield _idle(*LOSS_KIND.own_keys(one), reason=f"{LOSS_KIND.key} is not {one.name}")


def _idle(*keys: str, reason: str) -> Effect:
    return Effect(keys, reason, lambda config: True)


def _only(names: list[str], does: str, do: str, what: str) -> str:
    """Which algorithms read a setting: `only the estimators gae and reinforce_plus_plus discount`."""
    *first, last = names
    text = f"the estimators {', '.join(first)} and {last} {do}" if first else f"the estimator {last} {does}"
    return f"only {text} {what}".rstrip()


_VAL = f"{_ROLLOUT}.val_kwargs"
_ADAPTERS = ("lora_alpha", "target_modules", "exclude_modules")
EFFECTS: tuple[Effect, ...] = (
    Effect(
        ("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"),
        "algorithm.filter_groups.enable is False",
    ),
    Effect(
        ("reward.overlong_buffer.len", "reward.overlong_buffer.penalty_factor"),
        "reward.overlong_buffer.enable is False",
    ),
    Effect((f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"), f"{_ACTOR}.use_kl_loss is False"),
    Effect(("algorithm.kl_ctrl.", "algorithm.kl_penalty"), "algorithm.use_kl_in_reward is False"),
    Effect(("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"), "algorithm.kl_ctrl.type is fixed"),
    Effect(
        ("algorithm.allow_both_kl",),
        "there are not two KL terms in this run",
        lambda c: not (c.algorithm.use_kl_in_reward and c.actor_rollout_ref.actor.use_kl_loss),
    ),
    Effect(
        ("actor_rollout_ref.ref.",),
        "there is no KL term, so that no reference is loaded",
        lambda c: not (c.algorithm.use_kl_in_reward or c.actor_rollout_ref.actor.use_kl_loss),
    ),
    *(
        Effect((f"{key}_threshold",), f"{key} is null")
        for key in ("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_rs")
    ),
    Effect((f"{_ACTOR}.loss_scale_factor",), f"{_ACTOR}.loss_agg_mode is not seq-mean-token-sum-norm"),
    Effect(
        (f"{_ACTOR}.clip_ratio",),
        "clip_ratio_low and clip_ratio_high are both set",
        lambda c: None not in (c.actor_rollout_ref.actor.clip_ratio_low, c.actor_rollout_ref.actor.clip_ratio_high),
    ),
    *(
        Effect((f"{role}.optim.min_lr_ratio",), f"{role}.optim.lr_scheduler_type is constant")
        for role in (_ACTOR, "critic")
    ),
    *(
        Effect(
            (f"{role}.optim.lr_warmup_steps_ratio",),
            f"{role}.optim.lr_warmup_steps is set",
            lambda c, key=f"{role}.optim.lr_warmup_steps": lookup(c, key) >= 0,
        )
        for role in (_ACTOR, "critic")
    ),
    Effect(("reward_model.",), "reward_model.enable is False"),
    Effect(
        (*(f"{_MODEL}.{name}" for name in _ADAPTERS), "trainer.export_lora"),
        f"{_MODEL}.lora_rank is 0, so that there are no adapters",
    ),
    Effect(
        tuple(f"critic.model.{name}" for name in _ADAPTERS),
        "critic.model.lora_rank is 0, so that the critic has no adapters",
    ),
    Effect(("trainer.export_lora",), "trainer.export_hf is none"),
    Effect(
        (
            f"{_ROLLOUT}.gpu_memory_utilization",
            *(f"{role}.fsdp_config.{what}_offload" for role in (_ACTOR, "critic") for what in ("param", "optimizer")),
            "actor_rollout_ref.ref.fsdp_config.",
            "reward_model.fsdp_config.",
        ),
        "the run is on the CPU",
        runs_on_cpu,
    ),
    WITHOUT_RAY,
    Effect(SHARD_SIZES, "the run has one worker, which holds the whole model", one_worker),
    # A key is mentioned once, with the first reason that holds: on a CPU these two are not reached.
    Effect((f"{_ROLLOUT}.gpu_memory_utilization",), f"{_ROLLOUT}.name is hf, which reserves no memory"),
    Effect((f"{_ROLLOUT}.gpu_memory_utilization",), f"{_ROLLOUT}.kv_cache_gb is set"),
    Effect(
        (f"{_ROLLOUT}.kv_cache_gb", f"{_ROLLOUT}.max_num_batched_tokens"),
        f"{_ROLLOUT}.name is hf, which decodes in waves",
    ),
    DETERMINISTIC_ON_CPU,
    Effect(tuple(f"{_VAL}.{name}" for name in ("temperature", "top_p", "top_k")), f"{_VAL}.do_sample is False"),
    without_validation(
        f"{_VAL}.", "data.val_batch_size", "data.val_max_samples", "trainer.test_freq", "trainer.best_metric"
    ),
    # A sampler of the user's own may read it.
    Effect(("data.curriculum_key",), "data.sampler is not curriculum", lambda c: c.data.sampler == "default"),
    Effect(("data.seed",), "data.shuffle is False"),
    Effect(
        ("data.truncation",),
        "data.filter_overlong_prompts drops prompts that are too long",
        lambda c: c.data.filter_overlong_prompts,
    ),
    Effect(("trainer.resume_from_path",), "trainer.resume_mode is not resume_path"),
    Effect(
        ("custom_reward_function.name", "custom_reward_function.reward_kwargs"),
        "custom_reward_function.path is not set",
    ),
    Effect(("tracking.samples_max_gb",), "tracking.samples_freq is 0"),
)


def idle_settings_of_ppo(config: Any, explicit: set[str]) -> Iterator[str]:
    """One sentence for each set key that does nothing in a run of the PPO family."""
    return idle_settings(config, explicit, (*_estimator_effects(config), *_loss_effects(config), *EFFECTS))


def idle_settings(config: Any, explicit: set[str], effects: Iterable[Effect]) -> Iterator[str]:
    """One sentence for each set key that does nothing; a value that is the default anyway is not mentioned."""
    mentioned: set[str] = set()
    for effect in effects:
        prefixes = tuple(key for key in effect.keys if key.endswith("."))
        hit = [key for key in sorted(explicit - mentioned) if key in effect.keys or key.startswith(prefixes)]
        hit = [key for key in hit if lookup(config, key) != leaves(type(config))[key].default]
        if hit and effect.is_idle(config):
            mentioned.update(hit)
            verb = "has" if len(hit) == 1 else "have"
            yield f"{', '.join(hit)} {verb} no effect: {effect.reason}."

"""Settings that the user set and that could have no effect in this run: a table of conditions, printed as notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from posttrain.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES, critic_estimators
from posttrain.config.devices import runs_on_cpu
from posttrain.config.optim import OptimConfig
from posttrain.config.parallel import SHARD_SIZES, one_worker
from posttrain.config.root import PPOConfig
from posttrain.config.schema import ESTIMATOR_KIND, LOSS_KIND

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


class Effect(NamedTuple):
    """Keys (or prefixes that end in a dot) that do nothing under a condition."""

    keys: tuple[str, ...]
    idle: Callable[[Any], bool]
    reason: str


_OPTIMIZERS: dict[str, Callable[[PPOConfig], OptimConfig]] = {
    _ACTOR: lambda c: c.actor_rollout_ref.actor.optim,
    "critic": lambda c: c.critic.optim,
}

SHARED_BY_ESTIMATORS = {
    "gamma": ("discounts", "discount", ""),
    "norm_adv_by_std_in_grpo": ("divides", "divide", "by the deviation of a group"),
}
"""Setting of `algorithm` that several estimators read -> what they do with it."""
SHARED_BY_LOSSES = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
"""Settings of the actor that several policy losses read."""


def _estimator_effects(config: PPOConfig) -> Iterator[Effect]:
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


def _loss_effects(config: PPOConfig) -> Iterator[Effect]:
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
    return Effect(keys, lambda config: True, reason)


def _only(names: list[str], does: str, do: str, what: str) -> str:
    """Which algorithms read a setting: `only the estimators gae and reinforce_plus_plus discount`."""
    *first, last = names
    text = f"the estimators {', '.join(first)} and {last} {do}" if first else f"the estimator {last} {does}"
    return f"only {text} {what}".rstrip()


EFFECTS: tuple[Effect, ...] = (
    Effect(
        ("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"),
        lambda c: not c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable is False",
    ),
    Effect(
        ("reward.overlong_buffer.len", "reward.overlong_buffer.penalty_factor"),
        lambda c: not c.reward.overlong_buffer.enable,
        "reward.overlong_buffer.enable is False",
    ),
    Effect(
        (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"),
        lambda c: not c.actor_rollout_ref.actor.use_kl_loss,
        f"{_ACTOR}.use_kl_loss is False",
    ),
    Effect(
        ("algorithm.kl_ctrl.", "algorithm.kl_penalty"),
        lambda c: not c.algorithm.use_kl_in_reward,
        "algorithm.use_kl_in_reward is False",
    ),
    Effect(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        lambda c: c.algorithm.use_kl_in_reward and c.algorithm.kl_ctrl.type == "fixed",
        "algorithm.kl_ctrl.type is fixed",
    ),
    Effect(
        ("algorithm.allow_both_kl",),
        lambda c: not (c.algorithm.use_kl_in_reward and c.actor_rollout_ref.actor.use_kl_loss),
        "there are not two KL terms in this run",
    ),
    Effect(
        ("actor_rollout_ref.ref.",),
        lambda c: not (c.algorithm.use_kl_in_reward or c.actor_rollout_ref.actor.use_kl_loss),
        "there is no KL term, so that no reference is loaded",
    ),
    Effect(
        ("algorithm.rollout_correction.rollout_is_threshold",),
        lambda c: c.algorithm.rollout_correction.rollout_is is None,
        "algorithm.rollout_correction.rollout_is is null",
    ),
    Effect(
        ("algorithm.rollout_correction.rollout_rs_threshold",),
        lambda c: c.algorithm.rollout_correction.rollout_rs is None,
        "algorithm.rollout_correction.rollout_rs is null",
    ),
    Effect(
        (f"{_ACTOR}.loss_scale_factor",),
        lambda c: c.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        f"{_ACTOR}.loss_agg_mode is not seq-mean-token-sum-norm",
    ),
    Effect(
        (f"{_ACTOR}.clip_ratio",),
        lambda c: None not in (c.actor_rollout_ref.actor.clip_ratio_low, c.actor_rollout_ref.actor.clip_ratio_high),
        "clip_ratio_low and clip_ratio_high are both set",
    ),
    *(
        Effect(
            (f"{role}.optim.min_lr_ratio",),
            lambda c, optim=optim: optim(c).lr_scheduler_type == "constant",
            f"{role}.optim.lr_scheduler_type is constant",
        )
        for role, optim in _OPTIMIZERS.items()
    ),
    *(
        Effect(
            (f"{role}.optim.lr_warmup_steps_ratio",),
            lambda c, optim=optim: optim(c).lr_warmup_steps >= 0,
            f"{role}.optim.lr_warmup_steps is set",
        )
        for role, optim in _OPTIMIZERS.items()
    ),
    Effect(("reward_model.",), lambda c: not c.reward_model.enable, "reward_model.enable is False"),
    Effect(
        (f"{_MODEL}.lora_alpha", f"{_MODEL}.target_modules", f"{_MODEL}.exclude_modules", "trainer.export_lora"),
        lambda c: c.actor_rollout_ref.model.lora_rank == 0,
        f"{_MODEL}.lora_rank is 0, so that there are no adapters",
    ),
    Effect(
        ("critic.model.lora_alpha", "critic.model.target_modules", "critic.model.exclude_modules"),
        lambda c: c.critic.model.lora_rank == 0,
        "critic.model.lora_rank is 0, so that the critic has no adapters",
    ),
    Effect(("trainer.export_lora",), lambda c: c.trainer.export_hf == "none", "trainer.export_hf is none"),
    Effect(
        (
            f"{_ROLLOUT}.gpu_memory_utilization",
            *(f"{role}.fsdp_config.{what}_offload" for role in (_ACTOR, "critic") for what in ("param", "optimizer")),
            "actor_rollout_ref.ref.fsdp_config.",
            "reward_model.fsdp_config.",
        ),
        runs_on_cpu,
        "the run is on the CPU",
    ),
    Effect(
        ("trainer.ray_init", "trainer.stopped_worker_timeout_s"),
        one_worker,
        "the run has one worker, which needs no Ray",
    ),
    Effect(SHARD_SIZES, one_worker, "the run has one worker, which holds the whole model"),
    Effect(
        (f"{_ROLLOUT}.gpu_memory_utilization",),
        lambda c: c.actor_rollout_ref.rollout.name == "hf" and not runs_on_cpu(c),
        f"{_ROLLOUT}.name is hf, which reserves no memory",
    ),
    Effect(
        (f"{_ROLLOUT}.gpu_memory_utilization",),
        lambda c: c.actor_rollout_ref.rollout.kv_cache_gb is not None and c.actor_rollout_ref.rollout.name != "hf",
        f"{_ROLLOUT}.kv_cache_gb is set",
    ),
    Effect(
        (f"{_ROLLOUT}.kv_cache_gb", f"{_ROLLOUT}.max_num_batched_tokens"),
        lambda c: c.actor_rollout_ref.rollout.name == "hf",
        f"{_ROLLOUT}.name is hf, which decodes in waves",
    ),
    Effect(("trainer.deterministic",), runs_on_cpu, "runs on the CPU are deterministic anyway"),
    Effect(
        (f"{_ROLLOUT}.val_kwargs.temperature", f"{_ROLLOUT}.val_kwargs.top_p", f"{_ROLLOUT}.val_kwargs.top_k"),
        lambda c: not c.actor_rollout_ref.rollout.val_kwargs.do_sample,
        f"{_ROLLOUT}.val_kwargs.do_sample is False",
    ),
    Effect(
        (
            f"{_ROLLOUT}.val_kwargs.",
            "data.val_batch_size",
            "data.val_max_samples",
            "trainer.test_freq",
            "trainer.best_metric",
        ),
        lambda c: c.data.val_files is None,
        "there is no validation file (data.val_files)",
    ),
    Effect(("data.curriculum_key",), lambda c: c.data.sampler == "default", "data.sampler is not curriculum"),
    Effect(("data.seed",), lambda c: not c.data.shuffle, "data.shuffle is False"),
    Effect(
        ("data.truncation",),
        lambda c: c.data.filter_overlong_prompts,
        "data.filter_overlong_prompts drops prompts that are too long",
    ),
    Effect(
        ("trainer.resume_from_path",),
        lambda c: c.trainer.resume_mode != "resume_path",
        "trainer.resume_mode is not resume_path",
    ),
    Effect(
        ("custom_reward_function.name", "custom_reward_function.reward_kwargs"),
        lambda c: c.custom_reward_function.path is None,
        "custom_reward_function.path is not set",
    ),
    Effect(("tracking.samples_max_gb",), lambda c: c.tracking.samples_freq == 0, "tracking.samples_freq is 0"),
)


def idle_settings_of_ppo(config: PPOConfig, explicit: set[str]) -> Iterator[str]:
    """One sentence for each set key that does nothing in a run of the PPO family."""
    return idle_settings(config, explicit, (*_estimator_effects(config), *_loss_effects(config), *EFFECTS))


def idle_settings(config: Any, explicit: set[str], effects: Iterable[Effect]) -> Iterator[str]:
    """One sentence for each set key that does nothing; a value that is the default anyway is not mentioned."""
    from posttrain.config.schema import leaves, lookup

    told: set[str] = set()
    for keys, idle, reason in effects:
        prefixes = tuple(key for key in keys if key.endswith("."))
        hit = [key for key in sorted(explicit - told) if key in keys or key.startswith(prefixes)]
        hit = [key for key in hit if lookup(config, key) != leaves(type(config))[key].default]
        if hit and idle(config):
            told.update(hit)
            verb = "has" if len(hit) == 1 else "have"
            yield f"{', '.join(hit)} {verb} no effect: {reason}."

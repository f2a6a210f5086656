"""Settings that the user set and that could have no effect in this run: a table of conditions, printed as notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from posttrain.config.choices import CRITIC_ESTIMATORS, ESTIMATORS
from posttrain.config.devices import runs_on_cpu
from posttrain.config.root import PPOConfig

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


class Effect(NamedTuple):
    """Keys (or prefixes that end in a dot) that do nothing under a condition."""

    keys: tuple[str, ...]
    idle: Callable[[PPOConfig], bool]
    reason: str


def _no_critic(config: PPOConfig) -> bool:
    name = config.algorithm.adv_estimator
    return name in ESTIMATORS and name not in CRITIC_ESTIMATORS


def _is_constant(config: PPOConfig) -> bool:
    return config.actor_rollout_ref.actor.optim.lr_scheduler_type == "constant"


EFFECTS: tuple[Effect, ...] = (
    Effect(
        ("critic.", "trainer.critic_warmup", "algorithm.gamma", "algorithm.lam"),
        _no_critic,
        "only the estimator gae has a critic, a discount and lambda",
    ),
    Effect(
        ("algorithm.norm_adv_by_std_in_grpo",),
        lambda c: c.algorithm.adv_estimator == "gae",
        "only the estimator grpo compares a group",
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
        (f"{_ACTOR}.loss_scale_factor",),
        lambda c: c.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        f"{_ACTOR}.loss_agg_mode is not seq-mean-token-sum-norm",
    ),
    Effect(
        (f"{_ACTOR}.clip_ratio",),
        lambda c: None not in (c.actor_rollout_ref.actor.clip_ratio_low, c.actor_rollout_ref.actor.clip_ratio_high),
        "clip_ratio_low and clip_ratio_high are both set",
    ),
    Effect((f"{_ACTOR}.optim.min_lr_ratio",), _is_constant, f"{_ACTOR}.optim.lr_scheduler_type is constant"),
    Effect(
        (f"{_ACTOR}.optim.lr_warmup_steps_ratio",),
        lambda c: c.actor_rollout_ref.actor.optim.lr_warmup_steps >= 0,
        f"{_ACTOR}.optim.lr_warmup_steps is set",
    ),
    Effect(
        (f"{_MODEL}.lora_alpha", f"{_MODEL}.target_modules"),
        lambda c: c.actor_rollout_ref.model.lora_rank == 0,
        f"{_MODEL}.lora_rank is 0, so that there are no adapters",
    ),
    Effect(
        (
            f"{_ROLLOUT}.gpu_memory_utilization",
            f"{_ACTOR}.fsdp_config.",
            "critic.fsdp_config.",
            "actor_rollout_ref.ref.fsdp_config.",
        ),
        runs_on_cpu,
        "the run is on the CPU",
    ),
    Effect(
        (f"{_ROLLOUT}.gpu_memory_utilization",),
        lambda c: c.actor_rollout_ref.rollout.name == "hf" and not runs_on_cpu(c),
        f"{_ROLLOUT}.name is hf, which reserves no memory",
    ),
    Effect(
        (f"{_ROLLOUT}.gpu_memory_utilization",),
        lambda c: c.actor_rollout_ref.rollout.kv_cache_gb is not None and c.actor_rollout_ref.rollout.name == "native",
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


def idle_settings(config: PPOConfig, explicit: set[str]) -> Iterator[str]:
    """One sentence for each set key that does nothing; a value that is the default anyway is not mentioned."""
    from posttrain.config.schema import leaves, lookup

    told: set[str] = set()
    for keys, idle, reason in EFFECTS:
        prefixes = tuple(key for key in keys if key.endswith("."))
        hit = [key for key in sorted(explicit - told) if key in keys or key.startswith(prefixes)]
        hit = [key for key in hit if lookup(config, key) != leaves()[key].default]
        if hit and idle(config):
            told.update(hit)
            verb = "has" if len(hit) == 1 else "have"
            yield f"{', '.join(hit)} {verb} no effect: {reason}."

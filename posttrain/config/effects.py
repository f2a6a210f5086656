"""Settings that the user set and that could have no effect in this run: a table of conditions, printed as notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from posttrain.config.choices import CRITIC_ESTIMATORS, ESTIMATORS, POLICY_LOSSES
from posttrain.config.devices import runs_on_cpu
from posttrain.config.optim import OptimConfig
from posttrain.config.parallel import SHARD_SIZES, one_worker
from posttrain.config.root import PPOConfig

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


class Effect(NamedTuple):
    """Keys (or prefixes that end in a dot) that do nothing under a condition."""

    keys: tuple[str, ...]
    idle: Callable[[Any], bool]
    reason: str


def _no_critic(config: PPOConfig) -> bool:
    name = config.algorithm.adv_estimator
    return name in ESTIMATORS and name not in CRITIC_ESTIMATORS


_OPTIMIZERS: dict[str, Callable[[PPOConfig], OptimConfig]] = {
    _ACTOR: lambda c: c.actor_rollout_ref.actor.optim,
    "critic": lambda c: c.critic.optim,
}

EFFECTS: tuple[Effect, ...] = (
    Effect(("critic.", "trainer.critic_warmup", "algorithm.lam"), _no_critic, "only the estimator gae has a critic"),
    Effect(
        ("algorithm.gamma",),
        lambda c: _no_critic(c) and c.algorithm.adv_estimator != "reinforce_plus_plus",
        "only the estimators gae and reinforce_plus_plus discount",
    ),
    Effect(
        ("algorithm.norm_adv_by_std_in_grpo",),
        lambda c: c.algorithm.adv_estimator in set(ESTIMATORS) - {"grpo", "grpo_passk", "gdpo"},
        "only the estimators grpo, grpo_passk and gdpo divide by the deviation of a group",
    ),
    Effect(
        ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
        lambda c: c.algorithm.adv_estimator in set(ESTIMATORS) - {"gdpo"},
        "only the estimator gdpo reads the parts of the reward",
    ),
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
        (f"{_ACTOR}.clip_ratio", f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high", f"{_ACTOR}.clip_ratio_c"),
        lambda c: c.actor_rollout_ref.actor.policy_loss.loss_mode in ("sapo", "gpg", "kl_cov", "dro"),
        "this policy loss clips nothing",
    ),
    Effect(
        (f"{_ACTOR}.clip_ratio_c",),
        lambda c: c.actor_rollout_ref.actor.policy_loss.loss_mode in ("gspo", "cispo", "clip_cov", "geo_mean"),
        "this policy loss has no dual clip",
    ),
    *(
        Effect(
            tuple(f"{_ACTOR}.policy_loss.{name}" for name in names),
            lambda c, loss=loss: c.actor_rollout_ref.actor.policy_loss.loss_mode in set(POLICY_LOSSES) - {loss},
            f"{_ACTOR}.policy_loss.loss_mode is not {loss}",
        )
        for loss, names in {
            "sapo": ("tau_pos", "tau_neg"),
            "clip_cov": ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
            "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
            "dro": ("dro_beta",),
        }.items()
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


def idle_settings(config: Any, explicit: set[str], effects: Iterable[Effect] = EFFECTS) -> Iterator[str]:
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

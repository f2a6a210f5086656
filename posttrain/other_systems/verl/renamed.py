"""Keys of verl that are settings here under another name, and its main files beside `ppo_trainer`."""

from __future__ import annotations

from pathlib import Path

from posttrain.config.commandline import CommandLine
from posttrain.config.trees import ADAPTER

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
# Under `optim.` of actor and critic -> key of that role.
_OPTIM = {
    "clip_grad": "grad_clip",
    "warmup_style": "optim.lr_scheduler_type",
    "lr_decay_style": "optim.lr_scheduler_type",
    "lr_scheduler_name": "optim.lr_scheduler_type",
    "lr_scheduler.name": "optim.lr_scheduler_type",
    "lr_scheduler_num_warmup_steps": "optim.lr_warmup_steps",
    "lr_scheduler.num_warmup_steps": "optim.lr_warmup_steps",
}

# Prefix -> prefix, as `MOVED_SECTIONS`.
MOVED: dict[str, str] = {
    "ray_kwargs.ray_init.": "trainer.ray_init.",
    "ray_init.": "trainer.ray_init.",
    "reward.custom_reward_function.": "custom_reward_function.",
    "critic.fsdp.": "critic.fsdp_config.",
    f"{_MODEL}.override_config.model_config.": f"{_MODEL}.override_config.",
}

# Settings of the engine that verl also takes among those of the model.
MEGATRON_OVERRIDES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "context_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
)

RENAMED: dict[str, str] = {
    **{
        f"{_ACTOR}.megatron_config.{name}_model_parallel_size": f"{_ACTOR}.megatron_config.{name}_parallel_size"
        for name in ("tensor", "pipeline", "virtual_pipeline", "expert")
    },
    **{
        f"{_ACTOR}.megatron_config.override_transformer_config.{name}": f"{_ACTOR}.megatron_config.{name}"
        for name in MEGATRON_OVERRIDES
    },
    **{f"{role}.optim.{old}": f"{role}.{new}" for role in (_ACTOR, "critic") for old, new in _OPTIM.items()},
    f"{_ACTOR}.fsdp_config.strategy": f"{_ACTOR}.strategy",
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": f"{_ROLLOUT}.update_weights_bucket_megabytes",
    **{f"{role}.rollout_n": f"{_ROLLOUT}.n" for role in (_ACTOR, "actor_rollout_ref.ref", "critic")},
    **{f"critic.model.lora.{name.removeprefix('lora_')}": f"critic.model.{name}" for name in ADAPTER},
    **{f"{_ACTOR}.clip_cov_{name}": f"{_ACTOR}.policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub")},
    **{
        f"{_ACTOR}.policy_loss.cppo.cppo_{name}": f"{_ACTOR}.policy_loss.cppo_{name}"
        for name in ("w_min", "delta_b", "delta_b_q", "delta_b_k", "delta_b_max_mult")
    },
    f"{_ACTOR}.loss_mode": f"{_ACTOR}.policy_loss.loss_mode",
    f"{_ACTOR}.use_remove_padding": f"{_MODEL}.use_remove_padding",
    f"{_ROLLOUT}.enforce_eager": f"{_ROLLOUT}.engine_kwargs.vllm.enforce_eager",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    f"{_MODEL}.torch_dtype": f"{_MODEL}.dtype",
    "critic.model.trust_remote_code": f"{_MODEL}.trust_remote_code",
    "critic.model.external_lib": f"{_MODEL}.external_lib",
    "data.trust_remote_code": f"{_MODEL}.trust_remote_code",
    "data.tokenizer": f"{_MODEL}.tokenizer_path",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.param_offload": "reward_model.fsdp_config.param_offload",
    "reward_model.model.external_lib": f"{_MODEL}.external_lib",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    **dict.fromkeys(("ray_kwargs.ray_init", "ray_init"), "trainer.ray_init"),
    "trainer.ray_wait_register_center_timeout": "trainer.placement_timeout_s",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "global_profiler.steps": "trainer.profile_steps",
    f"{_ACTOR}.checkpoint.async_save": "trainer.async_save",
    "critic.checkpoint.async_save": "trainer.async_save",
}

SUPERVISED_RENAMED: dict[str, str] = {
    "engine.strategy": "fsdp.strategy",
    "engine.use_remove_padding": "model.use_remove_padding",
    "optim.lr_decay_style": "optim.lr_scheduler_type",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "data.trust_remote_code": "model.trust_remote_code",
    "global_profiler.steps": "trainer.profile_steps",
}


# Name in verl -> (main file here, settings that verl's file has).
MAINS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo_megatron_trainer": ("ppo_trainer", ("actor_rollout_ref.actor.strategy=megatron",)),
    "fully_async_ppo_megatron_trainer": ("ppo_trainer", ("actor_rollout_ref.actor.strategy=megatron",)),
    "fully_async_ppo_trainer": ("ppo_trainer", ()),
    "sft_trainer_engine": ("sft_trainer", ()),
}


def as_ours(line: CommandLine, cwd: Path) -> list[tuple[str, str]]:
    """Let the command line name our file; gives (setting, source) for what verl's file would set.

    A file of that name in the folders that the user gives is the user's own."""
    name = (line.config_name or "").removesuffix(".yaml")
    given = [folder for folder in (line.config_path, line.config_dir) if folder]
    if name not in MAINS or any((cwd / folder / f"{name}.yaml").is_file() for folder in [".", *given]):
        return []
    line.config_name, settings = MAINS[name]
    return [(setting, f"verl's {name}") for setting in settings]

"""The tree of a PPO-family run, `ppo_trainer`, and every other spelling of its settings."""

from __future__ import annotations

from typing import Any

from posttrain.config.check import check
from posttrain.config.checked import Tree
from posttrain.config.commandline import no_arguments
from posttrain.config.derived import derive
from posttrain.config.merge import FreeDict, Spellings
from posttrain.config.names import check_names
from posttrain.config.parallel import AS_THE_ACTOR, OF_THE_COMMAND, ROLLOUT_EACH, ROLLOUT_MACHINES, TOGETHER
from posttrain.config.root import PPOConfig
from posttrain.config.schema import Section
from posttrain.config.supervised import RewardTrainerConfig, SFTConfig

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

MOVED_SECTIONS: dict[str, str] = {
    **{f"{place}.tool_config.": f"{_ROLLOUT}.multi_turn.tool_config." for place in ("rollout", _ROLLOUT)},
    **{f"{place}.megatron.": f"{_ACTOR}.megatron_config." for place in ("actor", _ACTOR)},
    "actor_rollout.ref.": "actor_rollout_ref.",
    "actor.": f"{_ACTOR}.",
    "rollout.": f"{_ROLLOUT}.",
    "ref.": "actor_rollout_ref.ref.",
    "model.": f"{_MODEL}.",
    "critic.model.fsdp_config.": "critic.fsdp_config.",
    "reward_model.model.fsdp_config.": "reward_model.fsdp_config.",
    "reward_model.overlong_buffer.": "reward.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "reward.overlong_buffer.",
    "reward.reward_kwargs.overlong_buffer_cfg.": "reward.overlong_buffer.",
}


FREE_DICTS: dict[str, FreeDict] = {
    f"{_ROLLOUT}.multi_turn": FreeDict(switch="enable"),
    **{f"{_ROLLOUT}.{name}": FreeDict() for name in ("engine_kwargs", "engine_kwargs.vllm", "engine_kwargs.sglang")},
    f"{_ROLLOUT}.agent": FreeDict(named_by="path"),
    "data.custom_cls": FreeDict(named_by="path"),
}

RENAMED: dict[str, str] = {
    "algorithm.name": "algorithm.adv_estimator",
    "algorithm.group_size": f"{_ROLLOUT}.n",
    "algorithm.clip_range": f"{_ACTOR}.clip_ratio",
    "algorithm.clip_ratio": f"{_ACTOR}.clip_ratio",
    f"{_ACTOR}.clip_range": f"{_ACTOR}.clip_ratio",
    "algorithm.entropy_coef": f"{_ACTOR}.entropy_coeff",
    "algorithm.entropy_coeff": f"{_ACTOR}.entropy_coeff",
    f"{_ACTOR}.entropy_coef": f"{_ACTOR}.entropy_coeff",
    f"{_ACTOR}.model_name": f"{_MODEL}.path",
    f"{_ACTOR}.learning_rate": f"{_ACTOR}.optim.lr",
    f"{_ACTOR}.weight_decay": f"{_ACTOR}.optim.weight_decay",
    f"{_ACTOR}.warmup_ratio": f"{_ACTOR}.optim.lr_warmup_steps_ratio",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_ACTOR}.max_grad_norm": f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.policy_loss_fn": f"{_ACTOR}.policy_loss.loss_mode",
    f"{_ACTOR}.tau_pos": f"{_ACTOR}.policy_loss.tau_pos",
    f"{_ACTOR}.tau_neg": f"{_ACTOR}.policy_loss.tau_neg",
    f"{_ACTOR}.peft_config.lora_r": f"{_MODEL}.lora_rank",
    f"{_ACTOR}.peft_config.lora_rank": f"{_MODEL}.lora_rank",
    f"{_ACTOR}.peft_config.lora_alpha": f"{_MODEL}.lora_alpha",
    f"{_ACTOR}.peft_config.target_modules": f"{_MODEL}.target_modules",
    f"{_ACTOR}.peft_config.exclude_modules": f"{_MODEL}.exclude_modules",
    f"{_MODEL}.lora.type": f"{_ACTOR}.peft_config.peft_type",
    f"{_MODEL}.lora.rank": f"{_MODEL}.lora_rank",
    f"{_MODEL}.lora.alpha": f"{_MODEL}.lora_alpha",
    f"{_MODEL}.lora.target_modules": f"{_MODEL}.target_modules",
    f"{_MODEL}.lora.exclude_modules": f"{_MODEL}.exclude_modules",
    f"{_MODEL}.lora.adapter_path": f"{_MODEL}.lora_adapter_path",
    f"{_ROLLOUT}.engine": f"{_ROLLOUT}.name",
    f"{_ROLLOUT}.max_new_tokens": "data.max_response_length",
    f"{_ROLLOUT}.max_turns": f"{_ROLLOUT}.multi_turn.max_assistant_turns",
    f"{_ROLLOUT}.tools": f"{_ROLLOUT}.multi_turn.tools",
    **dict.fromkeys(("environment", f"{_ROLLOUT}.environment"), f"{_ROLLOUT}.agent.path"),
    "tools": f"{_ROLLOUT}.multi_turn.tools",
    f"{_ROLLOUT}.tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "critic.learning_rate": "critic.optim.lr",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
    "reward.reward_fn": "custom_reward_function.path",
    "trainer.reward_fn.path": "custom_reward_function.path",
    "trainer.reward_fn.name": "custom_reward_function.name",
    "data.train_path": "data.train_files",
    "data.val_path": "data.val_files",
    **{f"data.{name}": f"{_ROLLOUT}.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path")},
    f"{_ROLLOUT}.multi_turn.interaction_config_path": f"{_ROLLOUT}.agent.interaction_config_path",
    "trainer.save_steps": "trainer.save_freq",
    "trainer.n_workers": "trainer.n_gpus_per_node",
    "trainer.micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "trainer.gradient_accumulation_steps": "trainer.gradient_accumulation",
}

# Keys that set or check other settings, with their type; `derived.py` says how.
DERIVED: dict[str, Any] = {
    **OF_THE_COMMAND,
    TOGETHER: bool,
    ROLLOUT_MACHINES: int,
    ROLLOUT_EACH: int,
    "algorithm.kl_coef": float,
    "trainer.gradient_accumulation": int,
    "reward.type": str,
    "trainer.reward_fn.type": str,
    f"{_ACTOR}.peft_config.peft_type": str,
    f"{_ROLLOUT}.enable_lora": bool,
    **dict.fromkeys(AS_THE_ACTOR, int),
}

_SFT = "these are settings of supervised training (`posttrain sft`)"
NOT_BUILT: dict[str, str] = {
    "training.learning_rate": f"{_SFT}; here the learning rate is {_ACTOR}.optim.lr",
    "training.num_train_epochs": f"{_SFT}; here the number of epochs is trainer.total_epochs",
    "training.": _SFT,
    "fsdp.": f"{_SFT}; here the engine is {_ACTOR}.strategy",
}


# Settings -> (their program, the command that lists them).
PROGRAMS: dict[type[Section], tuple[str, str]] = {
    PPOConfig: ("`posttrain.trainer.main_ppo` (RL)", "posttrain config"),
    SFTConfig: ("`posttrain sft`", "posttrain config sft"),
    RewardTrainerConfig: ("`posttrain reward-model`", "posttrain config reward-model"),
}


PPO = Tree(
    main="ppo_trainer",
    root=PPOConfig,
    model="actor_rollout_ref.model",
    spellings=Spellings(PPOConfig, "ppo_trainer", MOVED_SECTIONS, RENAMED, DERIVED, NOT_BUILT, FREE_DICTS, PROGRAMS),
    nothing_given=no_arguments,
    derive=derive,
    check_names=check_names,
    check=check,
)

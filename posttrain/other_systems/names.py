"""What names of TRL, OpenRLHF, Unsloth and transformers are called here, for the error about an unknown key.

Nothing is translated: their numbers count other things (`per_device_train_batch_size` counts responses of one device,
`data.train_batch_size` prompts of all), and a run that silently read them otherwise would be worse than an error.
"""

from __future__ import annotations

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
TRL, OPENRLHF, UNSLOTH, TRANSFORMERS, PEFT = "TRL", "OpenRLHF", "Unsloth", "transformers", "peft"
_BATCH = "`data.train_batch_size` counts the prompts of a step"

# Name there -> (whose it is, what it is here).
COUNTERPARTS: dict[str, tuple[str, str]] = {
    "num_generations": (TRL, f"`{_ROLLOUT}.n`"),
    "per_device_train_batch_size": (TRL, _BATCH),
    "gradient_accumulation_steps": (TRL, _BATCH),
    "generation_batch_size": (TRL, _BATCH),
    "steps_per_generation": (TRL, f"`{_ACTOR}.ppo_mini_batch_size`, the prompts of an optimizer step"),
    "num_iterations": (TRL, f"`{_ACTOR}.ppo_epochs`"),
    "learning_rate": (TRL, f"`{_ACTOR}.optim.lr`"),
    "warmup_ratio": (TRL, f"`{_ACTOR}.optim.lr_warmup_steps_ratio`"),
    "warmup_steps": (TRL, f"`{_ACTOR}.optim.lr_warmup_steps`"),
    "max_grad_norm": (TRL, f"`{_ACTOR}.grad_clip`"),
    "max_completion_length": (TRL, "`data.max_response_length`"),
    "beta": (TRL, f"`{_ACTOR}.use_kl_loss=True {_ACTOR}.kl_loss_coef=...`"),
    "epsilon": (TRL, f"`{_ACTOR}.clip_ratio_low`"),
    "epsilon_high": (TRL, f"`{_ACTOR}.clip_ratio_high`"),
    "loss_type": (TRL, f"`{_ACTOR}.loss_agg_mode`"),
    "scale_rewards": (TRL, "`algorithm.norm_adv_by_std_in_grpo`"),
    "num_train_epochs": (TRL, "`trainer.total_epochs`"),
    "max_steps": (TRL, "`trainer.total_training_steps`"),
    "eval_steps": (TRL, "`trainer.test_freq`"),
    "save_steps": (TRL, "`trainer.save_freq`"),
    "save_total_limit": (TRL, "`trainer.max_ckpt_to_keep`"),
    "output_dir": (TRL, "`trainer.default_local_dir`"),
    "report_to": (TRL, "`trainer.logger`"),
    "model_name_or_path": (TRL, f"`{_MODEL}.path`"),
    "gradient_checkpointing": (TRL, f"`{_MODEL}.enable_gradient_checkpointing`"),
    "bf16": (TRL, f"`{_MODEL}.dtype=bfloat16`"),
    "reward_funcs": (TRL, "`custom_reward_function.path`, or `reward.functions` for several"),
    "use_vllm": (TRL, f"`{_ROLLOUT}.name=vllm`, where vLLM is installed"),
    "load_in_4bit": (UNSLOTH, f"`{_MODEL}.quantization=nf4`, with adapters: `{_MODEL}.lora_rank=16`"),
    "load_in_8bit": (
        TRANSFORMERS,
        f"not built; weights of 4 bits are: `{_MODEL}.quantization=nf4 {_MODEL}.lora_rank=16`",
    ),
    "max_seq_length": (UNSLOTH, "`data.max_prompt_length` and `data.max_response_length`"),
    "max_new_tokens": (TRANSFORMERS, "`data.max_response_length`"),
    "target_parameters": (PEFT, f"`{_MODEL}.target_modules=[all-linear,experts]`, or names of tensors there"),
    "pretrain": (OPENRLHF, f"`{_MODEL}.path`"),
    "reward_pretrain": (OPENRLHF, "`reward_model.enable=True reward_model.model.path=...`"),
    "prompt_data": (OPENRLHF, "`data.train_files`"),
    "input_key": (OPENRLHF, "`data.prompt_key`"),
    "n_samples_per_prompt": (OPENRLHF, f"`{_ROLLOUT}.n`"),
    "rollout_batch_size": (OPENRLHF, "`data.train_batch_size`"),
    "advantage_estimator": (OPENRLHF, "`algorithm.adv_estimator` (its `group_norm` is `grpo`)"),
    "init_kl_coef": (OPENRLHF, "`algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=...`"),
    "eps_clip": (OPENRLHF, f"`{_ACTOR}.clip_ratio`"),
    "actor_learning_rate": (OPENRLHF, f"`{_ACTOR}.optim.lr`"),
    "critic_learning_rate": (OPENRLHF, "`critic.optim.lr`"),
    "prompt_max_len": (OPENRLHF, "`data.max_prompt_length`"),
    "generate_max_len": (OPENRLHF, "`data.max_response_length`"),
    "num_episodes": (OPENRLHF, "`trainer.total_epochs`"),
    "max_epochs": (OPENRLHF, f"`{_ACTOR}.ppo_epochs`"),
    "save_path": (OPENRLHF, "`trainer.default_local_dir`"),
    "remote_rm_url": (OPENRLHF, "`custom_reward_function.path=http://...`, or a Python file"),
    "zero_stage": (OPENRLHF, "not needed: FSDP2 cuts the model over the workers"),
    "colocate_all_models": (
        OPENRLHF,
        f"not needed: all roles share the workers; with {_ROLLOUT}.n_workers others generate",
    ),
}


# Of these, the ones that `posttrain sft` and `reward-model` have too, under keys of their own.
_ALSO_SUPERVISED = (
    *("model_name_or_path", "learning_rate", "num_train_epochs", "max_steps", "output_dir", "report_to"),
    *("gradient_checkpointing", "bf16", "load_in_4bit", "load_in_8bit", "target_parameters"),
)
_ROWS = "`data.train_batch_size`, the rows of an optimizer step"
# Options that trainers of other systems have, and train.sh -> what they are in `posttrain sft` and `reward-model`.
SUPERVISED: dict[str, str] = {
    name: COUNTERPARTS[name][1].replace(f"{_MODEL}.", "model.").replace(f"{_ACTOR}.optim.", "optim.")
    for name in _ALSO_SUPERVISED
}
SUPERVISED |= dict.fromkeys(("model", "model_name"), "`model.path`")
SUPERVISED |= dict.fromkeys(("train_files", "dataset", "dataset_name", "data"), "`data.train_files`")
SUPERVISED |= dict.fromkeys(("batch_size", "train_batch_size"), _ROWS)
SUPERVISED |= dict.fromkeys(("max_length", "max_seq_length"), "`data.max_length`")
SUPERVISED |= dict.fromkeys(("lora_rank", "lora_r"), "`model.lora_rank`")
SUPERVISED |= {
    "val_files": "`data.val_files`",
    "lr": "`optim.lr`",
    "epochs": "`trainer.total_epochs`",
    "lora_alpha": "`model.lora_alpha`",
    "seed": "`trainer.seed`",
}
# Names that are none here in any section, so that the section before them may be anything.
_IN_SECTIONS = ("load_in_4bit", "load_in_8bit", "max_seq_length", "max_new_tokens", "target_parameters")


def counterpart(name: str, *, supervised: bool = False) -> str | None:
    """A sentence on a name of another system, dashes or underscores; None for other names."""
    word = name.lstrip("-").replace("-", "_")
    last = word.rpartition(".")[2]
    word = last if last in _IN_SECTIONS else word
    if supervised:
        return f"`{name}` is here: {SUPERVISED[word]}" if word in SUPERVISED else None
    found = COUNTERPARTS.get(word)
    if found is None:
        return None
    system, here = found
    of = f"{system}'" if system.endswith("s") else f"{system}'s"
    return f"{of} `{name}` is here: {here}"

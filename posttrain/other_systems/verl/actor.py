"""verl's keys of actor, critic and reference: batching, optimizer, sharding, precision, checkpoints."""

from __future__ import annotations

from posttrain.other_systems.verl.rule import CHUNKED, Rule, not_needed, not_supported, translated

_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_TRAINED = f"{{{_ACTOR},critic}}"
_ANY = f"{{{_ACTOR},{_REF},critic,reward_model}}"
_BUDGET = f"{_ACTOR}.ppo_max_token_len_per_gpu"
_MODEL = "actor_rollout_ref.model"
_FLOAT32 = ("fp32", "float32")
_SPAN = "the schedule spans all updates of the run"
_EVERYTHING = ("['model', 'optimizer', 'extra']", "[model,optimizer,extra]", '["model","optimizer","extra"]')
_FUSED = "fused kernels are used wherever they give the same result"

BATCHING: tuple[Rule, ...] = (
    translated(
        f"{_TRAINED}.use_dynamic_bsz",
        "dynamic",
        "passes are filled up to `ppo_max_token_len_per_gpu` anyway: true sets `ppo_micro_batch_size_per_gpu` to null, "
        "false leaves it as a further bound",
    ),
    translated(
        "reward_model.use_dynamic_bsz",
        "dynamic",
        "passes are filled up to `reward_model.forward_max_token_len_per_gpu` anyway: true sets "
        "`reward_model.micro_batch_size_per_gpu` to null, false leaves it as a further bound",
    ),
    translated(
        f"{_TRAINED}.ppo_micro_batch_size",
        "share",
        "`ppo_micro_batch_size_per_gpu`: verl's value is the total over all workers, so it is divided by their number",
    ),
    not_needed(
        "actor_rollout_ref.{rollout,ref}.log_prob_{micro_batch_size,micro_batch_size_per_gpu,use_dynamic_bsz,"
        "max_token_len_per_gpu}",
        f"passes for log-probs are packed up to {_BUDGET}, as those of the update; results do not depend on it",
    ),
    not_needed("actor_rollout_ref.rollout.use_dynamic_bsz", "passes are always filled by tokens"),
    not_needed(
        "critic.forward_{micro_batch_size,micro_batch_size_per_gpu,max_token_len_per_gpu}",
        "passes for values are packed up to critic.ppo_max_token_len_per_gpu; results do not depend on it",
    ),
    not_needed(
        "trainer.{balance_batch,balance_keep_minibatch}", "rows are always spread over the workers by their tokens"
    ),
    not_needed(f"{_ANY}.{{pad_to_length,pad_to_length_bucket}}", "rows are packed without padding"),
    not_needed(f"{_ANY}.fsdp_config.{{pad_to_length,pad_to_length_bucket}}", "rows are packed without padding"),
    not_needed(
        f"{{{_ACTOR}.use_prefix_grouper,{_MODEL}.use_prefix_tree,{_MODEL}.prefix_tree_attention}}",
        "a prompt is computed once for all its responses where the engine can; results do not depend on it",
    ),
    not_supported(
        f"{_ACTOR}.policy_loss.cppo.cppo_w_len_mode",
        "a token's weight depends on the length of its own response",
        "set it to sequence",
        off=("sequence",),
    ),
    not_supported(
        f"{_MODEL}.modules_to_save", "with adapters, the base model is frozen as a whole", "remove it", off=()
    ),
)

COMPUTING: tuple[Rule, ...] = (
    not_needed(f"{_ANY}.{{use_torch_compile,use_fused_kernels}}", _FUSED),
    not_needed(f"{_ANY}.fsdp_config.use_torch_compile", _FUSED),
    not_needed(
        f"{_ANY}.{{entropy_checkpointing,entropy_from_logits_with_chunking,entropy_from_logits_chunk_size}}",
        CHUNKED,
    ),
    not_needed(
        f"{_ANY}.fsdp_config."
        "{entropy_checkpointing,entropy_from_logits_with_chunking,entropy_from_logits_chunk_size}",
        CHUNKED,
    ),
    not_needed(f"{_ACTOR}.calculate_entropy", "the policy's entropy is measured in every update"),
    not_needed(
        f"{_ACTOR}.calculate_sum_pi_squared", "it is computed where the estimator (optimal_token_baseline) needs it"
    ),
    not_supported(f"{_ANY}.load_weight", "every role needs its weights", "remove it", off=("true",)),
    not_supported(
        f"{_TRAINED}.data_loader_seed",
        "one seed decides the order of rows",
        "set trainer.seed (or data.seed)",
        off=("42", "1"),
    ),
    not_supported("critic.loss_scale_factor", "the critic's loss has no constant of its own", "remove it"),
    translated("critic.enable", "critic", "checked: the estimator gae has a critic, the others have none"),
)


def optimizer_rules(optim: str) -> tuple[Rule, ...]:
    """Rules for the optimizer whose section this is."""
    return (
        not_supported(f"{optim}.optimizer", "the optimizer is AdamW", "remove it", off=("adamw", "adam")),
        not_supported(f"{optim}.optimizer_impl", "the optimizer is torch's AdamW", "remove it", off=("torch.optim",)),
        not_needed(f"{optim}.muon_*", "settings of the optimizer Muon; the optimizer is AdamW"),
        *_schedule_rules(optim),
        not_supported(f"{optim}.weight_decay_incr_style", "weight decay is constant", "remove it", off=("constant",)),
        not_supported(f"{optim}.zero_indexed_step", "warm-up counts its first update as 1", "set it to False"),
        not_needed(f"{optim}.use_checkpoint_opt_param_scheduler", "a resumed run continues its schedule where it was"),
        not_needed(f"{optim}.use_layer_wise_distributed_optimizer", "FSDP shards the optimizer state"),
        not_supported(
            f"{optim}.{{exp_avg_dtype,exp_avg_sq_dtype,main_grads_dtype,main_params_dtype}}",
            "weights, gradients and moments of the optimizer are float32",
            "remove it",
            off=_FLOAT32,
        ),
        not_needed(
            f"{optim}.{{use_precision_aware_optimizer,override_optimizer_config.use_precision_aware_optimizer,"
            "override_optimizer_config.decoupled_weight_decay,master_weights,store_param_remainders}",
            "always so: weights and moments of AdamW are float32, and its weight decay is decoupled",
        ),
        translated(
            f"{optim}.override_optimizer_config.optimizer_cpu_offload",
            "cpu_optimizer",
            "`fsdp_config.optimizer_offload`",
        ),
        not_needed(
            f"{optim}.override_optimizer_config.{{optimizer_offload_fraction,offload_fraction,"
            "overlap_cpu_optimizer_d2h_h2d}",
            "details of how Megatron moves an optimizer to the host; optimizer_cpu_offload says whether it does",
        ),
        not_supported(
            f"{optim}.{{override_optimizer_config,override_optimizer_config.*}}",
            "the optimizer's settings are lr, betas, eps and weight_decay",
            "set optim.betas, optim.eps or optim.weight_decay",
        ),
    )


def _schedule_rules(optim: str) -> tuple[Rule, ...]:
    return (
        translated(f"{optim}.{{min_lr,lr_min}}", "floor", "`optim.min_lr_ratio`: this divided by `optim.lr`"),
        not_supported(
            f"{optim}.lr_decay_steps",
            _SPAN,
            "remove it, and let trainer.total_training_steps say how long the run is",
            idle="constant",
        ),
        not_needed(f"{optim}.lr_wsd_decay_*", "settings of Megatron's schedule WSD, which is not offered"),
        not_supported(
            f"{optim}.{{total_training_steps,lr_scheduler_num_training_steps,lr_scheduler.num_training_steps}}",
            _SPAN,
            "set trainer.total_training_steps",
            off=("-1",),
            idle="constant",
        ),
        not_supported(
            f"{optim}.{{num_cycles,lr_scheduler_num_cycles,lr_scheduler.num_cycles}}",
            "cosine falls once from lr to its end",
            "remove it",
            off=("0.5",),
            idle="constant",
        ),
        not_supported(
            f"{optim}.{{lr_warmup_init,init_lr_ratio}}", "warm-up begins at lr / steps", "remove it", off=("0",)
        ),
        not_supported(
            f"{optim}.min_lr_factor",
            "the end of the schedule is a share of lr",
            "set optim.min_lr_ratio",
            idle="constant",
        ),
    )


_FSDP = f"{_ANY}.fsdp_config"
SHARDING: tuple[Rule, ...] = (
    translated(f"{_TRAINED}.fsdp_config.offload_policy", "offload", "`param_offload` and `optimizer_offload`"),
    translated(f"{_REF}.fsdp_config.offload_policy", "offload", "`param_offload`"),
    not_needed(f"{_REF}.fsdp_config.optimizer_offload", "the reference has no optimizer"),
    not_needed(
        f"{_FSDP}.{{reshard_after_forward,forward_prefetch,use_orig_params,forward_only}}",
        "FSDP2 wraps every layer and gathers it when it is needed",
    ),
    not_needed(f"{_FSDP}.wrap_policy*", "FSDP2 wraps every layer"),
    translated(f"{_FSDP}.full_determinism", "deterministic", "`trainer.deterministic`"),
    not_supported(f"{_FSDP}.seed", "one seed decides the run", "set trainer.seed", off=("42", "1")),
    translated(
        f"{_TRAINED}.fsdp_config.{{dtype,mixed_precision.param_dtype}}",
        "dtype",
        f"`{_MODEL}.dtype` (the optimizer's weights are float32 in any case)",
    ),
    translated(
        f"{_TRAINED}.fsdp_config.model_dtype",
        "stored_dtype",
        f"fp32: nothing to do, the optimizer's weights are float32; bf16: `{_MODEL}.dtype`",
    ),
    not_needed(
        f"{_FSDP}.mixed_precision.{{reduce_dtype,buffer_dtype}}",
        "gradients are always summed over the workers in float32, which rounds less than bf16",
    ),
    not_needed(
        f"{{{_REF},reward_model}}.fsdp_config.{{dtype,model_dtype,mixed_precision.param_dtype}}",
        "a frozen model is computed in its `model.dtype`",
    ),
    not_supported(
        "reward_model.fsdp_config.fsdp_size", "every worker holds the whole reward model", "set it to -1", off=("-1",)
    ),
    not_supported(
        "{reward_model,critic}.{ulysses_sequence_parallel_size,fsdp_config.ulysses_sequence_parallel_size}",
        "a reward model does not split sequences over workers; the critic's"
        " size is critic.ulysses_sequence_parallel_size",
        "set it to 1",
        off=("1",),
    ),
    not_supported(
        "*.{qat,qat.*}",
        "quantization-aware training is not built",
        f"remove it; {_MODEL}.quantization=nf4 trains adapters beside 4-bit weights",
        switch="qat.enable",
    ),
    translated(
        f"{_REF}.{{strategy,fsdp_config.strategy}}", "same_engine", "the reference is computed by the actor's engine"
    ),
    not_supported(
        "reward_model.{strategy,fsdp_config.strategy}",
        "a reward model is computed whole by every worker",
        "remove it, or set reward_model.strategy=fsdp2",
        off=("fsdp", "fsdp2"),
    ),
    translated("critic.{strategy,fsdp_config.strategy}", "same_engine", "the critic is computed by the actor's engine"),
    not_needed("{actor_rollout_ref,critic,reward_model}.nccl_timeout", "workers wait as long as their work takes"),
)


def saving_rules(section: str, model: str) -> tuple[Rule, ...]:
    """Rules for what a checkpoint holds; `model` is the section of the model."""
    return (
        translated(
            f"{section}.save_contents",
            "contents",
            "a checkpoint always holds model, optimizer and the rest; `hf_model` in it sets `trainer.export_hf=all`",
        ),
        not_supported(
            f"{section}.load_contents",
            "a run is resumed whole",
            f"remove it; to start from weights alone set {model}.path to a folder written by `posttrain export`",
            off=_EVERYTHING,
        ),
        not_needed(f"{section}.mbridge_config", "it configures Megatron's own checkpoint writer, which is not used"),
        not_needed(
            f"{section}.strict",
            "a checkpoint holds all that a run needs to go on, so that nothing is ever missing when it is loaded; "
            f"{model}.allow_other_weights=True starts from a model's folder that lacks weights",
        ),
    )


def model_rules(model: str) -> tuple[Rule, ...]:
    """Rules for a model that is trained, and its adapters."""
    return (
        not_needed(f"{model}.{{use_fused_kernels,use_liger,fused_kernel_options*}}", _FUSED),
        not_needed(f"{model}.tiled_mlp.*", "activations are saved by enable_gradient_checkpointing"),
        not_needed(
            f"{model}.{{enable_activation_offload,enable_activation_offloading}}",
            "activations stay on their device; enable_gradient_checkpointing=True saves their memory",
        ),
        not_supported(
            f"{model}.custom_chat_template",
            "the chat template is the tokenizer's",
            "write it into tokenizer_config.json, or set model.tokenizer_path to a folder that has it",
        ),
        not_supported(
            f"{model}.hf_config_path", "config.json is read from the model's folder", "set model.override_config"
        ),
        not_supported(
            f"{model}.{{mtp,mtp.*}}",
            "multi-token prediction is not built: a model's further heads are neither trained nor decoded with",
            "remove it",
            switch="mtp.enable",
        ),
        not_supported(f"{model}.lora.{{dropout,lora_dropout}}", "adapters have no dropout", "set it to 0", off=("0",)),
        not_needed(f"{model}.lora.dropout_position", "adapters have no dropout"),
        not_supported(f"{model}.lora.dtype", "adapters are trained in float32", "remove it", off=_FLOAT32),
        not_supported(
            f"{model}.lora.{{lora_plus_ratio,experts_shared_outer_loras}}",
            "A and B of an adapter have one learning rate, and experts have adapters of their own",
            "remove it",
            off=("1", "false"),
        ),
        not_supported(
            f"{model}.lora.lora_A_init_method",
            "adapters begin as in peft: A by Kaiming's rule, B at 0",
            "set it to kaiming",
            off=("kaiming",),
        ),
        not_supported(
            f"{model}.lora.lora_B_init_method", "adapters begin as in peft: B at 0", "set it to zero", off=("zero",)
        ),
        not_needed(
            f"{model}.lora.{{merge,a2a_experimental}}", "the rollout reads the trainer's own weights and adapters"
        ),
        not_needed(f"{model}.lora.freeze_*", "with LoRA all other weights are frozen"),
    )


MODEL: tuple[Rule, ...] = (
    not_needed("{*.model,data}.use_shm", "files are read where they lie"),
    not_supported(
        "critic.model.{lora_adapter_path,lora.adapter_path}", "the critic's adapters begin anew", "remove it"
    ),
    not_supported("critic.model.lora.type", "adapters are LoRA", "set it to lora", off=("lora",)),
    not_needed("critic.model.tokenizer_path", "the critic reads the policy's tokens"),
    not_supported(
        f"{_MODEL}.override_config.{{model_config,moe_config,moe_config.*}}",
        "override_config holds values of the model's config.json themselves",
        f"write {_MODEL}.override_config.NAME=VALUE",
    ),
    not_supported(
        "{critic,reward_model}.model.{override_config,override_config.*}",
        "values are laid over the policy's config.json only",
        "change the config.json of this model",
    ),
    not_supported(f"{_ACTOR}.freeze_vision_tower", "only text models are trained", "remove it"),
)

ACTOR_RULES: tuple[Rule, ...] = (
    *BATCHING,
    *COMPUTING,
    *optimizer_rules(f"{_TRAINED}.optim"),
    *SHARDING,
    *saving_rules("*.checkpoint", _MODEL),
    *model_rules("*.model"),
    *MODEL,
)

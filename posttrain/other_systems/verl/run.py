"""verl's keys of the run: Ray, logging, profilers, other trainers; of other engines; of recipes; of supervised
fine-tuning (`sft_trainer`) and of `main_generation`."""

from __future__ import annotations

from posttrain.other_systems.verl.actor import model_rules, optimizer_rules, saving_rules
from posttrain.other_systems.verl.renamed import MEGATRON_OVERRIDES
from posttrain.other_systems.verl.rule import ASYNC, CHUNKED, PACKED, Rule, not_needed, not_supported, translated

RUN: tuple[Rule, ...] = (
    not_supported(
        "hydra.*",
        "Hydra's run folder, search path and sweeper are off",
        "remove it; runs are written to trainer.default_local_dir, --config-dir adds a folder of group files",
        off=(),
    ),
    not_needed("ray_kwargs.timeline_json_file", "trainer.profile_steps writes traces of every rank"),
    not_needed("trainer.{use_legacy_worker_impl,use_v1}", "there is one implementation of the trainer"),
    not_supported(
        "trainer.v1.trainer_mode",
        ASYNC,
        "set it to sync, and trainer.max_staleness to 1 or more to generate while others train",
        off=("sync",),
    ),
    not_needed("trainer.v1.*", "settings of verl's asynchronous trainers"),
    not_needed("transfer_queue.*", "batches reach the workers without a queue"),
    not_needed(
        "trainer.{log_val_generations,rollout_data_dir,validation_data_dir,rl_logging_board_dir,tensorboard_dir}",
        "the run directory holds every response (samples/) and what loggers write",
    ),
    translated(
        "trainer.remove_previous_ckpt_in_save",
        "one_checkpoint",
        "true: `trainer.max_ckpt_to_keep=1`; false keeps all, as here",
    ),
    not_supported("trainer.log_freq", "every step is logged", "set it to 1", off=("1",)),
    not_supported("trainer.default_hdfs_dir", "checkpoints are written to a folder", "set trainer.default_local_dir"),
    not_supported(
        "trainer.del_local_ckpt_after_load", "a checkpoint stays where it is", "set trainer.max_ckpt_to_keep"
    ),
    not_supported(
        "trainer.esi_redundant_time",
        "a run does not watch the end of its machine's lease",
        "set trainer.save_freq; SIGTERM saves as well",
        off=("0",),
    ),
    not_supported("trainer.worker_env.*", "workers inherit the environment of the command", "export it before the run"),
    not_needed(
        "global_profiler.tool",
        "torch's profiler is always used, for the steps in trainer.profile_steps; nsys can watch the "
        "process from outside",
    ),
    not_needed("*.profiler.*", "trainer.profile_steps alone traces every stage and every rank"),
    not_needed("{global_profiler,trainer.npu_profile}.*", "traces are those of torch's profiler, without options"),
    translated(
        "{async_training.staleness_threshold,async_flow.staleness}",
        "staleness",
        "`trainer.max_staleness`: the next whole number, as it counts policy versions",
    ),
    translated("async_training.partial_rollout", "partial", "`trainer.partial_rollout`"),
    translated(
        "async_training.{require_batches,trigger_parameter_sync_step}",
        "sync_step",
        "`data.train_batch_size`: the mini-batch times both, which is what verl trains between two weight syncs",
    ),
    translated(
        "async_training.{use_rollout_log_probs,compute_prox_log_prob}",
        "old_policy",
        "`actor_rollout_ref.actor.old_log_probs=rollout` with the first alone; with the second those of the policy "
        "that begins to learn, and `algorithm.rollout_correction.rollout_is=token`",
    ),
    not_needed("async_training.use_trainer_do_validate", "the rollout workers validate"),
    not_needed("async_training.enable_reward_queue", "each response goes to the reward workers as soon as it ends"),
    not_supported(
        "async_training.{use_dynamic_resource_scheduling,dynamic_schedule_*}",
        "a worker trains or generates for the whole run",
        "remove it, and set actor_rollout_ref.rollout.n_workers",
        switch="async_training.use_dynamic_resource_scheduling",
    ),
    not_supported(
        "async_resources.*",
        "the actor's passes and updates share their workers",
        "remove it, and set trainer.n_gpus_per_node and actor_rollout_ref.rollout.n_workers",
    ),
    *(
        not_supported(
            f"skip.{part}.*", "a run does not take its responses from a dump", "remove it", switch=f"skip.{part}.enable"
        )
        for part in ("rollout", "async_rollout", "rollout_tq")
    ),
)

NO_SUCH = "the Megatron engine has no such setting here"
_MEGATRON_DO = "set actor_rollout_ref.actor.strategy=fsdp2 (and critic.strategy=fsdp2); the key then has no effect"
_ROLES = "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic,reward_model}"
_MEGATRON = f"{_ROLES}.{{megatron,megatron_config}}"
_OTHERS_OF_ACTOR = "dynamic_context_parallel,max_seqlen_*,override_*,qat.*,router_replay.*,use_megatron_fsdp"


def megatron_rules(prefix: str, model: str) -> tuple[Rule, ...]:
    """Rules for settings of Megatron beside its sizes, under the section at which verl takes them."""
    return (
        not_needed(f"{prefix}.grad_offload", "gradients exist only during an update"),
        not_needed(
            f"{prefix}.{{use_mbridge,vanilla_mbridge,use_dist_checkpointing,dist_checkpointing_*,dist_ckpt_*,"
            "distrib_optim_*}",
            "weights come from Hugging Face folders, and checkpoints are torch.distributed.checkpoint's",
        ),
        not_needed(
            f"{prefix}.{{seed,forward_only}}", "the engine uses no random numbers, and a reference is never updated"
        ),
        not_needed(f"{prefix}.pad_*", PACKED),
        not_needed(f"{prefix}.{{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size}}", CHUNKED),
        not_supported(
            f"{prefix}.expert_tensor_parallel_size",
            "an expert lies whole on one rank",
            "set it to 1, or remove it; expert_model_parallel_size deals experts out over ranks",
            off=("1",),
            idle="fsdp",
        ),
        not_supported(
            f"{prefix}.router_replay.mode",
            "the routers of this engine take no given routes",
            "set it to disabled, or the engine to FSDP",
            off=("disabled",),
            idle="fsdp",
        ),
        *_transformer_overrides(f"{prefix}.override_transformer_config", model),
    )


def _transformer_overrides(prefix: str, model: str) -> tuple[Rule, ...]:
    """Rules for Megatron's own settings of a model, under the key at which verl takes them."""
    return (
        not_needed(
            f"{prefix}.recompute_*", f"{model}.enable_gradient_checkpointing says whether layers are computed again"
        ),
        not_needed(
            f"{prefix}.{{apply_dsa_kernel_fusion,apply_rope_fusion,attention_backend,bias_activation_fusion,"
            "bias_dropout_fusion,context_parallel_algo,cp_comm_type,cp_partition_mode,cuda_graph_impl,"
            "cuda_graph_scope,deallocate_pipeline_outputs,gradient_accumulation_fusion,masked_softmax_fusion,"
            "max_seqlen_per_dp_cp_rank,moe_enable_deepep,moe_flex_dispatcher_backend,moe_grouped_gemm,moe_permute_fusion,"
            "moe_router_fusion,moe_shared_expert_overlap,moe_token_dispatcher_type,persist_layer_norm,"
            "sequence_packing_scheduler,use_flash_attn,use_fused_mhc,use_fused_rmsnorm,use_fused_rotary_pos_emb,"
            "use_fused_swiglu,use_fused_weighted_squared_relu,use_te_rng_tracker}",
            "which kernels and messages Megatron computes with; the engine chooses them, and the numbers are the same",
        ),
        not_needed(
            f"{prefix}.calculate_per_token_loss", "how losses are averaged is a setting of the loss, for every engine"
        ),
        not_needed(f"{prefix}.moe_router_dtype", "scores of experts are computed in the type that transformers takes"),
        not_needed(
            f"{prefix}.{{init_method_std,multi_head_latent_attention,multi_latent_attention,moe_router_enable_expert_bias,normalization,rope_scaling_*,"
            "seq_length,swiglu,use_naive_l2norm,yarn_scaling_factor}",
            f"the shape of a model is that of its config.json, and of {model}.override_config",
        ),
        *(not_supported(f"{prefix}.{name}", says, do, off=off, idle="fsdp") for name, says, do, off in _OVERRIDES),
        not_needed(
            f"{prefix.removesuffix('transformer_config')}ddp_config.{{average_in_collective,bucket_size,"
            "check_for_nan_in_grad,grad_reduce_in_fp32,overlap_grad_reduce,overlap_param_gather}",
            "gradients are summed over the workers in float32, and a step with one that is not finite is skipped",
        ),
    )


_OVERRIDES = (
    (
        "{account_for_embedding_in_pipeline_split,account_for_loss_in_pipeline_split,pipeline_model_parallel_layout,"
        "pipeline_num_transformer_layers}",
        "stages are given by their layers alone",
        "set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage, one less than of others",
        ("false", "null"),
    ),
    (
        "moe_router_bias_update_rate",
        "the correction that balances experts is part of the model and not trained",
        "set it to 0, or remove it",
        ("0", "null"),
    ),
    ("{dsa_indexer_*}", "sparse attention of DeepSeek-V3.2 is not built", "remove it", ("0", "false", "null")),
    (
        "swap_optimizer",
        "moments are moved between steps, not within one",
        "set it to false; in RL actor_rollout_ref.actor.fsdp_config.optimizer_offload=True moves them",
        ("false",),
    ),
    (
        "{moe_aux_loss_coeff,moe_z_loss_coeff}",
        "a loss of the router would be added to the gradient of every pass, and depend on how rows are split",
        "set it to 0, or remove it",
        ("0", "null"),
    ),
    ("mtp_*", "multi-token prediction is not built", "remove it", ("0", "false")),
    ("keep_mtp_spec_in_bf16", "multi-token prediction is not built", "remove it", ("false",)),
    ("moe_router_load_balancing_type", "it adds a loss of the router", "set it to none", ("none",)),
    ("{attention_dropout,hidden_dropout}", "the engine computes without dropout", "set it to 0", ("0",)),
    ("{fp8,fp8_*,fp4,fp4_*}", "it needs TransformerEngine, which is not used", "remove it", ("false", "null")),
    ("position_embedding_type", "config.json says which positions the model has", "remove it", ("rope",)),
    ("use_arbitrary_attention_mask", "attention is causal over packed rows", "remove it", ("false",)),
)
OTHER_ENGINES: tuple[Rule, ...] = (
    translated(
        "model_engine",
        "engine",
        "`dp` (FSDP) and `megatron` are the engines here; veomni, torchtitan and others are refused",
    ),
    translated("actor_rollout_ref.actor.model_engine", "engine", "as `model_engine`"),
    translated(
        "actor_rollout_ref.ref.{megatron,megatron_config}.param_offload",
        "megatron_offload",
        "`fsdp_config` has them for every engine",
    ),
    translated(
        "{actor_rollout_ref.actor,critic}.{megatron,megatron_config}.{param_offload,optimizer_offload}",
        "megatron_offload",
        "`fsdp_config` has them for every engine",
    ),
    not_needed("actor_rollout_ref.ref.{megatron,megatron_config}.optimizer_offload", "the reference has no optimizer"),
    translated(
        "{actor_rollout_ref.ref,critic}.{megatron,megatron_config}.{tensor,pipeline,virtual,expert_model,context}*_size",
        "megatron_sizes",
        "the reference and the critic are cut as the actor is: `actor_rollout_ref.actor.megatron_config`",
    ),
    not_needed(
        "{actor_rollout_ref.ref,critic}.{megatron,megatron_config}.use_distributed_optimizer",
        "the actor's holds for the critic too, and the reference has no optimizer",
    ),
    not_needed(
        "{actor_rollout_ref.ref,critic}.{megatron,megatron_config}.{sequence_parallel,"
        "override_transformer_config.context_parallel_size,override_transformer_config.sequence_parallel,"
        "override_transformer_config.num_layers_in_*}",
        "the reference and the critic are cut as the actor is: `actor_rollout_ref.actor.megatron_config`",
    ),
    *megatron_rules(_MEGATRON, "actor_rollout_ref.model"),
    translated(
        "{actor_rollout_ref.actor,critic}.{megatron,megatron_config}.dtype",
        "dtype",
        "`actor_rollout_ref.model.dtype`",
    ),
    not_needed(
        "{actor_rollout_ref.ref,reward_model}.{megatron,megatron_config}.dtype",
        "a frozen model is computed in its `model.dtype`",
    ),
    not_needed(f"{_MEGATRON}.use_remove_padding", PACKED),
    *(
        not_supported(
            pattern,
            NO_SUCH,
            "remove it (docs/megatron.md names what there is), or set actor_rollout_ref.actor.strategy=fsdp2",
            idle="fsdp",
        )
        for pattern in (
            f"actor_rollout_ref.actor.megatron_config.{{{_OTHERS_OF_ACTOR}}}",
            "{actor_rollout_ref.ref,critic,reward_model}.{megatron,megatron_config}.*",
        )
    ),
    not_supported(
        "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}."
        "{veomni,torchtitan,engine,automodel,automodel_config,mindspeed}.*",
        "this engine is not built",
        _MEGATRON_DO,
        idle="fsdp",
    ),
    not_supported(
        "*.fsdp_config.turbo_config.*", "the engine fsdp_turbo (Ascend) is not built", _MEGATRON_DO, idle="fsdp"
    ),
    not_supported(
        "{actor,critic,ref}@*", "verl's group files are not here", "give the keys that the file sets", off=()
    ),
)

_RECIPE = "a key of a recipe, not of verl's trainers"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RECIPES: tuple[Rule, ...] = (
    not_supported(
        f"{_ACTOR}.{{ppo_adv_clip_max,ppo_clip_range,ppo_kl_coeff,ppo_max_grad_norm,gvpo_beta}}",
        _RECIPE,
        "choose a policy loss (`posttrain explain` lists them), or register your own (docs/own_algorithm.md)",
        off=(),
    ),
    not_supported(
        f"{_ACTOR}.{{sampling_steps,shift,timestep_fraction,train_cfg_scale,model_args_path,num_images_in_input,"
        "freeze_non_attn_ffn,micro_batch_size}",
        f"{_RECIPE} (diffusion or robots)",
        "remove it: only text models are trained",
    ),
    not_supported(
        f"{_ROLLOUT}.{{cfg_scale,text_cfg_scale,eta,height,width,init_same_noise,latent_h,latent_w,num_inference_steps,"
        "online.prompt,online.save.path,online.step.interval,online.test,only,output_dir,result.save.path,"
        "vae_scale_factor,micro_batch_size,single_turn_response_length}",
        f"{_RECIPE} (diffusion or robots)",
        "remove it: only text models are trained",
        off=(),
    ),
    not_supported("actor_rollout_ref.model.{reward_model,reward_model_path}", _RECIPE, "set reward_model.model.path"),
    not_supported("{env,atropos}.*", f"{_RECIPE} (an environment outside the run)", "remove it"),
    not_supported(
        "trainer.{debug,dump_high_diff_dir,dump_high_diff_tokens,fixed_eval,n_env_gpus_per_node,"
        "n_rollout_gpus_per_node,ref_update_freq}",
        _RECIPE,
        "remove it",
    ),
    not_supported("trainer.spo.*", _RECIPE, "remove it", switch="trainer.spo.enable"),
)

RUN_RULES: tuple[Rule, ...] = (*RUN, *OTHER_ENGINES, *RECIPES)


_OTHER = "`fsdp` and `megatron` have no such setting, and other engines are not built"

SUPERVISED_RULES: tuple[Rule, ...] = (
    translated(
        "data.use_dynamic_bsz",
        "dynamic",
        "passes are filled up to `data.max_token_len_per_gpu` anyway: true sets `data.micro_batch_size_per_gpu` to "
        "null, false leaves it as a further bound",
    ),
    translated(
        "data.micro_batch_size",
        "share",
        "`data.micro_batch_size_per_gpu`: verl's value is the total over all workers, so it is divided by their number",
    ),
    not_needed("data.{pad_mode,balance_dp_token}", "rows are packed without padding, and spread by their tokens"),
    not_needed(
        "data.ignore_input_ids_mismatch", "a conversation is rendered once as a whole, so there is nothing to compare"
    ),
    not_needed("{data,model}.use_shm", "files are read where they lie"),
    not_needed("data.{num_workers,dataloader_num_workers}", "rows are read and tokenized in the run's process"),
    not_supported("data.custom_cls.*", "rows are read by posttrain", "write rows as parquet or JSON (docs/sft.md)"),
    translated(
        "engine",
        "engine",
        "`fsdp` and `megatron` are the engines here (`fsdp.strategy`); others are refused",
    ),
    translated(
        "engine.{tensor_model_parallel_size,pipeline_model_parallel_size,virtual_pipeline_model_parallel_size,"
        "expert_model_parallel_size,context_parallel_size,sequence_parallel,use_distributed_optimizer}",
        "supervised_sizes",
        "the same without `model_` in `fsdp.megatron_config`, with `engine=megatron`",
    ),
    translated(
        f"engine.override_transformer_config.{{{','.join(MEGATRON_OVERRIDES)}}}",
        "supervised_sizes",
        "the same without `model_` in `fsdp.megatron_config`, with `engine=megatron`",
    ),
    translated("optim", "engine", "the engine's group, `fsdp` or `megatron`; those of other engines are refused"),
    translated("model", "model_group", "`hf_model` is the only group"),
    translated("engine.{dtype,model_dtype}", "dtype", "`model.dtype` (the optimizer's weights are float32)"),
    not_supported(
        "{engine.param_offload,engine.optimizer_offload,model.fsdp_config.cpu_offload,"
        "model.fsdp_config.offload_params}",
        "weights and optimizer stay on their device in supervised training",
        "set it to False; model.lora_rank and model.enable_gradient_checkpointing save memory",
    ),
    not_needed("engine.{use_torch_compile,forward_prefetch,reshard_after_forward}", "FSDP2 wraps every layer"),
    not_needed("model.fsdp_config.*", "FSDP2 wraps every layer and gathers it when it is needed"),
    *megatron_rules("engine", "model"),
    not_supported(
        "engine.{use_megatron_fsdp,override_*}",
        NO_SUCH,
        "remove it (docs/megatron.md names what there is)",
        idle="fsdp",
    ),
    not_supported("engine.*", _OTHER, "remove it, or set engine=fsdp; the key then has no effect", idle="fsdp"),
    not_supported(
        "optim.override_optimizer_config.{optimizer_cpu_offload,optimizer_offload_fraction,offload_fraction}",
        "the state of the optimizer stays on its device in supervised training",
        "remove it",
        off=("false", "0"),
    ),
    *optimizer_rules("optim"),
    *model_rules("model"),
    *saving_rules("checkpoint", "model"),
    not_needed("{profiler,global_profiler}.*", "trainer.profile_steps alone traces every stage and every rank"),
    not_needed(
        "trainer.{balance_batch,log_val_generations}", "rows are always spread over the workers by their tokens"
    ),
    not_supported("trainer.default_hdfs_dir", "checkpoints are written to a folder", "set trainer.default_local_dir"),
)

# Key of `main_generation` -> its answer; `posttrain/trainer/main_generation.py` reads them.
GENERATION: dict[str, tuple[str, str]] = {
    "data.path": ("honoured", "`--data` of `posttrain generate`"),
    "data.output_path": ("honoured", "`--out`"),
    "data.n_samples": ("honoured", "`--n`"),
    "data.batch_size": ("not needed", "the engine is kept full"),
    "rollout.prompt_length": ("translated", "`data.max_prompt_length`"),
    "rollout.response_length": ("translated", "`--max-tokens`"),
    "rollout.temperature": ("honoured", "`--temperature`"),
    "rollout.top_k": ("honoured", "`--top-k`"),
    "rollout.top_p": ("honoured", "`--top-p`"),
    "rollout.tensor_model_parallel_size": ("not supported", "each worker has the whole model: set it to 1"),
    "rollout.gpu_memory_utilization": ("honoured", "as in training"),
    "rollout.max_num_batched_tokens": ("honoured", "as in training"),
}

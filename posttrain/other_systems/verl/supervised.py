"""verl's keys of supervised fine-tuning (`sft_trainer`), and those of `main_generation`."""

from __future__ import annotations

from posttrain.other_systems.verl.actor import EVERYTHING, OWN_TEMPLATE, RESUMED_WHOLE, SPAN
from posttrain.other_systems.verl.rule import Rule, not_needed, not_supported, translated
from posttrain.other_systems.verl.run import NO_SUCH, transformer_overrides

_OTHER = "this engine is not built"

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
    not_needed("model.{use_liger,use_fused_kernels}", "fused kernels are used wherever they give the same result"),
    not_supported("model.{mtp,mtp.*}", "multi-token prediction is not built", "remove it", switch="mtp.enable"),
    not_needed(
        "model.{enable_activation_offload,enable_activation_offloading}",
        "activations stay on their device; model.enable_gradient_checkpointing=True saves their memory",
    ),
    translated(
        "engine",
        "engine",
        "`fsdp` and `megatron` are the engines here (`fsdp.strategy`); others are refused",
    ),
    translated(
        "engine.{tensor_model_parallel_size,pipeline_model_parallel_size,virtual_pipeline_model_parallel_size,"
        "expert_model_parallel_size,context_parallel_size,sequence_parallel,"
        "override_transformer_config.context_parallel_size,override_transformer_config.sequence_parallel}",
        "supervised_sizes",
        "the same without `model_` in `fsdp.megatron_config`, with `engine=megatron`",
    ),
    translated("optim", "engine", "the engine's group, `fsdp` or `megatron`; those of other engines are refused"),
    translated("model", "model_group", "`hf_model` is the only group"),
    translated("engine.{dtype,model_dtype}", "dtype", "`model.dtype` (the optimizer's weights are float32)"),
    not_supported(
        "{engine.param_offload,engine.optimizer_offload,engine.grad_offload,model.fsdp_config.cpu_offload,"
        "model.fsdp_config.offload_params}",
        "weights and optimizer stay on their device in supervised training",
        "set it to False; model.lora_rank and model.enable_gradient_checkpointing save memory",
    ),
    not_needed("engine.{use_torch_compile,forward_prefetch,reshard_after_forward}", "FSDP2 wraps every layer"),
    not_needed("model.fsdp_config.*", "FSDP2 wraps every layer and gathers it when it is needed"),
    *transformer_overrides("engine.override_transformer_config", "model"),
    not_needed(
        "engine.{use_mbridge,vanilla_mbridge,use_dist_checkpointing,dist_checkpointing_*}",
        "weights come from Hugging Face folders, and checkpoints are torch.distributed.checkpoint's",
    ),
    not_supported(
        "engine.expert_tensor_parallel_size",
        "an expert lies whole on one rank",
        "set it to 1, or remove it; engine.expert_model_parallel_size deals experts out over ranks",
        off=("1",),
        idle="fsdp",
    ),
    not_supported(
        "engine.{use_megatron_fsdp,override_*}",
        NO_SUCH,
        "remove it (docs/megatron.md names what there is)",
        idle="fsdp",
    ),
    not_supported("engine.*", _OTHER, "set engine=fsdp; the key then has no effect", idle="fsdp"),
    translated("optim.{min_lr,lr_min}", "floor", "`optim.min_lr_ratio`: this divided by `optim.lr`"),
    not_supported("optim.{lr_warmup_init,init_lr_ratio}", "warm-up begins at lr / steps", "remove it", off=("0",)),
    not_supported(
        "optim.{optimizer,optimizer_impl}",
        "the optimizer is torch's AdamW",
        "remove it",
        off=("adamw", "adam", "torch.optim"),
    ),
    not_supported(
        "optim.{exp_avg_dtype,exp_avg_sq_dtype}",
        "moments of the optimizer are float32",
        "remove it",
        off=("fp32", "float32"),
    ),
    not_needed(
        "optim.override_optimizer_config.{use_precision_aware_optimizer,decoupled_weight_decay,"
        "overlap_cpu_optimizer_d2h_h2d}",
        "always so: AdamW's moments are float32, its weight decay is decoupled",
    ),
    not_supported(
        "optim.{override_optimizer_config,override_optimizer_config.*}",
        "the optimizer's settings are lr, betas, eps and weight_decay, and its state stays on its device",
        "remove it",
        off=("false", "0"),
    ),
    not_needed("optim.{master_weights,store_param_remainders}", "the optimizer's weights are float32"),
    not_needed("optim.muon_*", "settings of the optimizer Muon; the optimizer is AdamW"),
    not_supported(
        "optim.lr_decay_steps", SPAN, "remove it, and let trainer.total_training_steps say how long the run is"
    ),
    not_supported("model.custom_chat_template", OWN_TEMPLATE, "write it into tokenizer_config.json"),
    not_supported("checkpoint.load_contents", RESUMED_WHOLE, "remove it", off=EVERYTHING),
    translated(
        "checkpoint.save_contents",
        "contents",
        "a checkpoint always holds model, optimizer and the rest; `hf_model` in it sets `trainer.export_hf=all`",
    ),
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

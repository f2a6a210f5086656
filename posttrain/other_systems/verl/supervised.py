"""verl's keys of supervised fine-tuning (`sft_trainer`), and those of `main_generation`."""

from __future__ import annotations

from posttrain.other_systems.verl.actor import model_rules, optimizer_rules, saving_rules
from posttrain.other_systems.verl.renamed import MEGATRON_OVERRIDES
from posttrain.other_systems.verl.rule import Rule, not_needed, not_supported, translated
from posttrain.other_systems.verl.run import NO_SUCH, megatron_rules

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

"""The engine `sglang` as settings see it."""

from __future__ import annotations

from posttrain.rollout.outside_engine import MODEL, ROLLOUT, OutsideEngine

SAMPLER = "pytorch"
"""The one of SGLang's samplers, there on every device, whose place posttrain's own takes."""
_PATH = ("model_path", "tokenizer_path", "tokenizer_mode", "served_model_name", "revision", "model_config_parser")

SGLANG = OutsideEngine(
    name="sglang",
    title="SGLang",
    packages=("sglang",),
    how_to_install=(
        "in an environment of its own, pip install posttrain, then pip install --no-deps sglang and the packages that "
        "it requires, except torch and transformers (docs/rollout.md#what-sglang-does)"
    ),
    tried=("0.5.23",),
    length="context_length",
    # Weights come from the trainer, requests and answers are token ids, tokens are drawn by posttrain's own sampler,
    # which must have seen a row's last token, and each is reported when it is made.
    fixed={
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "sampling_backend": SAMPLER,
        "disable_overlap_schedule": True,
        "incremental_streaming_output": True,
        "stream_interval": 1,
        "random_seed": 0,
    },
    decided={
        **dict.fromkeys(_PATH, f"{MODEL}.path"),
        "json_model_override_args": f"{MODEL}.override_config",
        "trust_remote_code": f"{MODEL}.trust_remote_code",
        "dtype": f"{MODEL}.dtype",
        **dict.fromkeys(("quantization", "quantization_param_path"), f"{MODEL}.quantization"),
        "enable_lora": f"{MODEL}.lora_rank",
        "random_seed": "trainer.seed",
        "max_running_requests": f"{ROLLOUT}.max_num_seqs",
        **dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens"), f"{ROLLOUT}.max_num_batched_tokens"),
        "mem_fraction_static": f"{ROLLOUT}.gpu_memory_utilization",
        "max_total_tokens": f"{ROLLOUT}.kv_cache_gb",
        **dict.fromkeys(("tp_size", "tensor_parallel_size"), f"{ROLLOUT}.tensor_model_parallel_size"),
        **dict.fromkeys(("dp_size", "data_parallel_size", "pp_size", "nnodes"), f"{ROLLOUT}.n_workers"),
        "device": "trainer.device",
    },
    # It sleeps on GPUs, stays beside its worker, and makes one token after the other, whose log-probs are those of the
    # model.
    ours=(
        *("enable_memory_saver", "enable_weights_cpu_backup", "base_gpu_id", "node_rank", "dist_init_addr"),
        *("speculative_algorithm", "enable_deterministic_inference", "rl_on_policy_target", "is_embedding"),
        *("custom_sigquit_handler", "tokenizer_worker_num", "disaggregation_mode", "enable_dp_attention"),
    ),
    holder="ServerArgs",
    files=("srt/server_args.py", "srt/arg_groups/fields/*.py"),
    gone={"cuda_graph_max_bs": "remove it: newer versions call it cuda_graph_max_bs_decode"},
)

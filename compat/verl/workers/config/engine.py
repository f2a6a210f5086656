"""Settings of a train engine as verl's code builds and reads them. A run's own are `actor_rollout_ref.actor`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from verl._config import BaseConfig

_MUTABLE = frozenset(
    {
        "use_dynamic_bsz",
        "max_token_len_per_gpu",
        "micro_batch_size_per_gpu",
        "infer_max_token_len_per_gpu",
        "infer_micro_batch_size_per_gpu",
        "use_fused_kernels",
        "use_remove_padding",
        "forward_only",
        "param_offload",
    }
)


class EngineRouterReplayConfig(BaseConfig):
    """Replay of the experts that the rollout chose; an engine of posttrain has it switched off."""

    _defaults = {"mode": "disabled", "record_file": None, "replay_file": None}  # noqa: RUF012
    _mutable_fields = frozenset()

    def _check(self, given: Mapping[str, Any]) -> None:
        if self.mode not in ("disabled", "R2", "R3"):
            raise ValueError(f"Invalid router_replay mode: {self.mode}. Must be one of disabled, R2, R3")


class EngineConfig(BaseConfig):
    """What every engine has."""

    _defaults: Any = {  # noqa: RUF012
        "param_offload": False,
        "optimizer_offload": False,
        "forward_only": False,
        "strategy": None,
        "dtype": "bfloat16",
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": None,
        "micro_batch_size_per_gpu": None,
        "infer_max_token_len_per_gpu": None,
        "infer_micro_batch_size_per_gpu": None,
        "use_fused_kernels": False,
        "use_remove_padding": True,
        "seed": 42,
        "full_determinism": False,
        "router_replay": EngineRouterReplayConfig(),
    }
    _mutable_fields = _MUTABLE


class FSDPEngineConfig(EngineConfig):
    """FSDP, or FSDP2 by `strategy`."""

    _defaults: Any = {  # noqa: RUF012
        **EngineConfig._defaults,
        "strategy": "fsdp",
        "wrap_policy": {},
        "offload_policy": False,
        "reshard_after_forward": True,
        "fsdp_size": -1,
        "forward_prefetch": False,
        "model_dtype": "fp32",
        "use_orig_params": False,
        "mixed_precision": None,
        "ulysses_sequence_parallel_size": 1,
        "entropy_from_logits_with_chunking": False,
        "entropy_from_logits_chunk_size": 2048,
        "use_torch_compile": True,
        "entropy_checkpointing": False,
        "use_no_sync_for_gradient_accumulation": True,
        "pad_to_length": False,
        "pad_to_length_bucket": 1024,
    }
    _mutable_fields = _MUTABLE | {"ulysses_sequence_parallel_size"}

    def _check(self, given: Mapping[str, Any]) -> None:
        assert self.strategy in ("fsdp", "fsdp2"), f"strategy {self.strategy} not supported"


class McoreEngineConfig(EngineConfig):
    """Megatron-Core; sequence parallelism needs tensor parallelism."""

    _defaults: Any = {  # noqa: RUF012
        **EngineConfig._defaults,
        "strategy": "megatron",
        "tensor_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "dynamic_context_parallel": False,
        "max_seqlen_per_dp_cp_rank": None,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "use_dist_checkpointing": False,
        "dist_checkpointing_path": None,
        "dist_checkpointing_prefix": "",
        "override_ddp_config": {},
        "override_transformer_config": {},
        "override_mcore_model_config": {},
        "use_mbridge": True,
        "vanilla_mbridge": False,
        "use_megatron_fsdp": False,
    }
    _mutable_fields = _MUTABLE | {"sequence_parallel"}

    def _check(self, given: Mapping[str, Any]) -> None:
        assert self.strategy == "megatron", f"strategy {self.strategy} not supported"
        assert self.dtype in ("bfloat16", "float16"), f"dtype {self.dtype} not supported"
        if self.dynamic_context_parallel and not (self.max_seqlen_per_dp_cp_rank or 0) > 0:
            raise ValueError(
                "max_seqlen_per_dp_cp_rank must be a positive integer when dynamic_context_parallel is enabled"
            )
        if self.tensor_model_parallel_size == 1 and self.sequence_parallel:
            warnings.warn("set sequence parallel to false as TP size is 1", stacklevel=3)
            self.sequence_parallel = False

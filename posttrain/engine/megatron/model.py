"""A Hugging Face model as Megatron-Core builds it: its settings there, and the models that cannot be built."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.engine.megatron.groups import ParallelSizes, RankGroups
from posttrain.engine.megatron.package import MegatronError, adapt_experts, buffers_on, part
from posttrain.engine.megatron.settings import EXPERTS, MODEL_TYPES

ROTATIONS = ("default", "linear", "llama3")


def check_model(config: Any, sizes: ParallelSizes) -> None:
    """Rejects models that cannot be built, or not be split over so many ranks."""
    kind = config.model_type
    if kind not in MODEL_TYPES:
        raise MegatronError(
            f"{sizes.keys.strategy}=megatron: models of type {kind} are not built for it; it trains "
            f"{', '.join(MODEL_TYPES)}. Set strategy=fsdp2"
        )
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    windows = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    odd = {
        f"positions of type {rotation}": rotation not in ROTATIONS,
        f"sliding windows of {windows} tokens": windows is not None,
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
        "biases beside those of queries, keys and values": kind == "llama"
        and (getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)),
        "layers without experts among those with experts": kind == "qwen3_moe"
        and (bool(config.mlp_only_layers) or config.decoder_sparse_step != 1),
    }
    if problems := [name for name, is_so in odd.items() if is_so]:
        raise MegatronError(
            f"{sizes.keys.strategy}=megatron: the model has {' and '.join(problems)}, which are not built for "
            "it; set strategy=fsdp2"
        )
    _check_parts(config, sizes)


def _check_parts(config: Any, sizes: ParallelSizes) -> None:
    cut = [
        ("tensor_parallel_size", sizes.tensor, "heads of queries", config.num_attention_heads),
        ("tensor_parallel_size", sizes.tensor, "heads of keys", config.num_key_value_heads),
        ("tensor_parallel_size", sizes.tensor, "columns between the matrices of a layer", config.intermediate_size),
        ("pipeline_parallel_size", sizes.pipeline, "layers", config.num_hidden_layers),
    ]
    experts = experts_of(config)
    if experts is None and sizes.expert > 1:
        raise MegatronError(
            f"{sizes.key}.expert_parallel_size={sizes.expert}: the model ({config.model_type}) is dense, it has no "
            f"experts to deal out; set 1, or a mixture of experts as {sizes.keys.model}.path"
        )
    if experts is not None:
        cut.append(("expert_parallel_size", sizes.expert, "experts", experts))
    for name, size, what, count in cut:
        if count % size:
            raise MegatronError(
                f"{sizes.key}.{name}={size}: the model has {count} {what}, which is no multiple of it; set a size that "
                "divides it"
            )


def experts_of(config: Any) -> int | None:
    """How many experts a layer has; None for a dense model."""
    if config.model_type not in EXPERTS:
        return None
    return getattr(config, "num_experts", None) or config.num_local_experts


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def padded_vocabulary(config: Any, sizes: ParallelSizes) -> int:
    """Tokens of the embedding, filled up so that every tensor rank has equally many."""
    return -(-config.vocab_size // sizes.tensor) * sizes.tensor


def build(config: Any, groups: RankGroups, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """This rank's part of the model, in Megatron-Core's modules; its weights are not set."""
    from posttrain.engine.megatron.stage import PackedAttention

    experts = experts_of(config)
    if experts is not None:
        adapt_experts(device)
    specs = part("models.gpt.gpt_layer_specs")
    query_norms = config.model_type in ("qwen3", "qwen3_moe")
    layer = specs.get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=query_norms, normalization="RMSNorm"
    )
    # A specification names the class of each part of a layer, which is how attention is replaced.
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    with buffers_on(device):
        return (
            part("models.gpt")
            .GPTModel(
                _settings(config, groups.sizes, dtype, query_norms),
                layer,
                vocab_size=padded_vocabulary(config, groups.sizes),
                max_sequence_length=config.max_position_embeddings,
                pre_process=groups.first,
                post_process=groups.last,
                position_embedding_type="none",  # angles are those of the Hugging Face model, by each token's position
            )
            .to(device=device, dtype=dtype)
        )


def _settings(config: Any, sizes: ParallelSizes, dtype: torch.dtype, query_norms: bool) -> Any:
    return part("transformer").TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        ffn_hidden_size=config.intermediate_size,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=query_norms,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,  # weights are copied in; nothing random is needed
        perform_initialization=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,  # its kernel is in Apex
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        **_expert_settings(config, sizes),
    )


def _expert_settings(config: Any, sizes: ParallelSizes) -> dict[str, Any]:
    experts = experts_of(config)
    if experts is None:
        return {}
    normed = getattr(config, "norm_topk_prob", True)  # weights of the chosen add up to 1, as of softmax after choosing
    return {
        "num_moe_experts": experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not normed,
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "moe_router_load_balancing_type": "none",  # its auxiliary loss would change the gradient of the RL loss
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": 1,
    }

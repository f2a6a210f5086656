"""A Hugging Face model as Megatron-Core builds it: its settings there, and the models that cannot be built."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from posttrain.engine.megatron.groups import ParallelSizes, RankGroups
from posttrain.engine.megatron.package import MegatronError, adapt_experts, buffers_on, part
from posttrain.engine.megatron.settings import ATTENTION_BIASES, EXPERTS, LATENT, MODEL_TYPES
from posttrain.kernels import train
from posttrain.kernels.packed_attention import active_layout
from posttrain.kernels.sequence_parallel import stretch_attention

ROTATIONS = ("default", "linear", "llama3", "yarn")


def check_model(config: Any, sizes: ParallelSizes) -> None:
    """Rejects models that cannot be built, or not be split over so many ranks."""
    kind = config.model_type
    if kind not in MODEL_TYPES:
        raise MegatronError(
            f"{sizes.keys.strategy}=megatron: models of type {kind} are not built for it; it trains "
            f"{', '.join(MODEL_TYPES)}; set {sizes.keys.strategy}=fsdp2"
        )
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    windows = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    biased = getattr(config, "attention_bias", False) and kind not in ATTENTION_BIASES
    odd = {
        f"positions of type {rotation}": rotation not in ROTATIONS or (rotation == "yarn" and kind == "glm4_moe"),
        f"sliding windows of {windows} tokens": windows is not None,
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
        "biases beside those of queries, keys and values": biased or getattr(config, "mlp_bias", False),
    }
    if problems := [name for name, is_so in odd.items() if is_so]:
        raise MegatronError(
            f"{sizes.keys.strategy}=megatron: the model has {' and '.join(problems)}, which are not built for "
            f"it; set {sizes.keys.strategy}=fsdp2"
        )
    _check_parts(config, sizes)


def _check_parts(config: Any, sizes: ParallelSizes) -> None:
    cut = [
        ("tensor_parallel_size", sizes.tensor, "heads of queries", config.num_attention_heads),
        ("tensor_parallel_size", sizes.tensor, "heads of keys", config.num_key_value_heads),
        ("tensor_parallel_size", sizes.tensor, "columns between the matrices of a layer", config.intermediate_size),
    ]
    if sizes.context > 1:
        _check_context(config, sizes)
    _layers_by_stage(config, sizes)
    experts = experts_of(config)
    if experts is None and sizes.expert > 1:
        raise MegatronError(
            f"{sizes.key}.expert_parallel_size={sizes.expert}: the model ({config.model_type}) is dense, it has no "
            f"experts to deal out; set 1, or a mixture of experts as {sizes.keys.model}.path"
        )
    if experts is not None:
        cut.append(("expert_parallel_size", sizes.expert, "experts", experts))
    if shared := shared_width(config):
        cut.append(("tensor_parallel_size", sizes.tensor, "columns of shared experts", shared))
    for name, size, what, count in cut:
        if count % size:
            raise MegatronError(
                f"{sizes.key}.{name}={size}: the model has {count} {what}, which is no multiple of it; set a size that "
                "divides it"
            )


def _check_context(config: Any, sizes: ParallelSizes) -> None:
    """Context ranks divide the heads of a tensor rank among themselves where they attend."""
    heads, keys = config.num_attention_heads // sizes.tensor, config.num_key_value_heads // sizes.tensor
    if heads % sizes.context or (keys and keys % sizes.context and sizes.context % keys):
        of_rank = f" on each of {sizes.tensor} tensor ranks" if sizes.tensor > 1 else ""
        raise MegatronError(
            f"{sizes.key}.context_parallel_size={sizes.context}: ranks that share the tokens of a pass divide its "
            f"heads in attention, but the model has {heads} heads of queries and {keys} of keys{of_rank}; set a size "
            "that divides the heads of queries, and that divides those of keys or is a multiple of them"
        )


def experts_of(config: Any) -> int | None:
    """How many experts a layer has; None for a dense model."""
    if config.model_type not in EXPERTS:
        return None
    return getattr(config, "num_experts", None) or config.num_local_experts


def is_mixture(config: Any, layer: int) -> bool:
    """Whether a layer, counted over all stages, has experts."""
    kind = config.model_type
    if kind == "qwen3_moe":
        return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    return kind in EXPERTS and layer >= getattr(config, "first_k_dense_replace", 0)


def shared_width(config: Any) -> int | None:
    """Columns of the experts that all tokens go through; None for a model without them."""
    count = getattr(config, "n_shared_experts", None) if config.model_type in EXPERTS else None
    return count * config.moe_intermediate_size if count else None


def has_query_norms(config: Any) -> bool:
    return config.model_type in ("qwen3", "qwen3_moe") or getattr(config, "use_qk_norm", False)


def has_query_biases(config: Any) -> bool:
    return config.model_type == "qwen2" or (
        config.model_type in ATTENTION_BIASES and getattr(config, "attention_bias", False)
    )


def is_latent(config: Any) -> bool:
    """Whether keys and values are compressed (MLA)."""
    return config.model_type in LATENT


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def padded_vocabulary(config: Any, sizes: ParallelSizes) -> int:
    """Tokens of the embedding, filled up so that every tensor rank has equally many."""
    return -(-config.vocab_size // sizes.tensor) * sizes.tensor


def stage_chunks(config: Any, sizes: ParallelSizes, stage: int) -> list[range]:
    """The layers of a stage, chunk by chunk: the first chunks of all stages come before the second ones."""
    counts = [_shared_out(count, sizes.virtual) for count in _layers_by_stage(config, sizes)]
    ends = list(accumulate(counts[stage][chunk] for chunk in range(sizes.virtual) for stage in range(sizes.pipeline)))
    places = range(stage, len(ends), sizes.pipeline)
    return [range(ends[place - 1] if place else 0, ends[place]) for place in places]


def stage_layers(config: Any, sizes: ParallelSizes, stage: int) -> list[int]:
    """The layers of a stage, as their numbers in the whole model."""
    return [layer for chunk in stage_chunks(config, sizes, stage) for layer in chunk]


def _shared_out(count: int, parts: int) -> list[int]:
    """Equally many, or one more in the first ones."""
    least, more = divmod(count, parts)
    return [least + (part < more) for part in range(parts)]


def _layers_by_stage(config: Any, sizes: ParallelSizes) -> list[int]:
    """How many layers each stage has: what is set for the first and the last, and of the rest equally many, or one more
    in the first ones."""
    given = {0: sizes.first_layers, sizes.pipeline - 1: sizes.last_layers}
    given = {stage: count for stage, count in given.items() if count is not None}
    rest, left = sizes.pipeline - len(given), config.num_hidden_layers - sum(given.values())
    if left < rest * sizes.virtual or (left > 0 and rest == 0) or min(given.values(), default=left) < sizes.virtual:
        chunks = (
            f" with {sizes.virtual} chunks of at least one each" if sizes.virtual > 1 else " with at least one each"
        )
        words = "".join(f", {count} of them set for stage {stage}" for stage, count in given.items())
        raise MegatronError(
            f"{sizes.key}.pipeline_parallel_size={sizes.pipeline}: the model has {config.num_hidden_layers} layers"
            f"{words}, which do not fill {sizes.pipeline} stages{chunks}; set a smaller size, or other "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        )
    others = iter(_shared_out(left, rest) if rest else ())
    return [given[stage] if stage in given else next(others) for stage in range(sizes.pipeline)]


def build(decoder: Any, groups: RankGroups, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """This rank's part of a Hugging Face decoder, in Megatron-Core's modules; its weights are not set."""
    config = decoder.config
    if experts_of(config) is not None:
        adapt_experts(device)
    specs = [
        _layer(decoder, mixture=is_mixture(config, layer)) for layer in stage_layers(config, groups.sizes, groups.stage)
    ]
    block = part("transformer.transformer_block").TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)
    with buffers_on(device), warnings.catch_warnings(action="ignore"):  # that experts are not cut by tokens
        model = (
            part("models.gpt")
            .GPTModel(
                _settings(config, groups.sizes, dtype),
                block,
                vocab_size=padded_vocabulary(config, groups.sizes),
                max_sequence_length=config.max_position_embeddings,
                pre_process=groups.first,
                post_process=groups.last,
                position_embedding_type="none",  # angles are those of the Hugging Face model, by each token's position
            )
            .to(device=device, dtype=dtype)
        )
    for module in model.modules():
        if isinstance(module, part("transformer.mlp").MLP):
            module.activation_func = Gate()
    return model


def _layer(decoder: Any, *, mixture: bool) -> Any:
    """A specification names the class of each part of a layer, which is how attention and routing are replaced."""
    from posttrain.engine.megatron.router import ExpertRouter
    from posttrain.engine.megatron.stage import PackedAttention

    config, rotation_factor = decoder.config, decoder.rotary_emb.attention_scaling
    scale = decoder.layers[0].self_attn.scaling
    layer = part("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
        num_experts=experts_of(config) if mixture else None,
        moe_grouped_gemm=False,
        qk_layernorm=has_query_norms(config),
        normalization="RMSNorm",
    )
    spec = part("transformer.spec_utils").ModuleSpec
    if is_latent(config):
        given = {"model": config, "scale": scale, "rotation_factor": rotation_factor}
        layer.submodules.self_attention = spec(module=LatentAttention, params=given)
    else:
        if has_query_norms(config):
            own = _parts(layer.submodules.self_attention)
            own.q_layernorm = own.k_layernorm = Norm
        # YaRN lengthens rotated queries and keys, here all of a head: the same as a larger scale.
        _parts(layer.submodules.self_attention).core_attention = spec(
            module=PackedAttention, params={"scale": scale * rotation_factor**2}
        )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if mixture:
        _parts(layer.submodules.mlp).router = partial(ExpertRouter, model=config)
    return layer


def _parts(layer: Any) -> Any:
    # Megatron-Core 0.16 describes a layer's parts by a specification, and 0.19 some by a partially applied class.
    return layer.keywords["submodules"] if isinstance(layer, partial) else layer.submodules


class Norm(torch.nn.RMSNorm):
    """Takes the place of Megatron-Core's norm of torch, which rejects sequence parallelism: nothing would sum its
    gradient over tensor ranks there. `MegatronOptimizer` does."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not train.on_cuda(x):
            return super().forward(x)
        flat = train.RmsNorm.apply(x.flatten(0, -2), self.weight, self.eps)  # pyright: ignore
        return flat.view(x.shape)


class Gate(torch.nn.Module):
    """silu(gate) * up of what holds both, in one kernel each way where there is one."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.numel() and train.can_train(gate_up):  # no token may have been sent to an expert
            return train.Gated.apply(gate_up.flatten(0, -2)).unflatten(0, gate_up.shape[:-1])  # pyright: ignore
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


def _settings(config: Any, sizes: ParallelSizes, dtype: torch.dtype) -> Any:
    return part("transformer").TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        ffn_hidden_size=config.intermediate_size,
        add_bias_linear=False,
        add_qkv_bias=has_query_biases(config),
        qk_layernorm=has_query_norms(config),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_te_activation_func=True,  # an MLP calls its own `activation_func` on gate and up: `Gate`
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
        sequence_parallel=sizes.sequence,
        **_expert_settings(config, sizes),
    )


def _expert_settings(config: Any, sizes: ParallelSizes) -> dict[str, Any]:
    experts = experts_of(config)
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "moe_shared_expert_intermediate_size": shared_width(config),
        "moe_router_load_balancing_type": "none",  # its auxiliary loss would change the gradient of the RL loss
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": 1,
    }


# Attention with compressed keys and values (MLA, DeepSeek-V2 and V3), over Megatron-Core's parallel matrices.
#
# Megatron-Core's own MLA needs TransformerEngine for packed rows, and builds its down projections as column-parallel
# matrices that every tensor rank gathers again. Here they are whole on every rank, as they are small, and only the up
# projections, by heads, are cut.
#
# Shapes: T packed tokens, H heads of this rank, D size of a query's or key's head, V of a value's, R of its rotated
# part.


EPSILON = 1e-6  # of the norms of latents: transformers does not take it from the model's config


class LatentAttention(torch.nn.Module):
    """Takes the place of `self_attention` in a layer of Megatron-Core. `model` is the Hugging Face config; cosines and
    sines are multiplied by `rotation_factor`."""

    def __init__(
        self,
        config: Any,
        *_: Any,
        model: Any,
        scale: float,
        rotation_factor: float,
        pg_collection: Any,
        **__: Any,
    ) -> None:
        super().__init__()
        self.scale, self.rotation_factor = scale, rotation_factor
        self.interleaved = getattr(model, "rope_interleave", True)
        self.latent, heads = model.kv_lora_rank, model.num_attention_heads
        self.plain, self.rotated, self.value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        layers = part("tensor_parallel.layers")
        made = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": pg_collection.tp}
        width, query = model.hidden_size, model.q_lora_rank

        def whole(inputs: int, outputs: int) -> torch.nn.Linear:
            return torch.nn.Linear(inputs, outputs, bias=False, dtype=config.params_dtype)

        if query is not None:
            self.query_down, self.query_norm = whole(width, query), torch.nn.RMSNorm(query, EPSILON)
        self.compressed_queries = query is not None
        self.query_up = layers.ColumnParallelLinear(query or width, heads * (self.plain + self.rotated), **made)
        self.latent_down = whole(width, self.latent + self.rotated)
        self.latent_norm = torch.nn.RMSNorm(self.latent, EPSILON)
        self.latent_up = layers.ColumnParallelLinear(self.latent, heads * (self.plain + self.value), **made)
        self.linear_proj = layers.RowParallelLinear(
            heads * self.value, width, input_is_parallel=True, skip_bias_add=True, **made
        )
        region, self.group = part("tensor_parallel.mappings"), pg_collection.tp
        # From what all tensor ranks have, or from their stretches of it, to what their own heads read.
        self.for_heads = (
            region.gather_from_sequence_parallel_region
            if config.sequence_parallel
            else region.copy_to_tensor_model_parallel_region
        )

    def forward(self, hidden: torch.Tensor, attention_mask: Any = None, *, rotary_pos_emb: Any, **_: Any) -> Any:
        """((T, 1, E), no bias) from (T, 1, E): one sequence that holds all rows, or this rank's stretch of it."""
        layout = active_layout()
        assert layout is not None, "rows of this engine are packed"
        compressed = self.query_norm(self.query_down(hidden)) if self.compressed_queries else hidden
        query = self.query_up(compressed)[0][:, 0].unflatten(-1, (-1, self.plain + self.rotated))
        latent, key_rotated = self.latent_down(hidden).split([self.latent, self.rotated], -1)
        # All heads read this part of the key: the gradients of all tensor ranks' heads are added up.
        key_rotated = self.for_heads(key_rotated, group=self.group)
        both = self.latent_up(self.latent_norm(latent))[0][:, 0].unflatten(-1, (-1, self.plain + self.value))
        key_plain, value_THV = both.split([self.plain, self.value], -1)
        query_plain, query_rotated = query.split([self.plain, self.rotated], -1)
        angles = rotary_pos_emb[:, 0]  # (T, 1, R)
        query_THD = torch.cat([query_plain, self._rotate(query_rotated, angles)], -1)
        shared = self._rotate(key_rotated, angles).expand(-1, query.shape[1], -1)
        key_THD = torch.cat([key_plain, shared], -1)
        # The kernels have one size for all three.
        filled = torch.nn.functional.pad(value_THV, (0, query_THD.shape[-1] - self.value))
        out_THD = stretch_attention(query_THD, key_THD, filled, layout, scale=self.scale)
        return self.linear_proj(out_THD[..., : self.value].flatten(1)[:, None])

    def _rotate(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        if self.interleaved:  # pairs lie side by side in the weights
            x = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
        first, second = x.chunk(2, -1)
        cosines, sines = ((f(angles) * self.rotation_factor).to(x.dtype) for f in (torch.cos, torch.sin))
        return x * cosines + torch.cat([-second, first], -1) * sines

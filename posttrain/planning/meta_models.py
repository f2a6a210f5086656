"""The models of a run on torch's meta device: their real code, with shapes and types but no contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from posttrain.config.model import SCORE_HEADS, ModelConfig
from posttrain.config.rollout import RewardModelModelConfig
from posttrain.config.root import PPOConfig
from posttrain.errors import first_line
from posttrain.kernels.packed_attention import active_layout
from posttrain.kernels.scores import ScoreChanges, changed_attention
from posttrain.models.attention import attention as packed_rows_attention
from posttrain.models.attention import set_attention
from posttrain.models.forward import ValueModel, without_adapters
from posttrain.models.fused_layer import fuse_layers, fuse_norms
from posttrain.models.loading import ModelError, local_or_hub, own_attention
from posttrain.models.lora import add_adapters
from posttrain.models.quantized import quantized_bytes
from posttrain.models.recurrent import answer_recurrence
from posttrain.models.scorer_loading import CLASSIFIER

ATTENTION = "posttrain_meta"
META = torch.device("meta")


class _FusedAttention(torch.autograd.Function):
    """Holds what a fused kernel holds: queries, keys, values, output, one number per query, and a mask in their type;
    never the scores."""

    @staticmethod
    def forward(ctx, query, key, value, mask):
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        masks = [] if mask is None else [mask.to(query.dtype)]
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32), *masks)
        return out

    @staticmethod
    def backward(ctx, grad_out):  # pyright: ignore[reportIncompatibleMethodOverride]
        return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None


class _FusedKernels(TorchFunctionMode):
    """While open, torch's own attention is the fused kernel that it has on a CPU and on CUDA, and not on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*args, kwargs["attn_mask"])
        return func(*args, **(kwargs or {}))


_counts_paged = False


@contextmanager
def counted_as_paged() -> Iterator[None]:
    """While open, attention is that of a rollout engine's steps: kernels over the cache, which hold no scores."""
    global _counts_paged
    _counts_paged = True
    try:
        yield
    finally:
        _counts_paged = False


def _attention(module: torch.nn.Module, query, key, value, attention_mask, **kwargs: Any):
    if active_layout() is not None:
        with _FusedKernels():
            return packed_rows_attention(module, query, key, value, None, **kwargs)
    query, key, value = (x.clone(memory_format=torch.contiguous_format) for x in (query, key, value))  # as rectangles
    changes = ScoreChanges(kwargs.get("softcap"), kwargs.get("s_aux"))
    if changes and not _counts_paged:  # training has no kernel for caps and sinks, and holds all scores
        out = changed_attention(query, key, value, None, scale=1.0, changes=changes)
    else:
        out = _FusedAttention.apply(query, key, value, None)
    return out.transpose(1, 2).contiguous(), None  # pyright: ignore


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def meta_model(
    config: ModelConfig, dtype: torch.dtype, *, path: str | None = None, quantized: bool = False
) -> torch.nn.Module:
    """The causal LM of `config` without contents, its parameters in the types that a run would give them.

    Linear layers that a run would hold in 4 bits keep their shapes here, and are marked with the bytes they would take.
    """
    from transformers import AutoModelForCausalLM

    model = _without_contents(AutoModelForCausalLM, _model_settings(config, path or config.path), config, dtype)
    if quantized:
        _hold_in_4_bits(model, [model.get_output_embeddings()])
    return model


def _without_contents(kind: Any, settings: Any, config: ModelConfig, dtype: torch.dtype) -> Any:
    """The model of an auto class of transformers, with the fused parts of a run."""
    with META:
        model = kind.from_config(
            settings, dtype=dtype, trust_remote_code=config.trust_remote_code, **own_attention(settings)
        )
    # A run packs rows where the attention that it puts in is used; here its cost is what counts.
    packs = model.config._attn_implementation != "eager" or own_attention(model.config)
    if packs and model._can_set_attn_implementation():
        set_attention(model, ATTENTION)
        answer_recurrence(model)
    fuse_norms(model)
    fuse_layers(model)
    return model.eval()


def _hold_in_4_bits(model: torch.nn.Module, heads: Sequence[torch.nn.Module]) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and not any(module is head for head in heads):
            module.weight.held_bytes = quantized_bytes(module.weight.numel())  # pyright: ignore
            module.weight.requires_grad_(False)


def _model_settings(config: ModelConfig, path: str | None) -> Any:
    """The model's config.json with `model.override_config` laid over it; no weights are read."""
    from transformers import AutoConfig

    from posttrain.models.embedded import build_model, byte_tokenizer

    if path in (None, "embedded"):
        with META:
            settings = build_model(byte_tokenizer()).config
    else:
        source = local_or_hub(path)
        try:
            settings = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(
                f"model.path={path}: the model's config.json could not be read: {first_line(error)}\n"
                "  The plan needs that file alone: give a folder that holds it, or a hub id that can be reached."
            ) from error
    for key, value in config.override_config.items():
        setattr(settings, key, value)
    return settings


def meta_scorer(config: RewardModelModelConfig, dtype: torch.dtype) -> torch.nn.Module:
    """The reward model without contents."""
    return _classifier(ModelConfig(path=config.path, trust_remote_code=config.trust_remote_code), dtype)


def _classifier(config: ModelConfig, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForSequenceClassification

    settings = _model_settings(config, config.path)
    settings.num_labels, settings.pad_token_id = 1, settings.get_text_config().pad_token_id or 0
    return _without_contents(AutoModelForSequenceClassification, settings, config, dtype)


def is_scorer(model: Any) -> bool:
    """Whether this is a reward model, adapters or not."""
    return CLASSIFIER in type(without_adapters(model)).__name__


def actor_model(config: ModelConfig, dtype: torch.dtype) -> torch.nn.Module:
    """The policy, with adapters if `lora_rank` asks for them."""
    model = meta_model(config, dtype, quantized=config.quantization is not None)
    return add_adapters(model, config) if config.lora_rank > 0 else model


def pair_model(config: ModelConfig, dtype: torch.dtype) -> torch.nn.Module:
    """A reward model that is trained, with adapters beside its head if `lora_rank` asks for them."""
    model = _classifier(config, dtype)
    if config.quantization is not None:
        _hold_in_4_bits(model, [part for name, part in model.named_children() if name in SCORE_HEADS])
    return add_adapters(model, config, whole=SCORE_HEADS, role="") if config.lora_rank > 0 else model


def critic_model(config: PPOConfig, dtype: torch.dtype) -> torch.nn.Module:
    """The value model, with adapters and a 4-bit base as a run would give it."""
    model, critic = config.actor_rollout_ref.model, config.critic.model
    adapted = critic.lora_rank > 0
    whole = meta_model(model, dtype, path=critic.path, quantized=adapted and model.quantization is not None)
    if adapted:
        whole = add_adapters(whole, critic, role="critic.").get_base_model()  # pyright: ignore
    return ValueModel(whole)

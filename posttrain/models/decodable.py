"""Which models `FastDecoder` decodes, and which of them exactly (`trainer.exact`): with the trainer's own bits."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.errors import UserError
from posttrain.kernels.ordered import why_not_ordered
from posttrain.models.arena import SHARED, base_layer
from posttrain.models.feed_forward import MIXTURES, can_mix, is_mixture
from posttrain.models.forward import forward_mode_of, head_of, without_adapters
from posttrain.models.lora import has_adapters

KNOWN = ("qwen2", "qwen3", "llama", "mistral")  # architectures without experts; MIXTURES are the others
# One window for all layers, in the config; other models state it per layer.
_WINDOW_IN_SETTINGS = ("mistral", "mixtral", "olmoe")
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # others depend on the sequence length
ALIGNED = 8  # tokens, 16 bytes: of 97 tokens, the logits of one or two rows have other bits than those of many (H200)
WHOLE = 64  # numbers in a step of a matrix unit; torch multiplies other widths by kernels with other sums


def can_decode_fast(module: Any) -> bool:
    """Whether this model has a known architecture, with nothing unusual in its layers."""
    config = module.config
    if config.model_type not in (*KNOWN, *MIXTURES) or config.hidden_act != "silu":
        return False
    if getattr(config, "clip_qkv", None) is not None:
        return False
    if config.rope_parameters.get("rope_type", "default") not in _FIXED_ROTATIONS:
        return False
    layers = without_adapters(module).base_model.layers
    if not all(can_mix(layer.mlp) for layer in layers if is_mixture(layer.mlp)):
        return False
    parts = [
        getattr(home, f"{name}_proj")
        for layer in layers
        for home, names in ((layer.self_attn, "qkvo"), (_gated_part(layer.mlp), ("gate", "up", "down")))
        for name in names
        if home is not None
    ]
    return all(type(base_layer(part)) is torch.nn.Linear and _plain_adapter(part) for part in [*parts, head_of(module)])


def window_of(layer: Any) -> int | None:
    """How many tokens the attention of a layer sees; None for all."""
    attention = layer.self_attn
    config = attention.config
    return getattr(config if config.model_type in _WINDOW_IN_SETTINGS else attention, "sliding_window", None)


def _gated_part(block: Any) -> Any:
    return getattr(block, SHARED, None) if is_mixture(block) else block


def _plain_adapter(part: Any) -> bool:
    if part is base_layer(part):
        return True
    known = list(part.lora_A) == ["default"] and not part.merged and not any(getattr(part, "use_dora", {}).values())
    return known and part.lora_A["default"].bias is None and part.lora_B["default"].bias is None


def check_exact(module: Any, device: torch.device | None = None) -> None:
    """Raise unless this model can be decoded and trained exactly on the device (by default, where it is).

    The order of every sum is that of `posttrain/kernels/ordered.py` and of the compiled kernels beside it;
    `FastDecoder` and the fused training pass are the two callers.
    """
    if (why := why_not_exact(module, device)) is not None:
        raise UserError(f"trainer.exact=True: {why}. Remove the setting: log-probs then agree up to rounding")


def why_not_exact(module: Any, device: torch.device | None = None) -> str | None:
    """Why this model's log-probs cannot be bitwise equal in rollout and trainer; None if they are."""
    weight, config = next(module.parameters()), module.config
    if (why := why_not_ordered(weight.dtype, device or weight.device)) is not None:
        return why
    if config.model_type not in KNOWN or not can_decode_fast(module):
        return f"it is built for models of the kinds {', '.join(KNOWN)}, and this one is {config.model_type}"
    if type(head_of(module)) is not torch.nn.Linear:
        return "its head has adapters (leave lm_head out of target_modules)"
    if not forward_mode_of(module).packed:
        return "its sequences are not computed packed"
    return _why_not_on_cuda(module) if (device or weight.device).type == "cuda" else None


def _why_not_on_cuda(module: Any) -> str | None:
    if has_adapters(module):
        return "on CUDA it is not built for LoRA: merged into a bfloat16 weight, an adapter would be rounded away"
    config = module.config
    if any(size % WHOLE for size in (config.hidden_size, config.intermediate_size)):
        return f"on CUDA it is built for models whose widths are multiples of {WHOLE}"
    if config.vocab_size % ALIGNED:
        size = config.vocab_size
        return f"on CUDA it is built for vocabularies of a multiple of {ALIGNED} tokens, and this one has {size}"
    if any(window_of(layer) for layer in without_adapters(module).base_model.layers):
        return "on CUDA it is not built for sliding windows"
    return None

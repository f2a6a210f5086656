"""Which models rollout and trainer compute with the same bits: `trainer.exact`.

The order of every sum is that of `posttrain/kernels/ordered.py` and of the compiled kernels beside it; `FastDecoder`
and the fused training pass are the two callers.
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain.errors import UserError
from posttrain.kernels.ordered import why_not_ordered
from posttrain.models.decoder import KNOWN, can_decode_fast, window_of
from posttrain.models.forward import forward_mode_of, head_of, without_adapters
from posttrain.models.lora import has_adapters


def check_exact(module: Any, device: torch.device | None = None) -> None:
    """Raise unless this model can be decoded and trained exactly on the device (by default, where it is)."""
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
    if any(window_of(layer) for layer in without_adapters(module).base_model.layers):
        return "on CUDA it is not built for sliding windows"
    return None

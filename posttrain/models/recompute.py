"""Gradient checkpointing: recomputes the inside of a layer in the backward pass instead of storing it.

transformers does so only in training mode, which also switches on dropout that models call as a function or read from
their configuration. Here the model stays in evaluation mode, so that both passes are equal and nothing is random.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recompute_layers(model: torch.nn.Module, on: bool = True) -> None:
    """From now on, let layers store only their input when gradients are needed; `on=False` reverts that."""
    for layer in _layers(model):
        if not hasattr(layer, "recomputes"):
            layer.forward = partial(_recomputed, layer, layer.forward)
        layer.recomputes = on  # pyright: ignore


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    # The layers that transformers would recompute; if a model marks none, the parts of its largest list.
    from transformers.modeling_layers import GradientCheckpointingLayer

    marked = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {id(part) for layer in marked for part in layer.modules() if part is not layer}
    if marked:
        return [layer for layer in marked if id(layer) not in inner]
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=_size)) if lists else []


def _size(parts: torch.nn.ModuleList) -> int:
    return sum(weight.numel() for weight in parts.parameters())


def _recomputed(layer: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not layer.recomputes or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

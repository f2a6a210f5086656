"""Whole weights of a sharded model: gathered a layer at a time, so that no rank holds more than one layer's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from posttrain.engine.optim import whole
from posttrain.engine.ranks import this_rank
from posttrain.engine.sharding import Named, owned_modules, whole_weights
from posttrain.models.adapter_files import trained_parameters
from posttrain.models.forward import without_adapters
from posttrain.models.lora import save_model
from posttrain.models.quantized import plain_weight


def whole_state(model: torch.nn.Module, forward_pass: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of all weights under their Hugging Face names, adapters folded in. All ranks must iterate to the end:
    each layer is gathered by all of them."""
    for part, modules in owned_modules(without_adapters(model), forward_pass):
        with torch.no_grad(), whole_weights(part):
            copies = _copies(modules)
        yield from copies.items()


def _copies(modules: Named) -> dict[str, torch.Tensor]:
    """Weights and persistent buffers of these modules; tied ones are one copy."""
    from peft.tuners.lora import LoraLayer

    adapted = {name: module for name, module in modules if isinstance(module, LoraLayer)}
    copies: dict[int, torch.Tensor] = {}  # by identity, which holds here: all modules of the part are alive
    found: dict[str, torch.Tensor] = {}
    for name, module in modules:
        if ".lora_" in f".{name}":
            continue
        kept = {key: value for key, value in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for own, weight in (*module.named_parameters(recurse=False), *kept.items()):
            if weight is None:
                continue
            if id(weight) not in copies:
                copies[id(weight)] = plain_weight(weight).detach().clone()
            found[f"{name}.{own}".replace(".base_layer.", ".")] = copies[id(weight)]
    for name, module in adapted.items():
        weight = found[f"{name}.weight"]
        found[f"{name}.weight"] = weight + module.get_delta_weight("default").to(weight.dtype)  # pyright: ignore
    return found


def host_copies(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies in host memory on rank 0, empty on the others, which only take part in gathering.

    A tied weight arrives as one tensor under several names and stays one tensor. The tensors are freed as the walk
    moves on, and the `id` of a freed one is reused for the next, so copies are looked up by weak references. Weights
    that are in host memory already are copied too: the same code then runs on a CPU as on a GPU.
    """
    copies = WeakTensorKeyDictionary()
    state = {}
    for name, weight in weights:
        if this_rank() == 0:
            if weight not in copies:
                copies[weight] = weight.to("cpu", copy=True)
            state[name] = copies[weight]
    return state


def export_from_ranks(
    model: torch.nn.Module,
    forward_pass: torch.nn.Module,
    folder: Path,
    adapter: Mapping[str, Any] | None,
    *,
    merged: bool,
) -> None:
    """A Hugging Face folder, written by rank 0 with what all ranks give it."""
    if adapter is not None and not merged:
        state = {name: whole(weight.detach()).cpu() for name, weight in trained_parameters(model).items()}
    else:
        state = host_copies(whole_state(model, forward_pass))
    if this_rank() == 0:
        save_model(model, folder, adapter, merged=merged, state=state)

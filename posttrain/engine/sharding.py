"""A model sharded over ranks by FSDP2: each layer is one unit, and the weights outside the layers belong to the pass.

A layer's weights are whole on every rank only while it computes. A rank keeps its shard of every weight in the
precision of the optimizer; weights are gathered in the precision of the model, which halves what travels. Exports
gather a layer at a time, so that no rank holds more than one whole layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from posttrain.engine.export import export_by_files
from posttrain.engine.optim import whole
from posttrain.engine.ranks import Ranks, this_rank
from posttrain.models.adapter_files import trained_parameters
from posttrain.models.forward import decoder_of, without_adapters
from posttrain.models.lora import save_model
from posttrain.models.quantized import plain_weight

Named = list[tuple[str, torch.nn.Module]]
WIDE = (torch.float32, torch.float64)


def shard(forward_pass: torch.nn.Module, model: torch.nn.Module, ranks: Ranks) -> None:
    """Shard `model` over the ranks; from now on it computes inside `forward_pass` only.

    Fused layers must have been put in before: FSDP2 changes the class of a layer. Loaded weights are memory-mapped from
    their file, and all processes of a machine share those pages; a rank copies its shard a layer at a time, so that it
    never holds the whole model in memory of its own.
    """
    dtype = _widened_type(model)
    if dtype is None:
        policy = MixedPrecisionPolicy(reduce_dtype=None, cast_forward_inputs=False)
    else:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Packed 4-bit weights cannot be split along a dimension, and they are small: every rank keeps them whole.
    held = {weight for weight in model.parameters() if not weight.is_floating_point()}
    for part in (*_layers(decoder_of(model)), forward_pass):
        if dtype is not None:
            _widen(part)
        # `fully_shard` of the pass comes last: it takes only the weights that no layer has taken.
        fully_shard(part, mesh=ranks.mesh, mp_policy=policy, ignored_params=_of(part, held))
    for part in sharded_parts(forward_pass):
        part.set_force_sum_reduction_for_comms(True)  # token weights come from all ranks' rows: gradients are summed
        part.set_gradient_divide_factor(1.0)


def _of(layer: torch.nn.Module, weights: set[torch.nn.Parameter]) -> set[torch.nn.Parameter] | None:
    return {weight for weight in layer.parameters() if weight in weights} or None


def _widened_type(model: torch.nn.Module) -> torch.dtype | None:
    """The low precision of trained weights, which are kept in float32 and gathered in this type.

    None where all are wide already, as adapters are: beside them the base keeps its type.
    """
    low = {weight.dtype for weight in model.parameters() if weight.requires_grad and weight.dtype not in WIDE}
    if not low:
        return None
    (dtype,) = low
    return dtype


def _widen(part: torch.nn.Module) -> None:
    """Weights of this part that are not sharded yet, in float32."""
    for weight in part.parameters():
        if weight.is_floating_point() and not isinstance(weight, DTensor):
            weight.data = weight.data.float()


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers of the stacks that lie in a model."""
    for child in module.children():
        yield from child if isinstance(child, torch.nn.ModuleList) else _layers(child)


def sharded_parts(forward_pass: Any) -> list[FSDPModule]:
    """The layers and, last, the pass itself."""
    parts = [part for part in forward_pass.modules() if isinstance(part, FSDPModule)]
    return [*parts[1:], parts[0]]


def set_last_backward(forward_pass: torch.nn.Module, last: bool) -> None:
    """Whether copies of the model (HSDP) sum their gradients in the next pass: once per update, in its last pass, since
    the sum over passes travels as easily as that of one."""
    assert isinstance(forward_pass, FSDPModule)
    forward_pass.set_requires_all_reduce(last)
    forward_pass.set_is_last_backward(last)


def drop_whole_weights(forward_pass: torch.nn.Module) -> None:
    """After passes without gradient: FSDP2 leaves the weights of the outermost module gathered, and they would be stale
    after the next update."""
    assert isinstance(forward_pass, FSDPModule)
    forward_pass.reshard()


def owned_modules(model: torch.nn.Module, forward_pass: torch.nn.Module) -> Iterator[tuple[FSDPModule, Named]]:
    """By part, the modules of `model` (with their names) whose own weights are gathered with it."""
    found: dict[int, Named] = {id(part): [] for part in sharded_parts(forward_pass)}

    def walk(name: str, module: torch.nn.Module, part: int) -> None:
        part = id(module) if id(module) in found else part
        found[part].append((name, module))
        for own, child in module.named_children():
            walk(f"{name}.{own}" if name else own, child, part)

    walk("", model, id(forward_pass))
    for part in sharded_parts(forward_pass):
        yield part, found[id(part)]


@contextmanager
def whole_weights(part: FSDPModule) -> Iterator[None]:
    """Inside, the weights of this part are whole on every rank, as it computes with them."""
    part.unshard()
    try:
        yield
    finally:
        part.reshard()


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


def export_from_ranks(
    model: torch.nn.Module,
    forward_pass: torch.nn.Module,
    folder: Path,
    adapter: Mapping[str, Any] | None,
    *,
    merged: bool,
) -> None:
    """A Hugging Face folder, written by rank 0 with what all ranks give it."""

    def save(part: Path, state: Mapping[str, torch.Tensor]) -> None:
        save_model(model, part, adapter, merged=merged, state=state)

    if adapter is not None and not merged:
        state = {name: whole(weight.detach()).cpu() for name, weight in trained_parameters(model).items()}
        if this_rank() == 0:
            save(folder, state)
    else:
        export_by_files(whole_state(model, forward_pass), folder, save)

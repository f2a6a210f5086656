"""A model sharded over ranks by FSDP2: each layer is one unit, and the weights outside the layers belong to the pass.

A layer's weights are whole on every rank only while it computes. A rank keeps its shard of every weight in the
precision of the optimizer; weights are gathered in the precision of the model, which halves what travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from posttrain.engine.ranks import Ranks
from posttrain.models.forward import decoder_of

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


def last_backward(forward_pass: torch.nn.Module, last: bool) -> None:
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

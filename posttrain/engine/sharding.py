"""A model cut over ranks by FSDP2: its layers one by one, and what is left of it with the whole pass.

A layer's weights are whole on every rank only while it computes. What a rank keeps is its part of every weight, in the
precision of the optimizer; they are gathered in the precision of the model.
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
    """Cut `model` over the ranks; from now on it computes inside `forward_pass` only.

    Fused layers must have been put in before: a layer that is cut is of a class of its own. Weights as they were loaded
    lie in the pages of their file, which all processes of a machine share; a rank copies its part of them, a layer at a
    time, so that it never holds the model in memory of its own.
    """
    dtype = _widened_type(model)
    if dtype is None:
        policy = MixedPrecisionPolicy(reduce_dtype=None, cast_forward_inputs=False)
    else:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    held = {weight for weight in model.parameters() if not weight.is_floating_point()}  # 4 bits: on every rank
    for part in (*_layers(decoder_of(model)), forward_pass):
        if dtype is not None:
            _widen(part)
        fully_shard(part, mesh=ranks.mesh, mp_policy=policy, ignored_params=_of(part, held))
    for part in sharded_parts(forward_pass):
        part.set_force_sum_reduction_for_comms(True)  # token weights come from all ranks' rows: gradients are summed
        part.set_gradient_divide_factor(1.0)


def _of(layer: torch.nn.Module, weights: set[torch.nn.Parameter]) -> set[torch.nn.Parameter] | None:
    return {weight for weight in layer.parameters() if weight in weights} or None


def _widened_type(model: torch.nn.Module) -> torch.dtype | None:
    """The low precision of weights that are trained: they are held in float32, and gathered as what they were.

    None where there are none. Beside adapters the base keeps its type: they are float32 already, and are computed with
    as such.
    """
    low = {weight.dtype for weight in model.parameters() if weight.requires_grad and weight.dtype not in WIDE}
    if not low:
        return None
    (dtype,) = low
    return dtype


def _widen(part: torch.nn.Module) -> None:
    """What is not cut yet of this part, in float32."""
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
    """Whether copies of the model exchange gradients in the passes to come: once per update, in its last pass."""
    assert isinstance(forward_pass, FSDPModule)
    forward_pass.set_requires_all_reduce(last)
    forward_pass.set_is_last_backward(last)


def drop_whole_weights(forward_pass: torch.nn.Module) -> None:
    """After passes without gradient, which leave the weights of the pass itself gathered: they would go stale."""
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

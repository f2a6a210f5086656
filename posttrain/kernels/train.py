"""The parts of a decoder layer's training pass between its matrix products, as compiled kernels.

Float32 on a CPU (cpu/train.cpp), bfloat16 and float16 on a CUDA device (cuda/layers.py, cuda/flash.py). Elsewhere
torch's own operations are used: those of `packed_attention` for attention, and transformers' layer for the rest
(`posttrain/models/fused_layer.py` chooses).

Shapes: T packed tokens, H heads of queries, K heads of keys, D head size, E width of the model, I of the gated layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from posttrain.kernels import cuda
from posttrain.kernels.compiled import kernel, why_not
from posttrain.kernels.decode import silu_mul

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Shape(ctypes.Structure):
    _fields_ = (
        ("tokens", _LONG),
        ("units", _LONG),
        *((name, ctypes.c_int32) for name in ("query_heads", "key_heads", "size", "threads")),
        ("scale", ctypes.c_float),
    )


class _Sight(ctypes.Structure):
    _fields_ = tuple((name, _POINTER) for name in ("unit_starts", "end"))


@dataclass
class Sight:
    """Which tokens attend to which: those of a unit to the tokens before them that are in the same row.

    A unit is a row, or a tree of rows that share their beginnings: each beginning is followed by all that continues it,
    branch by branch. So a token is seen from its own place up to the end of what continues it.
    """

    unit_starts: np.ndarray  # (units + 1,) int64
    end: np.ndarray  # (T,) int32, the place behind the last token that sees this one
    state: Any = None  # the dropout state that flash kernels return and want back, though nothing is dropped
    exact: bool = False  # whether a forward pass on a CUDA device has the bits of decoding (`cuda/ordered.py`)

    @classmethod
    def of(cls, lengths: Sequence[int], end_T: np.ndarray | None = None) -> Sight:
        """From the units' lengths and the tokens' ends; None where every unit is one row."""
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ends = np.repeat(starts[1:], lengths) if end_T is None else end_T
        return cls(starts, ends.astype(np.int32))

    @cached_property
    def pieces(self):
        """The same for the flash kernels on a CUDA device."""
        from posttrain.kernels.cuda.flash import Pieces

        found = Pieces.of(self.unit_starts, self.end, torch.device("cuda"))
        found.exact = self.exact
        return found

    @cached_property
    def walks(self):
        """The keys of every token in the order in which an exact pass goes through them."""
        from posttrain.kernels.cuda.ordered import Walks

        return Walks.of(self.unit_starts, self.end, torch.device("cuda"))

    def pointers(self) -> _Sight:
        return _Sight(*(array.ctypes.data for array in (self.unit_starts, self.end)))


def ends_of_responses(lengths: Sequence[int], segment_T: np.ndarray) -> np.ndarray:
    """(T,) the ends of units that are a prompt (segment 0) and responses to it (from 1)."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    unit_T = np.repeat(np.arange(len(lengths)), lengths)
    new_T = np.ones(len(segment_T), bool)
    new_T[1:] = (segment_T[1:] != segment_T[:-1]) | (unit_T[1:] != unit_T[:-1])
    bounds = np.append(np.flatnonzero(new_T), len(segment_T))
    own_T = np.repeat(bounds[1:], np.diff(bounds))
    return np.where(segment_T == 0, starts[unit_T + 1], own_T)


def can_train(tensor: torch.Tensor) -> bool:
    """Whether these kernels can be used for tensors of this type and device; meta tensors count as those of a CPU."""
    if on_cuda(tensor):
        return True
    if tensor.dtype is not torch.float32:
        return False
    return why_not() is None if tensor.is_meta else kernel("train_attention", tensor) is not None


def on_cuda(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels are used: flash attention supports only the half types."""
    return tensor.dtype is not torch.float32 and cuda.runs_here(tensor)


def can_attend(size: int, tensor: torch.Tensor) -> bool:
    """Whether attention over heads of this size can be trained by these kernels."""
    return can_train(tensor) and (not tensor.is_cuda or (size % 8 == 0 and size <= 256))


def _call(name: str, like: torch.Tensor, *arguments) -> None:
    if like.is_meta:  # a memory plan counts the tensors and computes nothing
        return
    function = kernel(name, like)
    assert function is not None
    function(*(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments))


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements > 16384 else 1


def _shape(query_THD: torch.Tensor, key_heads: int, units: int, scale: float) -> _Shape:
    tokens, heads, size = query_THD.shape
    return _Shape(tokens, units, heads, key_heads, size, _threads(query_THD.numel()), scale)


def spare_rows(x_TE: torch.Tensor, sight: Sight, size: int) -> int:
    """Spare rows behind the last token with which attention over heads of this size needs no padded copies.

    Queries, keys and values may have them, of any finite numbers; outputs have them then, gradients have not."""
    return sight.pieces.spare_rows(size) if on_cuda(x_TE) else 0


def attention_forward(query_THD, key_TKD, value_TKD, sight: Sight, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, logarithms of the sums of exponentials), (T, H, D) and (T, H). All tensors are contiguous."""
    if on_cuda(query_THD):
        from posttrain.kernels.cuda import flash

        if sight.exact:
            return _exact_attention(query_THD, key_TKD, value_TKD, sight, scale)
        out, logsum, sight.state = flash.attention_forward(query_THD, key_TKD, value_TKD, sight.pieces, scale)
        return out, logsum
    out, logsum = torch.empty_like(query_THD), query_THD.new_empty(query_THD.shape[:2])
    shape, see = _shape(query_THD, key_TKD.shape[1], len(sight.unit_starts) - 1, scale), sight.pointers()
    where = (ctypes.addressof(shape), ctypes.addressof(see))
    _call("train_attention", query_THD, *where, query_THD, key_TKD, value_TKD, out, logsum)
    return out, logsum


def _exact_attention(query_THD, key_TKD, value_TKD, sight: Sight, scale: float):
    from posttrain.kernels.cuda import flash, ordered

    sight.state = flash.no_dropout(query_THD.dtype, query_THD.device)
    walks = sight.walks
    where = (walks.tiles, walks.bases, walks.positions_T, walks.places)
    out, logsum = ordered.tile_attention(query_THD, key_TKD, value_TKD, *where, scale=scale, sums=True)
    assert logsum is not None
    return out, logsum


def attention_backward(
    grad_THD, query_THD, key_TKD, value_TKD, out_THD, logsum_TH, sight: Sight, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value."""
    if on_cuda(query_THD):
        from posttrain.kernels.cuda import flash

        tensors = (query_THD, key_TKD, value_TKD, out_THD, logsum_TH)
        return flash.attention_backward(grad_THD, *tensors, sight.pieces, scale, sight.state)
    # Keys and values collect gradients from many queries; a query's gradient is written once.
    grads = (torch.empty_like(query_THD), torch.zeros_like(key_TKD), torch.zeros_like(value_TKD))
    shape, see = _shape(query_THD, key_TKD.shape[1], len(sight.unit_starts) - 1, scale), sight.pointers()
    tensors = (query_THD, key_TKD, value_TKD, out_THD, logsum_TH, grad_THD.contiguous(), *grads)
    _call("train_attention_backward", query_THD, ctypes.addressof(shape), ctypes.addressof(see), *tensors)
    return grads


def norm_forward(
    x_TE: torch.Tensor, weight_E: torch.Tensor, epsilon: float, copy_TE: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / rms(x) * weight, 1 / rms(x)); x itself is copied to `copy`, if given."""
    if on_cuda(x_TE):
        from posttrain.kernels.cuda import layers

        return layers.norm_forward(x_TE, weight_E, epsilon, copy_TE)
    out, inverse = torch.empty_like(x_TE), x_TE.new_empty(len(x_TE))
    _call("norm_forward", x_TE, x_TE, weight_E, out, inverse, *x_TE.shape, epsilon, _threads(x_TE.numel()))
    if copy_TE is not None:
        copy_TE.copy_(x_TE)
    return out, inverse


def norm_backward(
    grad_TE, x_TE, weight_E, inverse_T, added_TE=None, *, trained: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(gradient of x, plus `added`, and of the weight, if it is `trained`)."""
    if on_cuda(grad_TE):
        from posttrain.kernels.cuda import layers

        return layers.norm_backward(grad_TE, x_TE, weight_E, inverse_T, added_TE, trained=trained)
    grad_x, grad_weight = torch.empty_like(x_TE), torch.empty_like(weight_E)
    tensors = (grad_TE, x_TE, weight_E, inverse_T, added_TE, grad_x, grad_weight)
    _call("norm_backward", x_TE, *tensors, *x_TE.shape, _threads(x_TE.numel()))
    return grad_x, grad_weight if trained else None


def column_sums(x_TC: torch.Tensor) -> torch.Tensor:
    if on_cuda(x_TC):
        from posttrain.kernels.cuda import layers

        return layers.column_sums(x_TC, x_TC.dtype)
    return x_TC.sum(0)


def split_heads(qkv_TC, heads: int, key_heads: int, cosine_TD, sine_TD) -> tuple[torch.Tensor, ...]:
    """Rotated queries and keys, and values, each contiguous, of rows that hold all three; on a CUDA device spare rows
    behind those that there are positions of stay as they are."""
    if on_cuda(qkv_TC):
        from posttrain.kernels.cuda import layers

        return layers.split_heads(qkv_TC, heads, key_heads, cosine_TD, sine_TD)
    size = cosine_TD.shape[1]
    parts = tuple(qkv_TC.new_empty(len(qkv_TC), count, size) for count in (heads, key_heads, key_heads))
    shape = _shape(parts[0], key_heads, 0, 0.0)
    _call("split_heads", qkv_TC, ctypes.addressof(shape), qkv_TC, cosine_TD, sine_TD, *parts)
    return parts


def join_heads(query_THD, key_TKD, value_TKD, cosine_TD, sine_TD) -> torch.Tensor:
    """The gradient of what `split_heads` took, from those of what it gave."""
    if on_cuda(query_THD):
        from posttrain.kernels.cuda import layers

        return layers.join_heads(query_THD, key_TKD, value_TKD, cosine_TD, sine_TD)
    tokens, heads, size = query_THD.shape
    qkv = query_THD.new_empty(tokens, (heads + 2 * key_TKD.shape[1]) * size)
    shape = _shape(query_THD, key_TKD.shape[1], 0, 0.0)
    tensors = (query_THD, key_TKD, value_TKD, cosine_TD, sine_TD, qkv)
    _call("join_heads", query_THD, ctypes.addressof(shape), *tensors)
    return qkv


def gate_backward(grad_TI: torch.Tensor, gate_up_T2I: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(silu(gate) * up once more, gradient of gate_up)."""
    if on_cuda(grad_TI):
        from posttrain.kernels.cuda import layers

        return layers.gate_backward(grad_TI, gate_up_T2I)
    product, grad = torch.empty_like(grad_TI), torch.empty_like(gate_up_T2I)
    _call("gate_backward", grad_TI, grad_TI, gate_up_T2I, product, grad, *grad_TI.shape, _threads(grad.numel()))
    return product, grad


class PackedAttention(torch.autograd.Function):
    """Attention of packed rows; `sight` says which tokens attend to which."""

    @staticmethod
    def forward(ctx, query_THD, key_TKD, value_TKD, sight, scale):
        query, key, value = (x.contiguous() for x in (query_THD, key_TKD, value_TKD))
        out, logsum = attention_forward(query, key, value, sight, scale)
        ctx.save_for_backward(query, key, value, out, logsum)
        ctx.sight, ctx.scale = sight, scale
        return out

    @staticmethod
    def backward(ctx, grad_THD):  # pyright: ignore[reportIncompatibleMethodOverride]
        return (*attention_backward(grad_THD, *ctx.saved_tensors, sight=ctx.sight, scale=ctx.scale), None, None)


class RmsNorm(torch.autograd.Function):
    """The norm that is not part of a layer: before the head."""

    @staticmethod
    def forward(ctx, x_TE, weight_E, epsilon):
        x_TE = x_TE.contiguous()
        out, inverse_T = norm_forward(x_TE, weight_E, epsilon)
        ctx.save_for_backward(x_TE, weight_E, inverse_T)
        return out

    @staticmethod
    def backward(ctx, grad_TE):  # pyright: ignore[reportIncompatibleMethodOverride]
        trained = ctx.needs_input_grad[1]
        return (*norm_backward(grad_TE.contiguous(), *ctx.saved_tensors, trained=trained), None)


class Rotated(torch.autograd.Function):
    """Queries and keys turned by cosines and sines (T, D) of whole heads, and values as they are, where rotation is not
    part of a layer's own function."""

    @staticmethod
    def forward(ctx, query_THD, key_TKD, value_TKD, cosine_TD, sine_TD):
        ctx.save_for_backward(cosine_TD, sine_TD)
        joined = torch.cat([query_THD, key_TKD, value_TKD], 1).flatten(1)
        return split_heads(joined, query_THD.shape[1], key_TKD.shape[1], cosine_TD, sine_TD)

    @staticmethod
    def backward(ctx, grad_THD, grad_TKD, grad_value_TKD):  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = [grad.contiguous() for grad in (grad_THD, grad_TKD, grad_value_TKD)]
        joined = join_heads(*grads, *ctx.saved_tensors).unflatten(1, (-1, grad_THD.shape[2]))
        return *joined.split([grad.shape[1] for grad in grads], 1), None, None


class Gated(torch.autograd.Function):
    """silu(gate) * up of rows that hold both, where it is not part of a layer's own function."""

    @staticmethod
    def forward(ctx, gate_up_T2I):
        gate_up_T2I = gate_up_T2I.contiguous()
        ctx.save_for_backward(gate_up_T2I)
        return silu_mul(gate_up_T2I)

    @staticmethod
    def backward(ctx, grad_TI):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gate_backward(grad_TI.contiguous(), *ctx.saved_tensors)[1]


# -- the gated layer with adapters -------------------------------------------------------------------------------------
# silu(gate + L G) * (up + M U): the gated part of a layer with LoRA adapters. On a CUDA device the
# adapters' products are computed inside the kernels that read gate and up anyway: as products of their own they would
# read and write the two widest tensors of a layer once more each time. Gate and up then stay as the base made them.

# (T, R) and (R, I), whose product is added; None adds nothing.
Factors = tuple[torch.Tensor, torch.Tensor] | None


def adapted_gate_forward(gate_up_T2I: torch.Tensor, gate: Factors, up: Factors) -> torch.Tensor:
    """(T, I). `backward` must be given the same `gate_up`, whatever this did to it."""
    if gate is None and up is None:
        return silu_mul(gate_up_T2I)
    if on_cuda(gate_up_T2I):
        from posttrain.kernels.cuda import adapted_gate

        return adapted_gate.forward(gate_up_T2I, gate, up)
    for half, factors in zip(gate_up_T2I.chunk(2, 1), (gate, up), strict=True):
        if factors is not None:
            half.addmm_(*factors)
    return silu_mul(gate_up_T2I)


def adapted_gate_backward(
    grad_TI: torch.Tensor, gate_up_T2I: torch.Tensor, gate: Factors, up: Factors, added: Factors
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the product once more, gradient of gate and up); `added` is added to the gradient of the product."""
    if on_cuda(grad_TI) and any(factors is not None for factors in (gate, up, added)):
        from posttrain.kernels.cuda import adapted_gate

        return adapted_gate.backward(grad_TI, gate_up_T2I, gate, up, added)
    if added is not None:
        grad_TI = grad_TI.addmm_(*added)
    return gate_backward(grad_TI, gate_up_T2I)

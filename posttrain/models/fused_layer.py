"""A Qwen2, Qwen3, Llama or Mistral layer as one differentiable operation: float32 on a CPU, half precision on CUDA.

transformers' layer over packed sequences takes about thirty operations forward and fifty backward; each reads and
writes memory and is called from Python. Here the matrix products are torch's, a few compiled kernels do the rest, and
gradients are written out. After attention, the last layer continues with only the tokens whose hidden states are
needed. transformers' own layer is the reference, and is used for everything else. Adapters on a frozen base
(`layer_weights.py`) are part of the products; then no gradient of the base is computed.

Shapes: T packed tokens, E width of the model, C columns of queries, keys and values together, D head size.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from posttrain.errors import UserError
from posttrain.kernels import train
from posttrain.kernels.ordered import is_for_cpu
from posttrain.kernels.packed_attention import PackedLayout, active_layout
from posttrain.kernels.sequence_parallel import sequence_group
from posttrain.models.arena import join_products
from posttrain.models.forward import LAYERS
from posttrain.models.layer_weights import FP8_KEY, PARTS, Grads, LayerWeights


def fuse_layers(model: torch.nn.Module) -> None:
    """Give every layer of a known kind the fused pass, which is used whenever `_can_fuse` allows it."""
    config: Any = model.config
    if getattr(config, "hidden_act", None) != "silu":
        return
    for module in model.modules():
        if type(module).__name__ in LAYERS:
            module.forward = types.MethodType(_forward, module)


def join_weights(model: torch.nn.Module) -> None:
    """Store the weights of such layers consecutively, so that they can be one product.

    This copies them out of the memory-mapped file. Weights that are sharded over ranks are therefore left as they are.
    """
    for module in model.modules():
        if type(module).__name__ in LAYERS:
            join_products(module)


def _forward(self: Any, hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any):
    layout, weights = active_layout(), None
    if layout is not None and position_embeddings is not None and _can_fuse(self, hidden_states, layout):
        weights = make_once(self, _weights_in(layout))
    if layout is None or weights is None or position_embeddings is None:
        if layout is not None and layout.exact:
            raise UserError(
                "trainer.exact=True: a layer of this model cannot be computed in the order of decoding: its window is "
                "shorter than a sequence, or its adapters are of another kind than plain LoRA. Remove the setting"
            )
        if layout is not None and layout.fp8 is not None:
            raise UserError(f"{FP8_KEY}: a layer of this model has a window that is shorter than a sequence. Remove it")
        return type(self).forward(self, hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
    layout.answered += 1
    attention = self.self_attn
    return _FusedLayer.apply(
        hidden_states.squeeze(0),  # its gradient is a view too
        (layout.sight, attention.head_dim, attention.scaling, self.input_layernorm.variance_epsilon),
        layout.wanted_T if weights.last else None,
        *layout.rotation(position_embeddings),
        weights,
        *weights.tensors,
    )  # pyright: ignore


def _weights_in(layout: PackedLayout) -> Callable[[Any], LayerWeights | None]:
    if layout.fp8 is not None:
        return layout.fp8.weights_of
    return LayerWeights.ordered if layout.exact else LayerWeights.of


def _can_fuse(layer: Any, hidden: torch.Tensor, layout: PackedLayout) -> bool:
    if hidden.shape[0] != 1 or sequence_group() is not None:
        return False
    if not train.can_attend(layer.self_attn.head_dim, hidden):
        return False
    window = make_once(layer.self_attn, _window)
    return not window or window >= int(layout.lengths.max())


def _window(attention: Any) -> int | None:
    return getattr(attention, "sliding_window", None) or getattr(attention.config, "sliding_window", None)


class _FusedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TE, shape, wanted, cosine_TD, sine_TD, weights: LayerWeights, *tensors):
        sight, size, scale, epsilon = shape
        by_qkv, by_out, by_gate_up, by_down = weights.product_adapters
        heads, key_heads = (rows // size for rows in weights.qkv.rows[:2])
        x_TE = x_TE.contiguous()
        middle_TE = torch.empty_like(x_TE) if wanted is None else x_TE.index_select(0, wanted)
        normed_TE, inverse_T = train.norm_forward(
            x_TE, weights.before, epsilon, copy_TE=middle_TE if wanted is None else None
        )
        tokens = len(x_TE)
        qkv_TC = weights.qkv.product(normed_TE, train.spare_rows(x_TE, sight, size))
        low_qkv = by_qkv.add(qkv_TC[:tokens], normed_TE)
        raw = _norm_heads(qkv_TC[:tokens], weights.head_norms, (heads, key_heads), size, epsilon)
        parts = train.split_heads(qkv_TC, heads, key_heads, cosine_TD, sine_TD)
        attended_THD, logsum_TH = train.attention_forward(*parts, sight=sight, scale=scale)
        attended = _select_wanted(attended_THD[:tokens].flatten(1), wanted)
        weights.out.add_product(middle_TE, attended)
        low_out = by_out.add(middle_TE, attended)
        result_1TE = middle_TE.new_empty(1, *middle_TE.shape)  # not a view: sharding hooks into what a layer returns
        result_TE = result_1TE[0]
        gated_TE, middle_inverse_T = train.norm_forward(middle_TE, weights.between, epsilon, copy_TE=result_TE)
        gate_up_T2I = weights.gate_up.product(gated_TE)
        low_gate_up = by_gate_up.down(gated_TE)
        factors = (by_gate_up.factors(part, low_gate_up) for part in (4, 5))
        product_TI = train.adapted_gate_forward(gate_up_T2I, *factors)
        weights.down.add_product(result_TE, product_TI)
        low_down = by_down.add(result_TE, product_TI)
        ctx.weights, ctx.sight, ctx.scale, ctx.wanted = weights, sight, scale, wanted
        ctx.heads = (heads, key_heads, size)
        ctx.save_for_backward(
            x_TE, normed_TE, inverse_T, cosine_TD, sine_TD, *parts, attended_THD, logsum_TH,
            middle_TE, gated_TE, middle_inverse_T, gate_up_T2I, low_qkv, low_out, low_gate_up, low_down, *raw,
        )  # fmt: skip
        return result_1TE

    @staticmethod
    def backward(ctx, grad_1TE):  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TE, normed_TE, inverse_T, cosine_TD, sine_TD, *rest = ctx.saved_tensors
        *attention, middle_TE, gated_TE, middle_inverse_T, gate_up_T2I = rest[:9]
        low_qkv, low_out, low_gate_up, low_down, *raw = rest[9:]
        weights: LayerWeights = ctx.weights
        by_qkv, by_out, by_gate_up, by_down = weights.product_adapters
        attended_THD, wanted = attention[3], ctx.wanted
        *counts, size = ctx.heads
        trained = any(ctx.needs_input_grad[_TENSORS : _TENSORS + LayerWeights.OWN])
        found: Grads = [None] * (2 * PARTS)
        grad_TE = grad_1TE[0].contiguous()
        grad_low = by_down.back(grad_TE)
        product_TI, grad_gate_up = train.adapted_gate_backward(
            weights.down.back(grad_TE),
            gate_up_T2I,
            *(by_gate_up.factors(part, low_gate_up) for part in (4, 5)),
            added=by_down.into(grad_low),
        )
        by_down.gradients(found, grad_TE, product_TI, low_down, grad_low)
        grad_gated = weights.gate_up.back(grad_gate_up)
        by_gate_up.both(found, grad_gate_up, gated_TE, low_gate_up, grad_gated)
        normed = (middle_TE, weights.between, middle_inverse_T)
        grad_middle, grad_between = train.norm_backward(grad_gated, *normed, grad_TE, trained=trained)
        attended = _select_wanted(attended_THD[: len(x_TE)].flatten(1), wanted)
        grad_out = weights.out.gradients(grad_middle, attended) if trained else ()
        grad_attended = weights.out.back(grad_middle)
        by_out.both(found, grad_middle, attended, low_out, grad_attended)
        grad_attended = _all_tokens(grad_attended, wanted, len(x_TE)).view(len(x_TE), *attended_THD.shape[1:])
        grad_middle = _all_tokens(grad_middle, wanted, len(x_TE))
        grads = train.attention_backward(grad_attended, *attention, sight=ctx.sight, scale=ctx.scale)
        grad_qkv = train.join_heads(*grads, cosine_TD, sine_TD)
        grad_norms = _norm_heads_back(grad_qkv, raw, weights.head_norms, counts, size, trained)
        grad_normed = weights.qkv.back(grad_qkv)
        by_qkv.both(found, grad_qkv, normed_TE, low_qkv, grad_normed)
        normed = (x_TE, weights.before, inverse_T)
        grad_x, grad_before = train.norm_backward(grad_normed, *normed, grad_middle, trained=trained)
        if not trained:
            return (grad_x, *(None,) * (_TENSORS - 1 + LayerWeights.OWN), *found)
        return (
            grad_x, *(None,) * (_TENSORS - 1), grad_before, *weights.qkv.gradients(grad_qkv, normed_TE),
            *weights.qkv.bias_gradients(grad_qkv), *grad_norms, *grad_out, grad_between,
            *weights.gate_up.gradients(grad_gate_up, gated_TE), *weights.down.gradients(grad_TE, product_TI), *found,
        )  # fmt: skip


_TENSORS = 6  # index of the first weight among the operation's arguments


def _select_wanted(x: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    return x if wanted is None else x.index_select(0, wanted)


def _all_tokens(grad: torch.Tensor, wanted: torch.Tensor | None, tokens: int) -> torch.Tensor:
    return grad if wanted is None else grad.new_zeros(tokens, grad.shape[1]).index_copy_(0, wanted, grad)


def _norm_heads(qkv_TC: torch.Tensor, norms: tuple, counts: tuple[int, int], size: int, epsilon: float) -> list:
    # In place; returns the original values and the inverses, which the backward pass needs.
    kept, start = [], 0
    for norm, count in zip(norms, counts, strict=True):
        if norm is None:
            return []
        part = qkv_TC[:, start : start + count * size]
        raw = part.reshape(-1, size)
        normed, inverse = train.norm_forward(raw.contiguous(), norm, epsilon)
        kept += [raw.clone() if raw.data_ptr() == part.data_ptr() else raw, inverse]
        part.copy_(normed.view(len(part), -1))
        start += count * size
    return kept


def _norm_heads_back(
    grad_qkv: torch.Tensor, raw: list, norms: tuple, counts: Sequence[int], size: int, trained: bool
) -> list:
    # In place; returns the gradients of the norms' weights.
    if not raw:
        return [None, None]
    found, start = [], 0
    for place, (norm, count) in enumerate(zip(norms, counts, strict=True)):
        part = grad_qkv[:, start : start + count * size]
        rows = (part.reshape(-1, size), raw[2 * place], norm, raw[2 * place + 1])
        grad, grad_norm = train.norm_backward(*rows, trained=trained)
        part.copy_(grad.view(len(part), -1))
        found.append(grad_norm)
        start += count * size
    return found


PLAIN_RMS_NORMS = {"Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm", "MistralRMSNorm", "Qwen3MoeRMSNorm"}


def _fused_norm(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    layout = active_layout()
    if layout is not None and (layout.exact or is_for_cpu(hidden_states)) and train.can_train(hidden_states):
        # As decoding computes it.
        weight, epsilon = self.weight, self.variance_epsilon
        flat = train.RmsNorm.apply(hidden_states.flatten(0, -2), weight, epsilon)  # pyright: ignore
        return flat.view(hidden_states.shape)
    if hidden_states.dtype not in (torch.float32, torch.float64):
        return type(self).forward(self, hidden_states)
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)  # pyright: ignore


def fuse_norms(model: torch.nn.Module) -> None:
    """Give every plain RMS norm of a float32 or float64 model a fused forward pass in its own precision.

    transformers computes the norm in several passes, and always in float32. That costs time, and loses half of the
    digits of a float64 model. bfloat16 models keep transformers' norm, except in exact passes.
    """
    for module in model.modules():
        if type(module).__name__ in PLAIN_RMS_NORMS:
            module.forward = types.MethodType(_fused_norm, module)


Made = TypeVar("Made")
_here = threading.local()  # other threads have their own models


@contextmanager
def weights_unchanged() -> Iterator[None]:
    before = getattr(_here, "made", None)
    _here.made = {}
    try:
        yield
    finally:
        _here.made = before


def make_once(key: Any, make: Callable[[Any], Made]) -> Made:
    """Return make(key), cached while weights are known not to change."""
    made: dict[Any, Any] | None = getattr(_here, "made", None)
    if made is None:
        return make(key)
    if key not in made:
        made[key] = make(key)
    return made[key]

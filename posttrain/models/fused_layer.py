"""A decoder layer of Qwen2, Qwen3, Llama or Mistral as one differentiable operation: float32 on a CPU, half precision
on a CUDA device.

transformers' layer over packed rows is about thirty operations forward and fifty backward, each of which walks through
memory and is called from Python. Here the matrix products are torch's, what lies between them is a handful of compiled
kernels, and gradients are written out. The last layer goes on after attention with those tokens only whose hidden
states are asked for. transformers' own layer is its twin and serves everywhere else. Adapters beside a frozen base
(`fused_adapters.py`) are part of the products; no gradient of the base is computed then.

Shapes: T packed tokens, E width of the model, C columns of queries, keys and values together, D head size.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from posttrain.kernels import train
from posttrain.kernels.decode import silu_mul
from posttrain.kernels.gradient_sums import add_product
from posttrain.kernels.packed_attention import PackedLayout, active_layout
from posttrain.kernels.sequence_parallel import sequence_group
from posttrain.models.arena import end_to_end, join_products
from posttrain.models.forward import LAYERS
from posttrain.models.fused_adapters import PARTS, Adapters, adapter_of, base_of, can_fuse_adapter, flat

_LINEAR = (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", ("gate_proj", "up_proj", "down_proj")))


def fuse_layers(model: torch.nn.Module) -> None:
    """Give every layer of a known kind the fused pass, used wherever `_can_fuse` finds nothing against it."""
    config: Any = model.config
    if getattr(config, "hidden_act", None) != "silu":
        return
    for module in model.modules():
        if type(module).__name__ in LAYERS:
            module.forward = types.MethodType(_forward, module)


def join_weights(model: torch.nn.Module) -> None:
    """Lay the weights of every such layer out so that it multiplies once where it can. This takes them out of the pages
    of the file that they were mapped from, so that weights which are cut over ranks are left as they are."""
    for module in model.modules():
        if type(module).__name__ in LAYERS:
            join_products(module)


def _forward(self: Any, hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any):
    layout = active_layout()
    if layout is None or position_embeddings is None or not _can_fuse(self, hidden_states, layout):
        return type(self).forward(self, hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
    layout.answered += 1
    attention = self.self_attn
    last = attention.layer_idx == attention.config.num_hidden_layers - 1
    parts = _linear_parts(self)
    adapters = tuple(adapter_of(part) for part in parts)
    q, k, v, out, gate, up, down = map(base_of, parts)
    norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None)
    return _FusedLayer.apply(
        hidden_states[0],
        (layout.sight, attention.head_dim, attention.scaling, self.input_layernorm.variance_epsilon),
        layout.wanted_T if last else None,
        *(table[0].contiguous() for table in position_embeddings),
        self.input_layernorm.weight,
        *(part.weight for part in (q, k, v)),
        *(part.bias for part in (q, k, v)),
        *norms,
        out.weight,
        self.post_attention_layernorm.weight,
        gate.weight,
        up.weight,
        down.weight,
        adapters,
        *flat(adapters),
    )  # pyright: ignore


def _can_fuse(layer: Any, hidden: torch.Tensor, layout: PackedLayout) -> bool:
    if hidden.shape[0] != 1 or sequence_group() is not None:
        return False
    if not train.can_attend(layer.self_attn.head_dim, hidden):
        return False
    window = getattr(layer.self_attn, "sliding_window", None) or getattr(layer.self_attn.config, "sliding_window", None)
    if window and window < int(layout.lengths.max()):
        return False
    parts = _linear_parts(layer)
    return all(map(can_fuse_adapter, parts)) and all(base_of(part).bias is None for part in parts[3:])


def _linear_parts(layer: Any) -> list[Any]:
    return [getattr(getattr(layer, home), name) for home, names in _LINEAR for name in names]


class _FusedLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_TE, shape, wanted, cosine_TD, sine_TD, before, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, out,
        between, gate, up, down, adapters, *adapter_tensors,
    ):  # fmt: skip
        sight, size, scale, epsilon = shape
        low: list[torch.Tensor] = []  # x A' of every adapter
        heads, key_heads = len(q) // size, len(k) // size
        x_TE = x_TE.contiguous()
        normed_TE, inverse_T = train.norm_forward(x_TE, before, epsilon)
        qkv_TC = _product(normed_TE, (q, k, v), (q_bias, k_bias, v_bias))
        low += _adapt(qkv_TC, normed_TE, adapters[:3], (q, k, v))
        raw = _norm_heads(qkv_TC, (q_norm, k_norm), (heads, key_heads), size, epsilon)
        parts = train.split_heads(qkv_TC, heads, key_heads, cosine_TD, sine_TD)
        attended_THD, logsum_TH = train.attention_forward(*parts, sight=sight, scale=scale)
        residual, attended = (
            x if wanted is None else x.index_select(0, wanted) for x in (x_TE, attended_THD.flatten(1))
        )
        middle_TE = torch.addmm(residual, attended, out.T)
        low += _adapt(middle_TE, attended, adapters[3:4], (out,))
        gated_TE, middle_inverse_T = train.norm_forward(middle_TE, between, epsilon)
        gate_up_T2I = _product(gated_TE, (gate, up))
        low += _adapt(gate_up_T2I, gated_TE, adapters[4:6], (gate, up))
        result_1TE = middle_TE.new_empty(1, *middle_TE.shape)  # no view: sharding hooks into what a layer returns
        product_TI = silu_mul(gate_up_T2I)
        torch.addmm(middle_TE, product_TI, down.T, out=result_1TE[0])
        low += _adapt(result_1TE[0], product_TI, adapters[6:], (down,))
        ctx.adapters, ctx.low = adapters, len(low)
        ctx.sight, ctx.scale, ctx.heads, ctx.wanted = sight, scale, (heads, key_heads, size), wanted
        ctx.weights = (before, q, k, v, q_norm, k_norm, out, between, gate, up, down)
        ctx.has_bias = q_bias is not None
        ctx.save_for_backward(
            x_TE, normed_TE, inverse_T, cosine_TD, sine_TD, *parts, attended_THD, logsum_TH,
            middle_TE, gated_TE, middle_inverse_T, gate_up_T2I, *raw, *low,
        )  # fmt: skip
        return result_1TE

    @staticmethod
    def backward(ctx, grad_1TE):  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TE, normed_TE, inverse_T, cosine_TD, sine_TD, *rest = ctx.saved_tensors
        *attention, middle_TE, gated_TE, middle_inverse_T, gate_up_T2I = rest[:9]
        end = len(rest) - ctx.low
        raw, low, attended_THD, wanted = rest[9:end], rest[end:], attention[3], ctx.wanted
        before, q, k, v, q_norm, k_norm, out, between, gate, up, down = ctx.weights
        heads, key_heads, size = ctx.heads
        trained = any(ctx.needs_input_grad[5:_ADAPTERS])
        back = _AdaptersBack(ctx.adapters, low)
        grad_TE = grad_1TE[0].contiguous()
        grad_product = grad_TE @ down
        if ctx.adapters[6] is not None:  # its own gradient needs the product, which the next kernel makes once more
            back.into(6, grad_TE, grad_product)
        product_TI, grad_gate_up = train.gate_backward(grad_product, gate_up_T2I)
        back.of(6, grad_TE, product_TI)
        grad_gated = _product_back(grad_gate_up, (gate, up))
        back.both((4, 5), grad_gate_up, (gate, up), gated_TE, grad_gated)
        grad_middle, grad_between = train.norm_backward(grad_gated, middle_TE, between, middle_inverse_T, grad_TE)
        attended = _wanted(attended_THD.flatten(1), wanted)
        weights = [*_weight_grads((out,), grad_middle, attended), grad_between] if trained else []
        grad_attended = grad_middle @ out
        back.both((3,), grad_middle, (out,), attended, grad_attended)
        grad_attended = _all_tokens(grad_attended, wanted, len(x_TE)).view_as(attended_THD)
        grad_middle = _all_tokens(grad_middle, wanted, len(x_TE))
        grads = train.attention_backward(grad_attended, *attention, sight=ctx.sight, scale=ctx.scale)
        grad_qkv = train.join_heads(*grads, cosine_TD, sine_TD)
        grad_norms = _norm_heads_back(grad_qkv, raw, (q_norm, k_norm), (heads, key_heads), size)
        grad_normed = _product_back(grad_qkv, (q, k, v))
        back.both((0, 1, 2), grad_qkv, (q, k, v), normed_TE, grad_normed)
        grad_x, grad_before = train.norm_backward(grad_normed, x_TE, before, inverse_T, grad_middle)
        if not trained:
            return (grad_x, *(None,) * (_ADAPTERS - 1), None, *back.found)
        biases = grad_qkv.sum(0).split([len(part) for part in (q, k, v)]) if ctx.has_bias else (None, None, None)
        return (
            grad_x, None, None, None, None, grad_before, *_weight_grads((q, k, v), grad_qkv, normed_TE), *biases,
            *grad_norms, *weights, *_weight_grads((gate, up), grad_gate_up, gated_TE),
            *_weight_grads((down,), grad_TE, product_TI), None, *back.found,
        )  # fmt: skip


_ADAPTERS = 19  # where the adapters stand among the operation's arguments


def _adapt(y_TC: torch.Tensor, x_TE: torch.Tensor, adapters: Adapters, weights: tuple) -> list[torch.Tensor]:
    """Add the adapters of parts that lie side by side in `y`."""
    columns = y_TC.split([len(weight) for weight in weights], 1)
    return [one.add(part, x_TE) for one, part in zip(adapters, columns, strict=True) if one is not None]


class _AdaptersBack:
    """Collects the gradients of the adapters, A and B of every part, in `found`."""

    def __init__(self, adapters: Adapters, low: list[torch.Tensor]) -> None:
        self.adapters, self.found = adapters, [None] * (2 * PARTS)
        taken = iter(low)
        self.low = [next(taken) if one is not None else None for one in adapters]

    def into(self, number: int, grad_TC: torch.Tensor, grad_TE: torch.Tensor) -> None:
        """Only the gradient of the input."""
        one = self.adapters[number]
        assert one is not None
        grad_TE.addmm_(grad_TC @ one.b.to(grad_TC.dtype), one.a.to(grad_TC.dtype), alpha=one.scale)

    def of(self, number: int, grad_TC: torch.Tensor, x_TE: torch.Tensor, grad_TE: torch.Tensor | None = None) -> None:
        one, low_TR = self.adapters[number], self.low[number]
        if one is not None and low_TR is not None:
            self.found[2 * number : 2 * number + 2] = one.back(grad_TC, x_TE, low_TR, grad_TE)  # pyright: ignore

    def both(self, numbers: tuple, grad_TC: torch.Tensor, weights: tuple, x_TE: torch.Tensor, grad_TE) -> None:
        """Of parts that lie side by side: their own gradients, and what they add to that of the input."""
        columns = grad_TC.split([len(weight) for weight in weights], 1)
        for number, part in zip(numbers, columns, strict=True):
            self.of(number, part, x_TE, grad_TE)


def _wanted(x: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    return x if wanted is None else x.index_select(0, wanted)


def _all_tokens(grad: torch.Tensor, wanted: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """The gradient of all tokens, from that of the wanted ones."""
    return grad if wanted is None else grad.new_zeros(tokens, grad.shape[1]).index_copy_(0, wanted, grad)


def _product(x_TE: torch.Tensor, weights: tuple, biases: tuple = (None,)) -> torch.Tensor:
    """All products of `x` side by side; one, where the weights lie end to end."""
    whole = end_to_end(weights)
    if whole is None:
        y = torch.cat([x_TE @ weight.T for weight in weights], 1)
        return y if biases[0] is None else y.add_(torch.cat(biases))
    if biases[0] is None:
        return x_TE @ whole.T
    bias = end_to_end(biases)
    return torch.addmm(torch.cat(biases) if bias is None else bias, x_TE, whole.T)


def _product_back(grad_TC: torch.Tensor, weights: tuple) -> torch.Tensor:
    whole = end_to_end(weights)
    return grad_TC @ (torch.cat(weights) if whole is None else whole)


def _weight_grads(weights: tuple, grad_TC: torch.Tensor, x_TE: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """Gradients of weights whose products lie side by side; none, where sums take them."""
    if add_product(weights, grad_TC, x_TE):
        return (None,) * len(weights)
    return (grad_TC.T @ x_TE).split([len(weight) for weight in weights])


def _norm_heads(qkv_TC: torch.Tensor, norms: tuple, counts: tuple[int, int], size: int, epsilon: float) -> list:
    """Norms of the heads of queries and keys, in place: what was there, and the inverses, of each."""
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


def _norm_heads_back(grad_qkv: torch.Tensor, raw: list, norms: tuple, counts: tuple[int, int], size: int) -> list:
    """The way back of `_norm_heads`, in place; gives the gradients of the norms' weights."""
    if not raw:
        return [None, None]
    found, start = [], 0
    for place, (norm, count) in enumerate(zip(norms, counts, strict=True)):
        part = grad_qkv[:, start : start + count * size]
        grad, grad_norm = train.norm_backward(part.reshape(-1, size), raw[2 * place], norm, raw[2 * place + 1])
        part.copy_(grad.view(len(part), -1))
        found.append(grad_norm)
        start += count * size
    return found

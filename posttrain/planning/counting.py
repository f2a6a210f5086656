"""Bytes of a model's passes, counted without weights: the real model code runs on torch's meta device
(`meta_models.py`).

Tensors there have shapes and types but no contents, so a pass over a 70B model costs a second and no memory. A dispatch
mode follows every tensor that is alive; saved-tensor hooks find which of them wait for the backward pass.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.kernels.logprob_head import CHUNK_ELEMENTS
from posttrain.kernels.ordered import meta_tensors_as
from posttrain.kernels.packed_attention import PackedLayout, active_layout, packed_rows
from posttrain.kernels.train import can_train
from posttrain.kernels.whole_step import COLUMNS
from posttrain.models.arena import FUSED, base_layer, can_repack_weights
from posttrain.models.decodable import KNOWN
from posttrain.models.forward import (
    LAYERS,
    ValueModel,
    accepted_arguments,
    decoder_of,
    hidden_states,
    recompute_layers,
    token_log_probs,
    without_adapters,
)
from posttrain.models.recurrent import attending_layers, recurrent_layers
from posttrain.models.scorer import head_scores, to_float32
from posttrain.planning.meta_models import ATTENTION, META, counted_as_paged, is_scorer
from posttrain.rollout.base import Sampling
from posttrain.rollout.sampling import sample


@dataclass(frozen=True)
class ModelBytes:
    """What a model and its optimizer hold, whatever the batch."""

    weights: int
    gradients: int  # sums over the micro-batches, in the masters' precision
    optimizer: int  # AdamW's two moments, and float32 masters of weights in lower precision
    largest: int  # the largest trained tensor, in the masters' precision
    masters: int  # float32 copies of trained weights in lower precision, a part of `optimizer`

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelBytes:
        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        wide = [p.numel() * max(4, p.itemsize) for p in trained]
        masters = sum(4 * p.numel() for p in trained if p.itemsize < 4)
        weights = sum(getattr(p, "held_bytes", p.numel() * p.itemsize) for p in parameters)
        return cls(weights, sum(wide), 2 * sum(wide) + masters, max(wide, default=0), masters)

    def over(self, workers: int) -> ModelBytes:
        """What each of so many workers holds that share everything, as by FSDP."""
        return ModelBytes(*(math.ceil(size / workers) for size in astuple(self)))


def unpacked_bytes(model: torch.nn.Module) -> int:
    """Room for the largest 4-bit matrix in the compute type, in which it is multiplied; 0 where there is none."""
    return max((p.numel() * p.itemsize for p in model.parameters() if hasattr(p, "held_bytes")), default=0)


def joined_bytes(model: torch.nn.Module) -> int:
    """Room to lay the largest matrices end to end that a layer multiplies the same tokens with (`join_weights`)."""
    layers = [module for module in model.modules() if type(module).__name__ in LAYERS]
    if not layers or unpacked_bytes(model):
        return 0
    parts = [[base_layer(getattr(getattr(layers[0], home), name)) for name in names] for _, home, names in FUSED]
    return max(sum(part.weight.numel() * part.weight.itemsize for part in group) for group in parts)


INPUT_BYTES = 12 * 8
"""Of a token: fields of its row, its position, its place among packed rows: a dozen whole numbers of 64 bits."""


class LiveBytes(TorchDispatchMode):
    """While open, `now` are the bytes of tensors made inside and still alive, and `peak` the most there were."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_meta = func is torch.ops.aten._grouped_mm.default and args[0].is_meta
        out = _grouped_product(*args) if on_meta else func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in self._known:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        # Views share a storage, so bytes are counted per storage, and given back when its last tensor is gone.
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _grouped_product(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor, *_: Any) -> torch.Tensor:
    # Of tokens and experts, or of tokens and tokens for the gradient of experts. On meta, torch takes bfloat16 alone.
    return x.new_empty(*(ends.shape if y.dim() == 2 else ()), x.shape[0], y.shape[-1])


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def saved_bytes(model: torch.nn.Module, forward: Callable[[], Any]) -> tuple[int, Any]:
    """(bytes that `forward` keeps for its backward pass besides the weights, its result); on any device."""
    weights = {_storage(p) for p in model.parameters()}
    found: dict[int, int] = {}  # by storage: a tensor that several operations save is kept once

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in weights:
            found[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return sum(found.values()), result


def _layout(model: Any, rows: int, length: int, device: str) -> PackedLayout | None:
    """Rows end to end, as a run packs them, where its attention takes them so."""
    if model.config._attn_implementation != ATTENTION or _is_encoder(model):
        return None
    if device != "cpu" and can_train(next(model.parameters())):  # these kernels are a CPU's, also on the meta device
        return None
    return PackedLayout([length] * rows, META, wanted_T=torch.empty(rows * length, dtype=torch.long, device=META))


def _is_encoder(model: Any) -> bool:
    return is_scorer(model) and not hasattr(without_adapters(model), "score")


def _outputs(model: Any, rows: int, length: int) -> torch.Tensor:
    """Log-probs (or values, or scores) of rows that are all response: the largest pass of this many tokens."""
    packed = active_layout() is not None
    if _is_encoder(model):
        ids = torch.zeros(rows, length, dtype=torch.long, device=META)
        return to_float32(model(input_ids=ids, attention_mask=_places(model, ids)[1]).logits.squeeze(-1))
    ids = torch.zeros((1, rows * length) if packed else (rows, length), dtype=torch.long, device=META)
    # With a mask transformers does not look into the positions for packed rows, which have no contents here.
    hidden = hidden_states(model, ids, *_places(model, ids))
    hidden_NE = hidden.flatten(0, 1).index_select(0, ids.flatten())
    if isinstance(model, ValueModel):
        return model.token_values(hidden_NE)
    if is_scorer(model):
        return head_scores(model, hidden_NE[:rows])  # one state of each row
    # Computed in chunks of tokens: more than three change no peak.
    hidden_NE = hidden_NE[: 3 * CHUNK_ELEMENTS // model.config.get_text_config().vocab_size]
    return token_log_probs(model, hidden_NE, ids.flatten()[: len(hidden_NE)], 1.0)[0]


def scoring_peak(model: torch.nn.Module, rows: int, length: int, device: str) -> int:
    """Most bytes alive in a pass without gradient, besides the weights."""
    layout = _layout(model, rows, length, device)
    with torch.no_grad(), meta_tensors_as(device), packed_rows(layout), LiveBytes(model) as live:
        _outputs(model, rows, length)
    return live.peak + rows * length * INPUT_BYTES


def rewarding_peak(model: torch.nn.Module, rows: int, length: int) -> int:
    """Most bytes alive in a pass of the reward model, besides its weights."""
    ids = torch.zeros(rows, length, dtype=torch.long, device=META)
    with torch.no_grad(), LiveBytes(model) as live:
        model(input_ids=ids, attention_mask=_places(model, ids)[1])
    return live.peak


def training_bytes(model: torch.nn.Module, rows: int, length: int, checkpointing: bool, device: str) -> tuple[int, int]:
    """(activations kept for the backward pass, most bytes alive in both passes besides weights and summed gradients).

    Gradients of low-precision weights are summed in their masters after the backward pass, so they stay alive in it.
    """
    recompute_layers(model, checkpointing)
    # A float32 gradient is added to its sum as soon as it is complete, which the hook plays by dropping it.
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in model.parameters() if p.requires_grad]
    with meta_tensors_as(device), packed_rows(_layout(model, rows, length, device)), LiveBytes(model) as live:
        activations, out = saved_bytes(model, lambda: _outputs(model, rows, length))
        out.backward(torch.empty_like(out))
        del out
    for hook in hooks:
        hook.remove()
    model.zero_grad(set_to_none=True)
    recompute_layers(model, False)
    model.eval()
    return activations, live.peak


def _drop(parameter: torch.Tensor) -> None:
    if parameter.itemsize >= 4:
        parameter.grad = None


def cache_bytes_per_token(model: Any) -> int:
    """Bytes of keys and values that one token leaves in the cache of all layers."""
    return sum(size * heads for heads, size in cached_heads(model))


def cached_heads(model: Any) -> list[tuple[int, int]]:
    """What one token leaves in the cache: heads, and bytes of each, of keys and values of all layers."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    settings = inner.config.get_text_config()
    if settings.model_type in KNOWN:  # the formula; other families are asked by a pass over one token
        size = 2 * settings.num_hidden_layers * _head_size(settings) * next(model.parameters()).itemsize
        return [(settings.num_key_value_heads, size)]
    if not attending_layers(inner):
        return []
    ids = torch.zeros(1, 1, dtype=torch.long, device=META)
    with torch.no_grad(), LiveBytes(inner):
        layers = inner.base_model(input_ids=ids, position_ids=ids, use_cache=True).past_key_values.layers
    names = ("keys", "values")  # (row, head, token, size); a layer with a recurrent state has none
    kept = [getattr(layer, name) for layer in layers for name in names if getattr(layer, name, None) is not None]
    return [(own.shape[1], own[0, 0].nbytes) for own in kept]


def _head_size(settings: Any) -> int:
    return getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads


def fp8_bytes(model: Any) -> int:
    """Copies of the layers' matrices in 8 bits, with a scale for each of their rows."""
    layers: Any = decoder_of(model).layers
    matrices = [w for name, w in layers.named_parameters() if w.dim() > 1 and "lora_" not in name]
    return sum(w.numel() + 4 * w.numel() // w.shape[-1] for w in matrices)


def fp8_base_bytes(model: Any, device: str, shared: bool) -> int:
    """A frozen base's copies for forward and backward products; the first is the rollout's too, if `shared`. Emulated,
    there is one for both, in the weights' own type."""
    if device == "cpu":
        layers: Any = decoder_of(model).layers
        return sum(w.nbytes for name, w in layers.named_parameters() if w.dim() > 1 and "lora_" not in name)
    return fp8_bytes(model) * (1 if shared else 2)


def rounding_bytes(model: Any, tokens: int, device: str, back: bool) -> int:
    """Room for the rounded input of the widest product in a training pass with such copies; emulated, rounding makes
    copies in float32 as well."""
    each = 1 if device == "cuda" else 13 if back else 9
    return each * tokens * model.config.get_text_config().intermediate_size * (2 if back else 1)


def packed_bytes(model: Any) -> int:
    """Copies of the layers' matrices that multiply faster: the native engine makes them for long responses on a CPU
    that has the instructions."""
    if model.config.get_text_config().model_type not in KNOWN or unpacked_bytes(model):
        return 0
    if not can_repack_weights(next(model.parameters()).dtype):
        return 0
    layers: Any = decoder_of(model).layers
    linear = (
        part for name, part in layers.named_modules() if isinstance(part, torch.nn.Linear) and "lora_" not in name
    )
    widths = [part.weight.shape for part in linear]
    itemsize = next(model.parameters()).itemsize
    rows = sum(shape[0] for shape in widths[:7])  # a tile of rows between the products of a layer
    head = -(-model.config.vocab_size // COLUMNS) * COLUMNS * model.config.hidden_size
    return (sum(shape.numel() for shape in widths) + head + 64 * rows) * itemsize


def _places(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # (positions, mask). With a mask transformers does not look for borders in the positions. Recurrent layers look for
    # padding in a mask by tokens, which has no numbers here; one of four dimensions is taken as it is.
    whole = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=META)
    return ids, whole if recurrent_layers(model) else torch.ones_like(ids)


def width_of(model: Any) -> int:
    return model.config.get_text_config().hidden_size


def layer_count(model: Any) -> int:
    return model.config.get_text_config().num_hidden_layers


def largest_stage(model: Any, stages: int) -> float:
    """The share of the weights that the largest of so many stages holds. The first has the embedding, the last the
    head; where these are one weight, each has it."""
    ends = [part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]
    sizes = [part.weight.numel() for part in ends]
    whole = sum(weight.numel() for weight in model.parameters())
    layers = whole - sum({id(part.weight): size for part, size in zip(ends, sizes, strict=True)}.values())
    return (layers * math.ceil(layer_count(model) / stages) / layer_count(model) + max(sizes, default=0)) / whole


def prefill_peak(model: Any, prompts: int, length: int) -> int:
    """Most bytes alive while prompts are computed, their cache included."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    ids = torch.zeros(prompts, length, dtype=torch.long, device=META)
    with torch.no_grad(), LiveBytes(model) as live:
        places: dict[str, Any] = dict(zip(("position_ids", "attention_mask"), _places(model, ids), strict=True))
        inner(input_ids=ids, **accepted_arguments(inner, places), use_cache=True, logits_to_keep=1)
    return live.peak


def native_step_peak(model: Any, tokens: int, rows: int, sampling: Sampling) -> int:
    """Most bytes alive in a step of the native engine besides weights and cache: a flat pass over `tokens`, and the
    logits of `rows` of them with what sampling makes of these."""
    settings, dtype = model.config.get_text_config(), next(model.parameters()).dtype
    if settings.model_type in KNOWN:  # our own decoder, whose live tensors are few enough to write down
        width, inner, heads = settings.hidden_size, settings.intermediate_size, settings.num_attention_heads
        size = _head_size(settings)
        attention = (2 * heads + 2 * settings.num_key_value_heads) * size  # queries, keys, values; the output
        layer = tokens * (3 * width + max(attention, 3 * inner, width + inner)) * dtype.itemsize
        layer += tokens * 24  # ids, positions, rows
    else:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=META)
        with torch.no_grad(), counted_as_paged(), LiveBytes(model) as passing:
            hidden_states(model, ids, *_places(model, ids))
        layer = passing.peak
    with LiveBytes(model) as live:
        logits_BV = torch.empty(rows, settings.vocab_size, dtype=dtype, device=META)
        if sampling.filtered or sampling.repetition_penalty != 1.0:
            uniform_B = torch.empty(rows, dtype=torch.float64, device=META)
            sample(logits_BV, [sampling] * rows, uniform_B, [((0,), ())] * rows)
    return max(layer, live.peak + rows * settings.hidden_size * dtype.itemsize)


def decode_peak(model: Any, rows: int, length: int, sampling: Sampling) -> int:
    """Most bytes alive in a decoding step besides weights and cache: logits, sampling, copies of a layer's cache."""
    settings = model.config.get_text_config()
    dtype = next(model.parameters()).dtype
    with LiveBytes(model) as live:
        logits_BV = torch.empty(rows, settings.vocab_size, dtype=dtype, device=META)
        sample(logits_BV, [sampling] * rows, torch.empty(rows, dtype=torch.float64, device=META), [((0,), ())] * rows)
    heads = settings.num_attention_heads
    repeats = heads // (getattr(settings, "num_key_value_heads", None) or heads)
    # A layer's keys, then its values, are copied when they grow; under a mask shared heads are repeated for each query.
    layer = rows * length * cache_bytes_per_token(model) // settings.num_hidden_layers
    copies = layer * repeats if repeats > 1 else layer // 2
    return max(live.peak, copies + logits_BV.numel() * logits_BV.itemsize)

"""All layers of a decoder in one call of a compiled kernel (cpu/step.cpp), over weights laid out for its products.

The twin is the layer-by-layer path of `posttrain/models/decoder.py`, which serves wherever this cannot.

Shapes: T tokens of one step, E width of the model, I width of the gated layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from posttrain.kernels.compiled import AttentionLayout, kernel
from posttrain.kernels.decode import LayerCache, StepTokens
from posttrain.kernels.pages import zeros_in_large_pages

COLUMNS, ROWS = 32, 64  # tiles of a product; step.cpp holds the same numbers
MATRICES = ("qkv", "out", "gate_up", "down")
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


@dataclass
class LayerWeights:
    """The tensors of one layer, as the model holds them."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    before: torch.Tensor
    between: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    window: int | None
    changed: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    """Matrices (by name) that are packed otherwise than the model holds them: with adapters folded in."""

    def to_pack(self, name: str) -> torch.Tensor:
        return self.changed[name]() if name in self.changed else getattr(self, name)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "qkv_bias", "out", "gate_up", "down", "before", "between")),
        *((name, _POINTER) for name in ("query_norm", "key_norm", "keys", "values")),
        ("window", _LONG),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("layers", "width", "hidden")),
        *((name, _POINTER) for name in ("layer", "cosine", "sine")),
    )


class _Workspace(ctypes.Structure):
    _fields_ = tuple((name, _POINTER) for name in ("residual", "x", "qkv", "attended", "gated"))


def can_run_whole(layer: LayerWeights) -> bool:
    """Whether this processor has the instructions, and the sizes fill whole tiles."""
    allowed = kernel("can_multiply", layer.qkv)
    width, hidden = layer.qkv.shape[1], layer.down.shape[1]
    sizes = (width, hidden, layer.out.shape[1])
    return allowed is not None and bool(allowed()) and all(size % COLUMNS == 0 for size in sizes)


def packed_size(weight: torch.Tensor) -> int:
    """Numbers in a packed weight: whole tiles of columns."""
    return -(-weight.shape[0] // COLUMNS) * COLUMNS * weight.shape[1]


def pack(weight: torch.Tensor, packed: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
    """The weight (columns, inputs) copied into tiles of 32 columns; `gated` pairs the two halves of its columns."""
    columns, inner = weight.shape
    function = kernel("pack", weight)
    assert function is not None
    function(weight.data_ptr(), packed.data_ptr(), columns, inner, gated, torch.get_num_threads())
    return packed


class WholeStep:
    """Packed copies of all layers' weights, valid until the weights change."""

    def __init__(
        self, layers: Sequence[LayerWeights], *, heads: int, key_heads: int, size: int, scale: float, epsilon: float
    ) -> None:
        self.heads, self.key_heads, self.size, self.scale, self.epsilon = heads, key_heads, size, scale, epsilon
        self.width, self.hidden = layers[0].qkv.shape[1], layers[0].down.shape[1]
        self.like = layers[0].qkv
        self.kept: list[torch.Tensor | None] = []  # what the pointers below point to
        matrices = [getattr(weights, name) for weights in layers for name in MATRICES]
        room = zeros_in_large_pages([sum(map(packed_size, matrices))], self.like.dtype)
        self.room = iter(room.split([packed_size(weight) for weight in matrices]))
        self.layers = (_Layer * len(layers))()
        for place, weights in zip(self.layers, layers, strict=True):
            self._fill(place, weights)
        self.work: dict[str, torch.Tensor] = {}

    def _fill(self, place: _Layer, weights: LayerWeights) -> None:
        for name in MATRICES:
            self._point(place, name, pack(weights.to_pack(name), next(self.room), gated=name == "gate_up"))
        for name in ("qkv_bias", "before", "between", "query_norm", "key_norm"):
            self._point(place, name, getattr(weights, name))
        place.window = weights.window or 0

    def _point(self, place: _Layer, name: str, tensor: torch.Tensor | None) -> None:
        self.kept.append(tensor)
        setattr(place, name, None if tensor is None else tensor.data_ptr())

    def run(
        self,
        residual_TE: torch.Tensor,
        step: StepTokens,
        caches: Sequence[LayerCache],
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """All layers, into `residual_TE`; keys and values enter the caches."""
        for place, (keys, values) in zip(self.layers, caches, strict=True):
            place.keys, place.values = keys.data_ptr(), values.data_ptr()
        tokens, size = len(residual_TE), self.size
        columns = (self.heads + 2 * self.key_heads) * size
        layout = AttentionLayout(
            tokens, len(step.tile_starts) - 1, step.table_RN.shape[1],
            self.heads, self.key_heads, size, 0, torch.get_num_threads(),
            self.scale, self.epsilon, *(columns, size) * 3,
        )  # fmt: skip
        model = _Model(
            len(self.layers), self.width, self.hidden, ctypes.addressof(self.layers), *(x.data_ptr() for x in rotation)
        )
        work = _Workspace(residual_TE.data_ptr(), *(x.data_ptr() for x in self._workspace(tokens, columns)))
        lists = (step.table_RN, step.starts_RN, step.rows_T, step.positions_T, step.tile_starts)
        function = kernel("run_layers", residual_TE)
        assert function is not None
        pointers = (ctypes.addressof(x) for x in (model, work, layout))
        function(*pointers, *(x.data_ptr() for x in lists))

    def _workspace(self, tokens: int, columns: int) -> list[torch.Tensor]:
        """Room for this many tokens, padded to whole tiles of rows. Zeros: the padding is computed with."""
        rows = -(-tokens // ROWS) * ROWS
        widths = {"x": self.width, "qkv": columns, "attended": self.heads * self.size, "gated": self.hidden}
        if not self.work or len(self.work["x"]) < rows:
            self.work = {name: self.like.new_zeros(rows, width) for name, width in widths.items()}
        return list(self.work.values())

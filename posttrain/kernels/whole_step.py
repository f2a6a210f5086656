"""All layers of a decoder, or many decode steps, in one call of a compiled kernel (cpu/step.cpp), over weights packed
for its products.

Elsewhere the layer-by-layer path of `posttrain/models/decoder.py` is used.

Shapes: T tokens of one step, E width of the model, I width of the gated layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from posttrain.kernels.compiled import AttentionLayout, kernel
from posttrain.kernels.decode import LayerCache, StepTokens, zeros_in_large_pages

COLUMNS, ROWS = 32, 64  # tiles of a product; the same numbers are in step.cpp
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
    # By name, matrices that are packed with adapters folded in instead of as the model holds them.
    changed: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)

    def to_pack(self, name: str) -> torch.Tensor:
        return self.changed[name]() if name in self.changed else getattr(self, name)


@dataclass
class EndWeights:
    """The weights before and after the layers."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor


# The structures below mirror those of cpu/step.cpp, field by field.
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


class _Ends(ctypes.Structure):
    _fields_ = (*((name, _POINTER) for name in ("embedding", "norm", "head", "logits")), ("vocabulary", _LONG))


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("rows", "steps", "stop_at_end")),
        *((name, _POINTER) for name in ("last", "positions", "counts", "limits", "seeds", "temperatures", "greedy")),
        *((name, _POINTER) for name in ("stops", "stop_starts", "stop_ids", "tokens", "log_probs", "ended")),
        *((name, _POINTER) for name in ("histories", "next_history", "drafts", "drafted")),
        ("width", _LONG),
        *((name, _POINTER) for name in ("passes", "tried")),
    )


class _Wanted(ctypes.Structure):
    _fields_ = (("count", _LONG), *((name, _POINTER) for name in ("places", "rows", "positions", "tile_starts")))


@dataclass
class DecodeRows:
    """Rows that decode for a number of steps without the host; results are written into the same arrays.

    Prefix sharing: rows that are equal up to their newest token are computed once. `histories` are equal where prompts
    and all tokens but the newest are; `next_history` is a number that no row has had.

    A decoder may run ahead: a call starts its steps and returns the results of the call before. `under_way` is how many
    tokens of a row may be unknown to the host, before and after the call; until it is 0 only the decoder knows the
    state of the row. With `steps` 0 it returns everything and starts nothing. `numbers` identify rows for good; a row
    that a call no longer names is gone, with what it had under way. A row without tokens may have its first one under
    way in `first`; its last prompt token then counts as its newest. After the call the device is busy for about
    `busy_s` seconds with what was begun; 0 where that is not known.

    With `drafts` a pass has up to `width` tokens of a row: the newest and drafted ones. As many results count as the
    draft foresaw, and one more; the call returns when a row has come to the end of its draft.

    `together`: rows may be tokens of one sequence, of which each attends to those before it.

    B rows, S steps, N blocks of a row. `ended` is 1 for a row that came to a stop token and 2 at its limit.
    """

    last: np.ndarray  # (B,) int64, the newest token
    positions: np.ndarray  # (B,) int32, its position
    counts: np.ndarray  # (B,) int64, tokens generated
    limits: np.ndarray  # (B,) int64
    seeds: np.ndarray  # (B,) uint64
    temperatures: np.ndarray  # (B,) float32
    greedy: np.ndarray  # (B,) uint8
    stops: np.ndarray  # (B,) int32, which set of stop tokens
    histories: np.ndarray  # (B,) int64
    numbers: np.ndarray  # (B,) int64
    under_way: np.ndarray  # (B,) int64
    gaps: np.ndarray  # (B,) int32, where the one block starts that need not follow a full one
    next_history: np.ndarray  # (1,) int64
    stop_sets: Sequence[Sequence[int]]
    table: np.ndarray  # (B, N) int32
    starts: np.ndarray  # (B, N) int32
    steps: int
    stop_at_end: bool
    first: FirstTokens | None = None
    drafts: Sequence[Sequence[int]] | None = None  # less than S tokens for each row
    width: int = 1
    together: bool = False
    busy_s: float = 0.0
    tokens: np.ndarray = field(init=False)  # (B, S) int64
    log_probs: np.ndarray = field(init=False)  # (B, S) float32
    ended: np.ndarray = field(init=False)  # (B,) uint8
    passes: np.ndarray = field(init=False)  # (B,) int64, those with a draft of the row
    tried: np.ndarray = field(init=False)  # (B,) int64, drafted tokens in these

    def __post_init__(self) -> None:
        rows = len(self.last)
        self.tokens, self.log_probs = np.zeros((rows, self.steps), np.int64), np.zeros((rows, self.steps), np.float32)
        self.ended = np.zeros(rows, np.uint8)
        self.passes, self.tried = np.zeros(rows, np.int64), np.zeros(rows, np.int64)

    def only_begun(self) -> np.ndarray:
        """1 for rows whose first token is under way, and nothing else."""
        return np.zeros_like(self.counts) if self.first is None else (self.first.places(self.numbers) >= 0).astype(int)

    @property
    def longest(self) -> int:
        """Positions that may be reached."""
        return int((self.positions + self.under_way).max()) + self.steps


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
        self,
        layers: Sequence[LayerWeights],
        ends: EndWeights,
        *,
        heads: int,
        key_heads: int,
        size: int,
        scale: float,
        epsilon: float,
        room: torch.Tensor | None = None,
    ) -> None:
        # `room` is the memory of an earlier instance, reused if it has the right size.
        self.heads, self.key_heads, self.size, self.scale, self.epsilon = heads, key_heads, size, scale, epsilon
        self.width, self.hidden = layers[0].qkv.shape[1], layers[0].down.shape[1]
        self.like, self.ends = layers[0].qkv, ends
        self.kept: list[torch.Tensor | None] = []  # keeps alive what the pointers below point to
        matrices = [getattr(weights, name) for weights in layers for name in MATRICES]
        sizes = [packed_size(weight) for weight in (*matrices, ends.head)]
        if room is None or len(room) != sum(sizes) or room.dtype is not self.like.dtype:
            room = zeros_in_large_pages([sum(sizes)], self.like.dtype)
        self.room = room
        # All packed weights lie in one allocation, in the order in which a step reads them.
        places = iter(room.split(sizes))
        self.layers = (_Layer * len(layers))()
        for place, weights in zip(self.layers, layers, strict=True):
            self._fill(place, weights, places)
        self.head = pack(ends.head, next(places))
        self.work: dict[str, torch.Tensor] = {}

    def _fill(self, place: _Layer, weights: LayerWeights, places: Iterator[torch.Tensor]) -> None:
        for name in MATRICES:
            self._point(place, name, pack(weights.to_pack(name), next(places), gated=name == "gate_up"))
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
        wanted_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All layers; keys and values of all tokens enter the caches. The residual of the wanted tokens (all, if None)
        is written over the first rows of `residual_TE`, which are returned."""
        tokens = len(residual_TE)
        layout = self._layout(tokens, len(step.tile_starts) - 1, step.table_RN.shape[1])
        model, work = self._model(caches, rotation), self._workspace(residual_TE)
        lists = (step.table_RN, step.starts_RN, step.rows_T, step.positions_T, step.tile_starts)
        function = kernel("run_layers", residual_TE)
        assert function is not None
        pointers = (ctypes.addressof(x) for x in (model, work, layout))
        kept, wanted = [], None
        if wanted_N is not None:
            # In the last layer only the wanted tokens are computed, each as a tile of its own.
            ones = torch.arange(len(wanted_N) + 1, dtype=torch.int32)
            kept = [wanted_N, step.rows_T[wanted_N], step.positions_T[wanted_N], ones]
            wanted = _Wanted(len(wanted_N), *(x.data_ptr() for x in kept))
        function(*pointers, *(x.data_ptr() for x in lists), None if wanted is None else ctypes.addressof(wanted))
        return residual_TE if wanted_N is None else residual_TE[: len(wanted_N)]

    def decode(
        self, rows: DecodeRows, caches: Sequence[LayerCache], rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Embed, compute, sample and end rows, step after step."""
        count, size = len(rows.last), self.ends.head.shape[0]
        most = count * rows.width  # tokens of a pass
        residual, logits = self.like.new_empty(most, self.width), self.like.new_empty(most, size)
        layout = self._layout(count, count, rows.table.shape[1])
        model, work = self._model(caches, rotation), self._workspace(residual)
        tensors = (self.ends.embedding, self.ends.norm, self.head, logits)
        ends = _Ends(*(x.data_ptr() for x in tensors), size)
        stop_sets = [np.unique(np.asarray(ids, np.int64)) for ids in rows.stop_sets]
        stop_starts = np.cumsum([0, *map(len, stop_sets)], dtype=np.int64)
        stop_ids = np.concatenate([*stop_sets, np.zeros(1, np.int64)])  # never empty, so that it has an address
        settings = (rows.limits, rows.seeds, rows.temperatures, rows.greedy, rows.stops, stop_starts, stop_ids)
        arrays = (rows.last, rows.positions, rows.counts, *settings, rows.tokens, rows.log_probs, rows.ended)
        arrays = (*arrays, rows.histories, rows.next_history)
        of = _Rows(count, rows.steps, rows.stop_at_end, *(array.ctypes.data for array in arrays))
        of.width, of.passes, of.tried = rows.width, rows.passes.ctypes.data, rows.tried.ctypes.data
        if rows.drafts is not None:
            drafted = np.array([len(draft) for draft in rows.drafts], np.int64)
            drafts = np.zeros((count, rows.steps), np.int64)
            for place, draft in zip(drafts, rows.drafts, strict=True):
                place[: len(draft)] = draft
            of.drafts, of.drafted = drafts.ctypes.data, drafted.ctypes.data
        function = kernel("run_steps", self.like)
        assert function is not None
        pointers = [ctypes.addressof(x) for x in (model, work, layout)]
        function(
            *pointers, rows.table.ctypes.data, rows.starts.ctypes.data, ctypes.addressof(ends), ctypes.addressof(of)
        )

    def _layout(self, tokens: int, tiles: int, table_width: int) -> AttentionLayout:
        columns = (self.heads + 2 * self.key_heads) * self.size
        return AttentionLayout(
            tokens, tiles, table_width,
            self.heads, self.key_heads, self.size, 0, torch.get_num_threads(),
            self.scale, self.epsilon, *(columns, self.size) * 3,
        )  # fmt: skip

    def _model(self, caches: Sequence[LayerCache], rotation: tuple[torch.Tensor, torch.Tensor]) -> _Model:
        for place, (keys, values) in zip(self.layers, caches, strict=True):
            place.keys, place.values = keys.data_ptr(), values.data_ptr()
        layers = ctypes.addressof(self.layers)
        return _Model(len(self.layers), self.width, self.hidden, layers, *(x.data_ptr() for x in rotation))

    def _workspace(self, residual_TE: torch.Tensor) -> _Workspace:
        # For this many tokens, padded to whole tiles of rows. Zeros, because products read the padding too.
        rows = -(-len(residual_TE) // ROWS) * ROWS
        columns = (self.heads + 2 * self.key_heads) * self.size
        widths = {"x": self.width, "qkv": columns, "attended": self.heads * self.size, "gated": self.hidden}
        if not self.work or len(self.work["x"]) < rows:
            self.work = {name: self.like.new_zeros(rows, width) for name, width in widths.items()}
        return _Workspace(residual_TE.data_ptr(), *(x.data_ptr() for x in self.work.values()))


def places_of(wanted: np.ndarray, held: np.ndarray) -> np.ndarray:
    """The index of each of `wanted` in `held`; -1 for those that are missing."""
    if not len(held):
        return np.full(len(wanted), -1)
    order = np.argsort(held)
    place = order[np.minimum(np.searchsorted(held, wanted, sorter=order), len(held) - 1)]
    return np.where(held[place] == wanted, place, -1)


@dataclass
class FirstTokens:
    """First tokens of rows, sampled on the device right after prefill; the host has not read them. (B,) each."""

    numbers: np.ndarray
    tokens: torch.Tensor
    log_probs: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[FirstTokens]) -> FirstTokens:
        numbers = np.concatenate([part.numbers for part in parts])
        columns = ([part.tokens for part in parts], [part.log_probs for part in parts])
        return cls(numbers, *(torch.cat(column) for column in columns))

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """The index of these rows' tokens; -1 for rows that began earlier."""
        return places_of(numbers, self.numbers)

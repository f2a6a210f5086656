"""The two containers inside a DataProto: named tensors and named object arrays whose first dimension is the rows;
checks and padding of their widths.

Legend of spans (second dimension of a tensor): `prompts` spans the prompt; `input_ids`, `attention_mask` and
`position_ids` span prompt and response; the fields in `RESPONSE_FIELDS` span the response.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch

from posttrain.batch.columns import Column, Taken, take_once

# Other names of stored tensors; both names read and write the same tensor.
OTHER_SPELLINGS = {"log_probs": "old_log_probs", "ref_log_probs": "ref_log_prob"}

TOKEN_ID_FIELDS = frozenset({"prompts", "responses", "input_ids"})
WHOLE_FIELDS = frozenset({"input_ids", "attention_mask", "position_ids"})
RESPONSE_FIELDS = frozenset(
    {
        "responses",
        "response_mask",
        "token_level_scores",
        "token_level_rewards",
        "old_log_probs",
        "ref_log_prob",
        "rollout_log_probs",
        "sampling_log_probs",
        "entropy",
        "values",
        "advantages",
        "returns",
    }
)

ROUTES = "routed_experts"
"""The non-tensor field that holds the experts of a row's first tokens: an array (tokens, layers, top_k) for each row,
ragged and in the smallest type."""

Value = TypeVar("Value")
Rows = slice | torch.Tensor


class Fields(MutableMapping[str, Value], Generic[Value]):
    """Named values with the same number of rows; `rows` is None until the first value tells it. A `Column` becomes a
    value when it is first read."""

    kind = "field"

    def __init__(self, fields: Mapping[str, Any] | None = None, rows: int | None = None) -> None:
        self.rows = rows
        self._fields: dict[str, Value | Column] = {}
        for name, value in (fields or {}).items():
            self[name] = value

    @abstractmethod
    def _accept(self, name: str, value: Any) -> Value:
        """The value as it is stored, or an error that says why it cannot be."""

    def _spelling(self, name: str) -> str:
        return name

    def __getitem__(self, name: str) -> Value:
        found = self.column(name)
        if isinstance(found, Column):
            found = self._fields[self._spelling(name)] = self._accept(name, found.value())
        return found

    def column(self, name: str) -> Value | Column:
        """The value, or the column that it will be made of when it is read."""
        try:
            return self._fields[self._spelling(name)]
        except KeyError:
            raise KeyError(f"no {self.kind} '{name}' in this batch; it has: {', '.join(self) or 'none'}") from None

    def columns(self) -> dict[str, Value | Column]:
        """All of them by name; none is made."""
        return dict(self._fields)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the value, which is not made."""
        return tuple(self.column(name).shape)  # type: ignore[union-attr]

    def take(self, index: Rows, taken: Taken | None = None) -> Self:
        """These rows of all fields."""
        taken = {} if taken is None else taken
        where = index if isinstance(index, slice) else index.cpu().numpy()
        cut = type(self)()
        # Rows are set apart from the fields: a batch may have rows and no fields of this kind at all.
        cut.rows = len(range(self.rows or 0)[index]) if isinstance(index, slice) else len(index)
        for name, value in self._fields.items():
            cut._fields[name] = take_once(value, where, taken) if isinstance(value, Column) else self._cut(value, index)
        return cut

    @abstractmethod
    def _cut(self, value: Value, index: Rows) -> Value:
        """These rows of a value."""

    def __setitem__(self, name: str, value: Any) -> None:
        accepted = value if isinstance(value, Column) else self._accept(name, value)
        rows = len(accepted)  # type: ignore[arg-type]
        if self.rows is not None and rows != self.rows:
            shape = tuple(accepted.shape)  # type: ignore[attr-defined]
            raise ValueError(
                f"{self.kind} '{name}' has shape {shape}: {rows} rows, "
                f"but this batch has shape ({self.rows},): {self.rows} rows"
            )
        self.rows = rows
        self._fields[self._spelling(name)] = accepted

    def __delitem__(self, name: str) -> None:
        self.column(name)
        self._fields.pop(self._spelling(name), None)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._spelling(name) in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class RowView(Mapping[str, Any]):
    """One row of a container of fields, read only."""

    def __init__(self, fields: Fields[Any], row: int) -> None:
        self._fields, self._row = fields, row

    def __getitem__(self, name: str) -> Any:
        return self._fields[name][self._row]

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class TensorBatch(Fields[torch.Tensor]):
    """Tensors that share the first dimension. Example: `TensorBatch({"responses": ids}).batch_size`."""

    kind = "tensor"

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size([self.rows or 0])

    def _spelling(self, name: str) -> str:
        return OTHER_SPELLINGS.get(name, name)

    def _accept(self, name: str, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"'{name}' in `batch` is a {type(value).__name__}; it takes tensors only (see `non_tensor_batch`)"
            )
        if value.dim() == 0:
            raise ValueError(f"tensor '{name}' has shape (): it needs a first dimension, the rows")
        return value

    def _cut(self, value: torch.Tensor, index: Rows) -> torch.Tensor:
        return value[index if isinstance(index, slice) else index.to(value.device)]

    def __repr__(self) -> str:
        held = self.columns().items()
        kinds = {n: type(t).__name__ if isinstance(t, Column) else str(t.dtype).removeprefix("torch.") for n, t in held}
        return ", ".join(f"{name} {kind} {self.shape(name)}" for name, kind in kinds.items())


class DecodedText:
    """The fields `prompt` and `response`, decoded from a batch's token ids when they are read."""

    SOURCES: ClassVar = {"prompt": "prompts", "response": "responses"}

    def __init__(self, batch: TensorBatch, decode: Callable[[list[int]], str]) -> None:
        self.batch, self.decode = batch, decode

    def __contains__(self, name: object) -> bool:
        return name in self.SOURCES and self.SOURCES[str(name)] in self.batch

    def make(self, name: str) -> list[str]:
        ids = self.batch[self.SOURCES[name]]
        rows = [row.tolist() for row in ids.cpu()]
        if "attention_mask" in self.batch:
            mask = self.batch["attention_mask"].bool().cpu()
            mask = mask[:, : ids.shape[1]] if name == "prompt" else mask[:, mask.shape[1] - ids.shape[1] :]
            rows = [row[kept].tolist() for row, kept in zip(ids.cpu(), mask, strict=True)]
        return [self.decode(row) for row in rows]


class ObjectBatch(Fields[np.ndarray]):
    """Numpy object arrays, one Python value per row.

    With `decoded` set, reading (or `in`) also finds the decoded texts; iteration lists them only once they are made.
    """

    kind = "non-tensor field"
    decoded: DecodedText | None = None

    def _accept(self, name: str, value: Any) -> np.ndarray:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise TypeError(
                f"'{name}' in `non_tensor_batch` is a {type(value).__name__}; give a list or array, one value per row"
            )
        if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:
            return value
        # A plain 1-d array becomes Python values; rows of an n-d array stay arrays.
        values = value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else list(value)
        return object_array(values)

    def column(self, name: str) -> np.ndarray | Column:
        if name not in self._fields and self.decoded is not None and name in self.decoded:
            self[name] = self.decoded.make(name)
        return super().column(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (self.decoded is not None and name in self.decoded)

    def _cut(self, value: np.ndarray, index: Rows) -> np.ndarray:
        return value[index if isinstance(index, slice) else index.cpu().numpy()]


def object_array(values: Sequence[Any]) -> np.ndarray:
    """A 1-d object array; numpy alone would turn lists of equal length into a 2-d one."""
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def row_index(index: Any, rows: int) -> Rows:
    """Turns a slice, list, range, array, tensor or boolean mask into a slice or a tensor of row numbers."""
    if isinstance(index, slice):
        if index.step in (None, 1):
            return index  # stays a slice, which shares memory; row numbers copy
        index = range(rows)[index]
    if isinstance(index, range):
        index = list(index)
    where = torch.as_tensor(index)
    if where.numel() == 0 and where.dtype != torch.bool:
        return torch.zeros(0, dtype=torch.long)
    if where.dim() != 1 or where.is_floating_point():
        raise TypeError(f"rows are chosen by integers or a mask, not by {where.dtype} of shape {tuple(where.shape)}")
    if where.dtype == torch.bool:
        if len(where) != rows:
            raise IndexError(f"mask of shape ({len(where)},) for a batch of shape ({rows},)")
        return where.nonzero().squeeze(1)
    where = where.long()
    if int(where.min()) < -rows or int(where.max()) >= rows:
        raise IndexError(f"row numbers from {int(where.min())} to {int(where.max())} for a batch of {rows} rows")
    return torch.where(where < 0, where + rows, where)


def same(a: Any, b: Any) -> bool:
    """Equality of two values of a batch, through tensors, arrays and nested containers; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if type(a) is not type(b):  # 1 and True are equal in Python, and mean different things here
        return False
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and all(same(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def check_widths(batch: TensorBatch) -> None:
    """Raises an error that names both shapes when a tensor does not span what its name says."""
    if "responses" not in batch:
        return
    responses = batch.shape("responses")
    for name in sorted(RESPONSE_FIELDS & set(batch)):
        shape = batch.shape(name)
        if len(shape) >= 2 and shape[1] != responses[1]:
            raise ValueError(
                f"'{name}' has shape {shape} but 'responses' has shape {responses}: '{name}' spans the response"
            )
    if "prompts" not in batch:
        return
    prompts = batch.shape("prompts")
    width = prompts[1] + responses[1]
    for name in sorted(WHOLE_FIELDS & set(batch)):
        shape = batch.shape(name)
        if len(shape) == 2 and shape[1] != width:
            raise ValueError(
                f"'{name}' has shape {shape} but 'prompts' {prompts} and 'responses' {responses} make {width} columns: "
                f"'{name}' spans prompt and response"
            )


def pad_to_common_width(parts: Sequence[TensorBatch], pad_token_id: int = 0) -> list[TensorBatch]:
    """Gives the parts one prompt width and one response width, the largest of each.

    Prompts are padded on the left, per-response tensors on the right, and tensors over prompt and response on both
    sides, so that columns keep their meaning. Token ids are filled with `pad_token_id`, all else with 0. Parts that
    have equal widths already are returned as they are. A tensor of another name counts as per-response when its
    width equals that of `responses` in every part.
    """
    if not _differing(parts):
        return list(parts)
    spans = [_spans(part) for part in parts]
    prompt_width, response_width = (max(widths) for widths in zip(*spans, strict=True))
    padded = []
    for part, (prompt, response) in zip(parts, spans, strict=True):
        tensors = {}
        for name, tensor in part.columns().items():
            if isinstance(tensor, Column):  # columns that are not made yet have the common width already
                tensors[name] = tensor
                continue
            left = right = 0
            if name == "prompts":
                left = prompt_width - prompt
            elif name in WHOLE_FIELDS:
                left, right = prompt_width - prompt, response_width - response
            elif tensor.dim() >= 2 and _is_per_response(name, parts, spans):
                right = response_width - response
            tensors[name] = _pad(tensor, left, right, pad_token_id if name in TOKEN_ID_FIELDS else 0)
        padded.append(TensorBatch(tensors, rows=part.rows))
    return padded


def _differing(parts: Sequence[TensorBatch]) -> set[str]:
    first = parts[0]
    shared = [(name, part) for part in parts[1:] for name in part if name in first]
    return {name for name, part in shared if part.shape(name)[1:] != first.shape(name)[1:]}


def _spans(part: TensorBatch) -> tuple[int, int]:
    """Widths of the prompt and of the response in this part."""
    whole = [part.shape(name) for name in sorted(WHOLE_FIELDS & set(part))]
    if whole and "prompts" not in part:
        raise ValueError(
            f"tensors of different widths cannot be joined: of shape {whole[0]} it is not known where the prompt ends, "
            "because 'prompts' is missing"
        )
    prompt = part.shape("prompts")[1] if "prompts" in part else 0
    for name in ["responses", *sorted(RESPONSE_FIELDS)]:
        if name in part and len(part.shape(name)) >= 2:
            return prompt, part.shape(name)[1]
    return prompt, whole[0][1] - prompt if whole else 0


def _is_per_response(name: str, parts: Sequence[TensorBatch], spans: Sequence[tuple[int, int]]) -> bool:
    if name in RESPONSE_FIELDS:
        return True
    if not all("responses" in part and name in part for part in parts):
        return False
    widths = [part.shape(name)[1] for part in parts]
    return len(set(widths)) > 1 and widths == [response for _, response in spans]


def _pad(tensor: torch.Tensor, left: int, right: int, fill: int) -> torch.Tensor:
    if left == right == 0:
        return tensor
    rows, _, *rest = tensor.shape
    before, after = (tensor.new_full((rows, width, *rest), fill) for width in (left, right))
    return torch.cat([before, tensor, after], dim=1)

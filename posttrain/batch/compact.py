"""A batch without what can be computed from its lengths: how rows travel between processes.

`compact` replaces padded tensors by sequences end to end, token ids in 32 bits, and drops masks and positions that
follow from the lengths. `keep_rows` leaves what a worker computed in its store. Both give a batch that reads as the
padded one did, bit for bit.

Shapes: B rows, P prompt width, R response width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain.batch.columns import (
    Column,
    Held,
    MaskColumn,
    ObjectColumn,
    PairColumn,
    RowPlaces,
    StoredColumn,
    keep,
    ragged,
)
from posttrain.batch.data_proto import DataProto
from posttrain.batch.fields import ROUTES

Lengths = tuple[np.ndarray, np.ndarray]
_FLOATS = (torch.float32, torch.float64)


def lengths_of(data: DataProto) -> Lengths:
    """(B,) tokens of each prompt, and of each response."""
    mask = data.batch.column("attention_mask")
    if isinstance(mask, MaskColumn) and mask.prompt_B is not None:
        return mask.prompt_B, mask.response_B
    real, width = data.batch["attention_mask"].bool().cpu(), data.batch.shape("responses")[1]
    split = real.shape[1] - width
    return real[:, :split].sum(-1).numpy(), real[:, split:].sum(-1).numpy()


def row_sums(data: DataProto, name: str) -> np.ndarray:
    """(B,) in float64: the sum of a column over each row's tokens."""
    column = data.batch.column(name)
    return column.row_sums() if isinstance(column, Column) else column.double().sum(-1).cpu().numpy()


def token_columns(
    places: RowPlaces,
    lengths: Lengths,
    widths: tuple[int, int],
    pad_token_id: int,
    keys: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
) -> dict[str, Column]:
    """The columns of ids, masks and positions over rows that lie in a store as `prompts` and `responses`; `keys` are
    digests of both."""
    (prompt_B, response_B), (prompt_width, width) = lengths, widths
    ids: dict[str, Any] = {"dtype": torch.int64, "fill": pad_token_id}
    prompts = StoredColumn(places, "prompts", prompt_B, prompt_width, left=True, keys_B2=keys[0], **ids)
    responses = StoredColumn(places, "responses", response_B, width, keys_B2=keys[1], **ids)
    mask = MaskColumn(response_B, width, prompt_B, prompt_width)
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": PairColumn(prompts, responses),
        "attention_mask": mask,
        "position_ids": MaskColumn(response_B, width, prompt_B, prompt_width, counted=True),
        "response_mask": MaskColumn(response_B, width),
    }


def compact(data: DataProto) -> DataProto:
    """The batch in its short form; a column that does not follow from the lengths, or has values outside the tokens of
    its rows, stays as it is."""
    tensors = data.batch
    if not {"input_ids", "attention_mask", "responses"} <= tensors.keys() or not len(data):
        return data
    if isinstance(tensors.column("input_ids"), Column):
        return data
    ids, mask, width = tensors["input_ids"].cpu(), tensors["attention_mask"].cpu(), tensors.shape("responses")[1]
    start = ids.shape[1] - width
    prompt_B, response_B = lengths_of(data)
    real = mask.bool()
    # The value of padding is nowhere recorded: it is what stands in the first padded place.
    fill = int(ids[~real][0]) if not bool(real.all()) else 0
    prompts = [row[kept].numpy() for row, kept in zip(ids[:, :start].int(), real[:, :start], strict=True)]
    block = {"prompts": ragged(prompts), "responses": ragged(_beginnings(ids[:, start:].int(), response_B))}
    places = RowPlaces.of_block(Held(block), len(data))
    short = token_columns(places, (prompt_B, response_B), (start, width), fill)
    found: dict[str, Any] = tensors.columns()
    for name, tensor in found.items():
        if isinstance(tensor, Column):
            continue
        if name in short:
            made: Column = short[name]
        elif tensor.ndim == 2 and tensor.shape[1] == width and tensor.dtype in _FLOATS:
            block[name] = ragged(_beginnings(tensor, response_B))
            made = StoredColumn(places, name, response_B, width, tensor.dtype)
        else:
            continue
        # Compared, not assumed: what a user's own code made may have other masks, or values on padding.
        if made.shape == tensor.shape and _equal(made.value(), tensor.cpu()):
            found[name] = made
    return DataProto(found, data.non_tensor_batch.columns(), data.meta_info)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Bit for bit: NaN stays NaN, and 0 is not -0.
    if one.dtype != other.dtype:
        return False
    kind = {torch.float32: torch.int32, torch.float64: torch.int64}.get(one.dtype, one.dtype)
    return torch.equal(one.view(kind), other.contiguous().view(kind))


def _beginnings(values_BR: torch.Tensor, length_B: np.ndarray) -> list[np.ndarray]:
    return [row[:length].numpy() for row, length in zip(values_BR.detach().cpu(), length_B.tolist(), strict=True)]


def keep_rows(found: DataProto, like: DataProto) -> DataProto:
    """What was computed of the rows of `like`, in this process's store: tensors over responses, and routes of
    experts. Their values behind the responses are 0."""
    lengths, width = lengths_of(like)[1], like.batch.shape("responses")[1]
    spans = {name: x for name, x in found.batch.items() if x.ndim == 2 and x.shape[1] == width and x.dtype in _FLOATS}
    columns: dict[str, Sequence[np.ndarray]] = {
        name: [row[:n].numpy() for row, n in zip(x.detach().cpu(), lengths.tolist(), strict=True)]
        for name, x in spans.items()
    }
    if ROUTES in found.non_tensor_batch:
        columns[ROUTES] = list(found.non_tensor_batch[ROUTES])
    places = RowPlaces.of_block(keep(columns), len(found))
    for name, tensor in spans.items():
        found.batch[name] = StoredColumn(places, name, lengths, width, tensor.dtype)
    if ROUTES in columns:
        found.non_tensor_batch[ROUTES] = ObjectColumn(places, ROUTES)
    return found

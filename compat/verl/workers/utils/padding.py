"""Batches between their two forms: rows of one width, prompts filled up at the left and responses at the right, or
nested tensors with the tokens alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from verl.utils import tensordict_utils as tu


def left_right_2_no_padding(data: Any) -> Any:
    """The TensorDict with `input_ids` and `position_ids` as nested tensors, `loss_mask`, and the widths that it had
    (`max_seq_len`, `max_response_len`) with the places of its tokens (`indices`)."""
    for name in ("input_ids", "attention_mask", "response_mask", "position_ids"):
        assert name in data, f"{name} is required in left-right padding data"
    ids, mask = data.pop("input_ids"), data["attention_mask"].bool()
    tu.assign_non_tensor_data(data, "max_seq_len", ids.shape[1])
    tu.assign_non_tensor_data(data, "max_response_len", data["response_mask"].shape[1])
    tu.assign_non_tensor_data(data, "indices", mask.flatten().nonzero().flatten())
    data["input_ids"] = _without_padding(ids, mask)
    # Positions may have several rows per sequence (text, height, width, time), which are cut alike.
    data["position_ids"] = _without_padding(data["position_ids"], mask)
    data["loss_mask"] = data["response_mask"]
    for name in ("routed_experts", "teacher_logprobs", "teacher_ids"):
        value = data.get(name, None)
        if value is not None and not value.is_nested:
            data[name] = torch.nested.as_nested_tensor(
                [row[kept] for row, kept in zip(value, mask, strict=True)], layout=torch.jagged
            )
    return data


def _without_padding(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = [row[..., kept] for row, kept in zip(values, mask, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def no_padding_2_padding(tensor: Any, data: Any) -> torch.Tensor:
    """(rows, longest response, ...) what the model gave for the tokens of the responses, filled up with 0.

    `tensor` is nested, or all rows behind each other. What a model gives at a place is about the next token, so that a
    response's part begins one place before it.
    """
    values = tensor.values() if tensor.is_nested else tensor
    prompts, responses = (_lengths(data[name]) for name in ("prompts", "responses"))
    ends = tensor.offsets()[1:] if tensor.is_nested else (prompts + responses).cumsum(0)
    widest = tu.get_non_tensor_data(data=data, key="max_response_len", default=-1)
    widest = int(responses.max()) if widest < 0 else int(widest)
    unpadded = (0, 0) * (values.ndim - 1)
    rows = [
        F.pad(values[end - count - 1 : end - 1], (*unpadded, 0, widest - count))
        for end, count in zip(ends.tolist(), responses.tolist(), strict=True)
    ]
    return torch.stack(rows)


def _lengths(ids: Any) -> torch.Tensor:
    if getattr(ids, "is_nested", False):
        return ids.offsets().diff().cpu()
    return torch.tensor([len(row) for row in ids])


def build_attention_mask_from_nested(input_ids: Any, max_seq_len: int | None = None) -> torch.Tensor:
    """(rows, longest) 1 where a row has a token."""
    assert input_ids.is_nested, "input_ids must be a nested tensor"
    lengths = input_ids.offsets().diff()
    width = int(lengths.max()) if max_seq_len is None else max_seq_len
    return (torch.arange(width, device=lengths.device)[None] < lengths[:, None]).to(torch.int32)


def response_from_nested(tensor: Any, response_mask: Any) -> torch.Tensor:
    """What the model gave for the tokens of the responses, as a nested tensor."""
    values, ends = tensor.values(), tensor.offsets()[1:].tolist()
    counts = response_mask.offsets().diff().tolist()
    rows = [values[end - count - 1 : end - 1] for end, count in zip(ends, counts, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def response_to_nested(tensor: torch.Tensor, response_mask: Any) -> torch.Tensor:
    """Rows of one width without what fills them up."""
    assert response_mask.is_nested
    counts = response_mask.offsets().diff().tolist()
    return torch.nested.as_nested_tensor(
        [row[:count] for row, count in zip(tensor, counts, strict=True)], layout=torch.jagged
    )

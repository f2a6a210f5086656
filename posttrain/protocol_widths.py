"""Widths of the tensors of a batch: the check that they fit together, and padding of several batches to one width."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.protocol_fields import RESPONSE_FIELDS, TOKEN_ID_FIELDS, WHOLE_FIELDS, TensorBatch


def check_widths(batch: TensorBatch) -> None:
    """Raises an error that names both shapes when a tensor does not span what its name says."""
    if "responses" not in batch:
        return
    responses = batch["responses"]
    for name in sorted(RESPONSE_FIELDS & set(batch)):
        if batch[name].dim() >= 2 and batch[name].shape[1] != responses.shape[1]:
            raise ValueError(
                f"'{name}' has shape {tuple(batch[name].shape)} but 'responses' has shape {tuple(responses.shape)}: "
                f"'{name}' spans the response"
            )
    if "prompts" not in batch:
        return
    width = batch["prompts"].shape[1] + responses.shape[1]
    for name in sorted(WHOLE_FIELDS & set(batch)):
        if batch[name].dim() == 2 and batch[name].shape[1] != width:
            raise ValueError(
                f"'{name}' has shape {tuple(batch[name].shape)} but 'prompts' {tuple(batch['prompts'].shape)} and "
                f"'responses' {tuple(responses.shape)} make {width} columns: '{name}' spans prompt and response"
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
        for name, tensor in part.items():
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
    return {name for name, part in shared if part[name].shape[1:] != first[name].shape[1:]}


def _spans(part: TensorBatch) -> tuple[int, int]:
    """Widths of the prompt and of the response in this part."""
    whole = [part[name] for name in sorted(WHOLE_FIELDS & set(part))]
    if whole and "prompts" not in part:
        raise ValueError(
            f"tensors of different widths cannot be joined: of shape {tuple(whole[0].shape)} it is not known where the "
            "prompt ends, because 'prompts' is missing"
        )
    prompt = part["prompts"].shape[1] if "prompts" in part else 0
    for name in ["responses", *sorted(RESPONSE_FIELDS)]:
        if name in part and part[name].dim() >= 2:
            return prompt, part[name].shape[1]
    return prompt, whole[0].shape[1] - prompt if whole else 0


def _is_per_response(name: str, parts: Sequence[TensorBatch], spans: Sequence[tuple[int, int]]) -> bool:
    if name in RESPONSE_FIELDS:
        return True
    if not all("responses" in part and name in part for part in parts):
        return False
    widths = [part[name].shape[1] for part in parts]
    return len(set(widths)) > 1 and widths == [response for _, response in spans]


def _pad(tensor: torch.Tensor, left: int, right: int, fill: int) -> torch.Tensor:
    if left == right == 0:
        return tensor
    rows, _, *rest = tensor.shape
    before, after = (tensor.new_full((rows, width, *rest), fill) for width in (left, right))
    return torch.cat([before, tensor, after], dim=1)

"""collate: turns items of a data set into the DataProto that rollout starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from posttrain.protocol import DataProto

CARRIED = ("raw_prompt", "prompt", "data_source", "ground_truth", "extra_info", "index")


def collate(items: Sequence[Mapping[str, Any]], *, pad_token_id: int = 0) -> DataProto:
    """Return a batch of prompts, padded on the left to the longest one.

    Tensors: `prompts`, `attention_mask`, `position_ids`. Others: `raw_prompt_ids` and the item's fields. A row's
    `response` is not among them, since that name is for the generated text; rewards find it in `extra_info`.
    """
    if not items:
        raise ValueError("collate of no items")
    # Padded on the left, so that every response begins in the same column.
    width = max(len(item["prompt_ids"]) for item in items)
    prompts = torch.full((len(items), width), pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros(len(items), width, dtype=torch.long)
    for row, item in enumerate(items):
        start = width - len(item["prompt_ids"])
        prompts[row, start:] = torch.tensor(item["prompt_ids"], dtype=torch.long)
        attention_mask[row, start:] = 1
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    tensors = {"prompts": prompts, "attention_mask": attention_mask, "position_ids": position_ids}
    others = {name: [item[name] for item in items] for name in CARRIED}
    others["raw_prompt_ids"] = [list(item["prompt_ids"]) for item in items]
    return DataProto.from_dict(tensors, others, {"pad_token_id": pad_token_id})

"""Value heads that other trainers leave beside a causal LM's weights: one linear layer from hidden state to score.

Known names: `v_head.summary` (TRL, LLaMA-Factory), `v_head`, `value_head`, `score` and `reward_head`, in the model's
own safetensors files or in `value_head.safetensors` beside them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

_NAME = re.compile(r"(?:^|\.)(?:v_head\.summary|v_head|value_head|score|reward_head)\.(weight|bias)$")
_FILES = ("value_head.safetensors", "model.safetensors")
_INDEX = "model.safetensors.index.json"


def find_value_head(source: str) -> dict[str, torch.Tensor] | None:
    """`weight` (1, E) and where there is one `bias` (1,) of the head in a folder or hub id; None if it has none."""
    index = _file(source, _INDEX)
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index is not None else set()
    found: dict[str, torch.Tensor] = {}
    for name in [*_FILES, *sorted(shards)]:
        path = _file(source, name)
        if path is not None:
            found |= {kind: tensor for kind, tensor in _head_in(path).items() if kind not in found}
    weight = found.get("weight")
    return found if weight is not None and weight.ndim == 2 and weight.shape[0] == 1 else None


def _head_in(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        matches = {name: _NAME.search(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        return {match[1]: file.get_tensor(name) for name, match in matches.items() if match}


def _file(source: str, name: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None


def put_head(model: Any, head: dict[str, torch.Tensor]) -> None:
    """Give a sequence classifier this head in place of its own, which has no bias."""
    old = model.score.weight
    new = torch.nn.Linear(old.shape[1], 1, bias="bias" in head, device=old.device, dtype=old.dtype)
    with torch.no_grad():
        for kind, tensor in head.items():
            getattr(new, kind).copy_(tensor)
    model.score = new

"""verl's helpers. Nothing is loaded before it is asked for: reward workers import this without torch."""

from __future__ import annotations

import importlib
from typing import Any

from verl._missing import not_given

_HOMES = {
    "hf_tokenizer": "tokenizer",
    "hf_processor": "tokenizer",
    "normalize_token_ids": "tokenizer",
    "set_pad_token_id": "tokenizer",
    "omega_conf_to_dataclass": "config",
    "validate_config": "config",
    "as_torch_index": "groupwise",
    "group_mean_std": "groupwise",
}
_MODULES = ("config", "groupwise", "tokenizer")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return not_given(__name__)(name)

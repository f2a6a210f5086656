"""Training data: files and rows, chat templates, data sets, samplers, and recipes that prepare data sets.

Names are loaded on first use, because reading rows must not import torch. (`collate` is the function in
`posttrain.data.dataset`.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.data.dataset import PromptDataset, PromptItem
    from posttrain.data.rows import DataError, load_rows, resolve_files
    from posttrain.data.sampler import PromptSampler, make_sampler, register_sampler, sequential_batches

_HOMES = {
    "DataError": "rows",
    "PromptDataset": "dataset",
    "PromptItem": "dataset",
    "PromptSampler": "sampler",
    "load_rows": "rows",
    "make_sampler": "sampler",
    "register_sampler": "sampler",
    "resolve_files": "rows",
    "sequential_batches": "sampler",
}

__all__ = [
    "DataError",
    "PromptDataset",
    "PromptItem",
    "PromptSampler",
    "load_rows",
    "make_sampler",
    "register_sampler",
    "resolve_files",
    "sequential_batches",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"posttrain.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

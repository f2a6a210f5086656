"""Training data: files and rows, chat templates, data sets, samplers, and recipes that prepare data sets.

Names are loaded on first use, because reading rows must not import torch. (`collate` is the function in
`posttrain.data.dataset`.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.lazy import lazy_names

if TYPE_CHECKING:
    from posttrain.data.dataset import PromptDataset, PromptItem
    from posttrain.data.rows import DataError, load_rows, resolve_files
    from posttrain.data.sampler import PromptSampler, make_sampler, register_sampler, sequential_batches

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

__getattr__ = lazy_names(
    __name__,
    dataset="PromptDataset PromptItem",
    rows="DataError load_rows resolve_files",
    sampler="PromptSampler make_sampler register_sampler sequential_batches",
)

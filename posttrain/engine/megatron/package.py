"""The package megatron-core: its parts, imported when they are needed (it takes seconds), and what a CPU run changes.

Megatron-Core is written for CUDA devices, and asks `torch.cuda.current_device()` where to make its buffers; a mixture
of experts copies the counts of its tokens to the host on a CUDA stream. On a CPU the buffers are made there, and the
counts are there already. Nothing else of it is changed: its random numbers, the only other part that needs CUDA, are
for dropout, which is never on.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.engine.megatron.settings import install_words, is_installed
from posttrain.engine.settings import RL
from posttrain.errors import UserError

PACKAGE = "megatron-core"


class MegatronError(UserError):
    """Megatron-Core is missing, or cannot do what was asked of it."""


def version() -> str:
    return importlib.metadata.version(PACKAGE)


def part(name: str) -> Any:
    """A module of megatron.core, without its warnings about packages that are not used here."""
    if not is_installed():
        raise MegatronError(
            f"{RL.strategy}=megatron: the package megatron-core is not installed in this environment; "
            f"{install_words(RL.strategy)}"
        )
    # Megatron-Core calls it by this name in every layer with sequence parallelism; torch means to rename it.
    warnings.filterwarnings("ignore", message=".*reduce_scatter_tensor", category=FutureWarning)
    with warnings.catch_warnings(action="ignore"):
        logging.getLogger("megatron.core").setLevel(logging.ERROR)
        return importlib.import_module(f"megatron.core.{name}" if name else "megatron.core")


def parallel_state() -> Any:
    return part("parallel_state")


@contextmanager
def buffers_on(device: torch.device) -> Iterator[None]:
    """Inside, Megatron-Core makes its buffers on `device`, also where that is a CPU."""
    if device.type == "cuda":
        yield
        return
    before = torch.cuda.current_device
    torch.cuda.current_device = lambda: device  # pyright: ignore
    try:
        yield
    finally:
        torch.cuda.current_device = before


def adapt_experts(device: torch.device) -> None:
    """Lets tokens be sent to experts on a CPU, without a CUDA stream."""
    if device.type == "cuda":
        return
    dispatcher = part("transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = "none on a CPU"
    dispatcher._maybe_dtoh_and_synchronize = _counts_as_numbers


def _counts_as_numbers(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    """What the dispatcher's own method does, less the copying: counts of tokens as arrays."""
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            counts = getattr(self, name)
            if isinstance(counts, torch.Tensor):
                setattr(self, name, counts.numpy())
    return tokens_per_expert

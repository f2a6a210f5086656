"""Facts about an engine and its model, from which the driver plans passes and prints notes without holding either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from posttrain.kernels.train import can_train, on_cuda
from posttrain.models.adapter_files import adapter_settings
from posttrain.models.adapter_targets import adapters_share, describe_adapted, describe_stacked
from posttrain.models.forward import forward_mode_of
from posttrain.models.loading import Positions, model_end_ids, positions_of
from posttrain.models.lora import has_adapters
from posttrain.models.quantized import numbers_in

JOINING = 0.16  # tokens that it costs a token of a model that is WIDTH wide, measured on an H200
WIDTH = 896


@dataclass(frozen=True)
class EngineFacts:
    """Plain values, equal on all ranks."""

    dtype: torch.dtype  # the type that the model computes in
    parameters: int
    trained: int  # parameters that an optimizer may change
    vocabulary: int
    width: int
    positions: Positions
    end_ids: tuple[int, ...]  # tokens that end a response by the model's own files
    packed: bool  # whether rows are computed end to end, without padding
    shares_prompts: bool  # whether a prompt is computed once for all its responses of a pass
    all_pairs: bool  # whether attention computes all pairs of tokens of a sequence, seen or not
    # Cost per token of merging attention over a shared prompt with attention over the response, in tokens.
    joining: float
    token_budget: int  # tokens of a pass, at most
    max_rows: int | None  # rows of a pass, at most
    # Neighbouring ranks that compute the same rows: each a stretch of their tokens, or a part of every matrix.
    sequence_parallel: int
    # Settings of the adapters, without their base's name; None for a model without adapters.
    adapters: dict[str, Any] | None
    stacked: str | None  # matrices that lie in one tensor and have no adapters, in words (`describe_stacked`)
    pairs: bool = False  # whether rows come in pairs that are computed in the same pass
    note: str | None = None  # what of the model is not used, and why
    # Stages of a pipeline, each on ranks of its own, one behind the other; all of them are given the same rows.
    pipeline: int = 1
    # Name and version of the library that computes instead of torch's own modules; None for torch's.
    engine: str | None = None
    # The type that inputs and weights of products are rounded to, where that is not `dtype`.
    rounding: torch.dtype | None = None
    adapted_experts: str | None = None  # experts with adapters, in words (`describe_adapted`)
    adapters_share: float = 0.0  # of the base's numbers; 0 where no experts have adapters


def joining_cost(width: int) -> float:
    """Merging reads every number once, while a matrix product does arithmetic in proportion to the width."""
    return JOINING * WIDTH / width


def facts_of(
    module: Any,
    *,
    packed: bool,
    share_prompts: bool = True,
    token_budget: int = 16384,
    max_rows: int | None = None,
    sequence_parallel: int = 1,
    pairs: bool = False,
    pipeline: int = 1,
    engine: str | None = None,
    rounding: torch.dtype | None = None,
) -> EngineFacts:
    """`module` is whole: not yet sharded."""
    settings = module.config.get_text_config()
    weights = list(module.parameters())
    return EngineFacts(
        dtype=weights[0].dtype,
        parameters=sum(numbers_in(weight) for weight in weights),
        trained=sum(weight.numel() for weight in weights if weight.requires_grad),
        vocabulary=settings.vocab_size,
        width=settings.hidden_size,
        positions=positions_of(module),
        end_ids=model_end_ids(module),
        packed=packed,
        shares_prompts=packed and share_prompts,
        all_pairs=not can_train(weights[0]),
        joining=joining_cost(settings.hidden_size) if on_cuda(weights[0]) else 0.0,
        token_budget=token_budget,
        max_rows=max_rows,
        sequence_parallel=sequence_parallel,
        adapters=_adapters(module),
        stacked=describe_stacked(module),
        pairs=pairs,
        note=forward_mode_of(module).note,
        pipeline=pipeline,
        engine=engine,
        rounding=rounding,
        adapted_experts=describe_adapted(module),
        adapters_share=adapters_share(module),
    )


def _adapters(module: Any) -> dict[str, Any] | None:
    if not has_adapters(module):
        return None
    return adapter_settings(module, "") if hasattr(module, "peft_config") else {}

"""Which ranks hold what: the sizes of tensor, pipeline and expert parallelism, and the process groups of this rank.

Ranks are numbered as in Megatron-Core: neighbours share the matrices of a layer (tensor), then come ranks with other
tokens of the same rows (context), copies with other rows (data), and the stages of the pipeline. Experts are
distributed over the tensor, context and data ranks of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from posttrain.engine.base import EngineLayout
from posttrain.engine.megatron.settings import SECTION, megatron_settings, product
from posttrain.engine.ranks import RanksError, world_size
from posttrain.engine.settings import RL, EngineKeys


@dataclass(frozen=True)
class ParallelSizes:
    """Into how many parts a model is cut (matrices of a layer, layers, experts), and the tokens of a pass."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # chunks of layers of each stage
    expert: int = 1
    context: int = 1
    sequence: bool = False  # whether tensor ranks also cut the tokens between the matrices of a layer
    # Layers of the first and the last stage; None lets all stages share the layers as evenly as they can.
    first_layers: int | None = None
    last_layers: int | None = None
    shared_moments: bool = True  # whether copies of the model share the moments of the optimizer
    keys: EngineKeys = field(default=RL, compare=False)  # where they were set, for error messages

    @classmethod
    def of(cls, layout: EngineLayout) -> ParallelSizes:
        own = megatron_settings(layout.own)
        return cls(
            own.tensor_parallel_size,
            own.pipeline_parallel_size,
            own.virtual_pipeline_parallel_size or 1,
            own.expert_parallel_size,
            own.context_parallel_size,
            own.sequence_parallel and own.tensor_parallel_size > 1,
            own.num_layers_in_first_pipeline_stage,
            own.num_layers_in_last_pipeline_stage,
            own.use_distributed_optimizer,
            layout.keys,
        )

    @property
    def together(self) -> int:
        """Ranks that compute the same rows."""
        return self.tensor * self.pipeline * self.context

    @property
    def key(self) -> str:
        """The settings that these sizes are."""
        return f"{self.keys.section}.{SECTION}"

    def _stages(self) -> str:
        return f"pipeline {self.pipeline}" + (f" with {self.virtual} chunks each" if self.virtual > 1 else "")

    def words(self) -> str:
        words = [f"tensor {self.tensor}", self._stages(), f"expert {self.expert}"]
        words += [f"context {self.context}"] * (self.context > 1) + ["sequence parallel"] * self.sequence
        return ", ".join(words)


def check_sizes(sizes: ParallelSizes, ranks: int) -> None:
    """Rejects sizes that do not divide the ranks."""
    words, together = product(sizes.tensor, sizes.pipeline, sizes.context)
    if ranks % together:
        raise RanksError(
            f"{sizes.key}: {words} ranks compute the same rows, but the run has {ranks}, which is no multiple of it; "
            "set sizes whose product divides trainer.n_gpus_per_node x trainer.nnodes"
        )
    stage = ranks // sizes.pipeline
    if stage % sizes.expert:
        raise RanksError(
            f"{sizes.key}.expert_parallel_size={sizes.expert}: experts are dealt out over the {stage} ranks of a "
            f"pipeline stage ({ranks} ranks / pipeline_parallel_size={sizes.pipeline}), which is no multiple of it; "
            f"set a size that divides {stage}"
        )


@dataclass(frozen=True)
class RankGroups:
    """The process groups of this rank."""

    sizes: ParallelSizes
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    context: dist.ProcessGroup  # the ranks with the same weights and rows, which compute other tokens of them
    data: dist.ProcessGroup  # the ranks with the same weights, which compute other tokens of these or other rows
    expert: dist.ProcessGroup
    expert_data: dist.ProcessGroup  # the ranks with the same experts
    # The first and the last stage, which both hold a tied embedding; None on other stages.
    ends: dist.ProcessGroup | None

    @property
    def stage(self) -> int:
        return self.pipeline.rank()

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.sizes.pipeline - 1


# The sizes and the ranks that this process has groups for: Megatron-Core keeps one set of groups per process.
_grouped: tuple[ParallelSizes, Any] | None = None


def join_groups(sizes: ParallelSizes, device: torch.device) -> RankGroups:
    """Groups the ranks of this run; all of them must call it in the same order. A single process is a group of one."""
    from posttrain.engine.megatron.package import parallel_state

    if not dist.is_initialized():
        # Megatron-Core wants process groups even of a single process; a store in memory opens no port for them.
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timedelta(minutes=30))
    check_sizes(sizes, world_size())
    state: Any = parallel_state()
    global _grouped
    if _grouped != (sizes, dist.group.WORLD):  # this process may have served another run before
        leave_groups()
        state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=1,
        )
        _grouped = sizes, dist.group.WORLD
    if sizes.pipeline > 1:
        # By NCCL the first messages of a group must be those of all its ranks; neighbours alone may exchange later.
        dist.barrier(state.get_pipeline_model_parallel_group())
    return RankGroups(
        sizes,
        tensor=state.get_tensor_model_parallel_group(),
        pipeline=state.get_pipeline_model_parallel_group(),
        context=state.get_context_parallel_group(),
        data=state.get_data_parallel_group(with_context_parallel=True),
        expert=state.get_expert_model_parallel_group(),
        expert_data=state.get_expert_data_parallel_group(),
        ends=state.get_embedding_group(check_initialized=False),
    )


def leave_groups() -> None:
    """Drop the groups, so that the ranks can be grouped in another way."""
    from posttrain.engine.megatron.package import parallel_state

    global _grouped
    parallel_state().destroy_model_parallel()
    _grouped = None

"""What the workers of supervised training share: an engine by the settings, and how a step goes over the ranks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from posttrain.controller.dispatch import Calls, register, to_all
from posttrain.engine.fsdp import EngineSettings, FSDPEngine
from posttrain.engine.ranks import group_ranks, world_size
from posttrain.protocol import DataProto
from posttrain.workers.engine_worker import ExportingWorker
from posttrain.workers.lora_state import lora_state
from posttrain.workers.row_dispatch import parts_by_rank, reporting_ranks


def planned_step(group: Any, batch: DataProto) -> Calls:
    """One optimizer step on a batch: parts that balance the ranks' tokens, in equal numbers of passes. The weights in
    the batch are those of its rows in the whole of it, so that shares of the loss add up."""
    if group.world_size == 1:
        return Calls([(batch, None)])
    parts = parts_by_rank(batch, group)
    return Calls([(batch[part.rows], part.passes) for part in parts], reporting_ranks=reporting_ranks(group))


def join_steps(results: list[dict[str, Any]], calls: Calls) -> dict[str, Any]:
    """Losses are added up and tensors joined; what is left all ranks know alike."""
    own = calls.reported(results)
    joined = {name: torch.cat([part[name] for part in own]) for name, x in own[0].items() if torch.is_tensor(x)}
    return {**own[0], **joined, "loss": sum(part["loss"] for part in own)}


class SupervisedWorker(ExportingWorker):
    """A model that learns rows with given answers; `config` is an SFTConfig or a RewardTrainerConfig."""

    def __init__(self, config: Any, tokenizer: Any, device: torch.device, *, total_steps: int = 1) -> None:
        self.config, self.tokenizer, self.device, self.total_steps = config, tokenizer, device, total_steps
        self.home = device if world_size() == 1 else torch.device("cpu")  # ranks take their parts from host memory

    @register(to_all)
    def init_model(self) -> None:
        torch.manual_seed(self.config.trainer.seed)  # what is drawn, such as adapters, is the same on every rank
        self.engine = self.make_engine()
        self.adapters = lora_state(self.engine.facts(), self.config.model)

    @abstractmethod
    def make_engine(self) -> FSDPEngine:
        """The model and its optimizer."""

    def settings(self) -> EngineSettings:
        config, ranks = self.config, self.config.fsdp
        return EngineSettings(
            device=self.device,
            optim=config.optim,
            total_steps=self.total_steps,
            grad_clip=config.optim.clip_grad,
            token_budget=config.data.max_token_len_per_gpu,
            max_rows=config.data.micro_batch_size_per_gpu,
            pack=config.model.use_remove_padding,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
            ranks=group_ranks(
                self.device, fsdp_size=ranks.fsdp_size, sequence_size=ranks.ulysses_sequence_parallel_size
            ),
        )

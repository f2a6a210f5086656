"""Supervised fine-tuning: the mean negative log-likelihood of the assistant's tokens, over the whole batch."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.controller.dispatch import register
from posttrain.engine.base import Passes, TrainEngine
from posttrain.engine.fsdp import FSDPEngine
from posttrain.models.loading import load_causal_lm, resolve_dtype
from posttrain.models.lora import with_adapters
from posttrain.protocol import DataProto
from posttrain.workers.row_dispatch import by_passes, in_row_order
from posttrain.workers.supervised.worker import SupervisedWorker, join_steps, planned_step


def sft_step(engine: TrainEngine, batch: DataProto, passes: Passes | None = None) -> dict[str, float]:
    """One optimizer step; gives the engine's metrics and `loss`: the share of it that these rows have."""
    total = 0.0

    def loss(micro: DataProto, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal total
        share = -(micro.batch["loss_weights"] * outputs["log_probs"]).sum()
        total += float(share.detach())
        return share

    return {**engine.update(batch, loss, passes=passes), "loss": total}


class SFTWorker(SupervisedWorker):
    """A causal language model that learns the assistant's turns."""

    def make_engine(self) -> FSDPEngine:
        model = self.config.model
        dtype = resolve_dtype(model.dtype, self.device)
        module = load_causal_lm(model, dtype=dtype, device=self.home, quantization=model.quantization)
        if model.lora_rank > 0:
            module = with_adapters(module, model, role="")
        return FSDPEngine(module, self.settings())

    @register(planned_step, join_steps)
    def update(self, data: DataProto, passes: Passes | None = None) -> dict[str, Any]:
        """One optimizer step on these rows and those of the other ranks."""
        return sft_step(self.engine, data, passes)

    @register(by_passes, in_row_order)
    def log_probs(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        """`log_probs` of the answers."""
        found = self.engine.log_probs(data, passes=passes)
        return DataProto.from_dict({"log_probs": found["log_probs"]}) if found else DataProto()

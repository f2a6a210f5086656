"""Reward models: the better answer of a pair is to score above the worse one."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.algorithms.bradley_terry import bradley_terry_loss
from posttrain.config.lora import SCORE_HEADS
from posttrain.controller.dispatch import register, to_first
from posttrain.engine.base import Passes
from posttrain.engine.pairs import PairEngine
from posttrain.models.loading import resolve_dtype
from posttrain.models.lora import with_adapters
from posttrain.models.scorer_loading import load_scorer
from posttrain.protocol import DataProto
from posttrain.workers.row_dispatch import by_passes, in_row_order
from posttrain.workers.supervised.worker import SupervisedWorker, join_steps, planned_step


def pair_losses(batch: DataProto, scores: torch.Tensor, center_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """((P,) losses, (P,) by how much the better answer leads)."""
    chosen, rejected = scores[::2], scores[1::2]
    margins = batch.batch["margins"][::2].to(scores)
    return bradley_terry_loss(chosen, rejected, margins, center_coef=center_coef), chosen - rejected


class PairWorker(SupervisedWorker):
    """A scorer with one score per row, from a causal LM (with a new head) or from a sequence-classification folder."""

    engine: PairEngine

    def make_engine(self) -> PairEngine:
        model = self.config.model
        module = load_scorer(
            str(model.path),
            self.home,
            resolve_dtype(model.dtype, self.device),
            pad_token_id=self.tokenizer.pad_token_id,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
            new_head=True,
            allow_other_weights=model.allow_other_weights,
            quantization=model.quantization,
        )
        self.pad = module.config.get_text_config().pad_token_id
        if model.lora_rank > 0:
            module = with_adapters(module, model, whole=SCORE_HEADS, role="")
        return PairEngine(module, self.settings())

    @register(to_first)
    def pad_token_id(self) -> int:
        """The model's own, which it finds the end of a row by."""
        return self.pad

    @register(planned_step, join_steps)
    def update(self, data: DataProto, passes: Passes | None = None) -> dict[str, Any]:
        """One optimizer step on these pairs and those of the other ranks; gives also the `leads` of the better ones."""
        total, leads = 0.0, [torch.zeros(0)]

        def loss(micro: DataProto, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
            nonlocal total
            losses, lead = pair_losses(micro, outputs["scores"][:, 0], self.config.loss.center_coef)
            share = (losses * micro.batch["pair_weights"][::2].to(losses.dtype)).sum()
            total += float(share.detach())
            leads.append(lead.detach().cpu())
            return share

        metrics = self.engine.update(data, loss, passes=passes)
        return {**metrics, "loss": total, "leads": torch.cat(leads)}

    @register(by_passes, in_row_order)
    def scores(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        """`scores` of all rows."""
        return DataProto.from_dict({"scores": self.engine.scores(data, passes=passes)})

"""Supervised runs whose module is looked at: after training, or before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.models.scorer import padded_scores
from posttrain.trainer.supervised.loop import SupervisedTrainer

IDS = torch.tensor([[5, 9, 3, 77, 12]])


def watched(make: Any, *args: Any, **more: Any) -> tuple[Any, Any]:
    """(result, the trained module) of a run."""
    trainers, fit = [], SupervisedTrainer.fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SupervisedTrainer, "fit", lambda self: trainers.append(self) or fit(self))
        return make(*args, **more), trainers[0].task.group.worker.engine.module


def started(make: Any, *args: Any, **more: Any) -> Any:
    """The module of a run as it was before its first step."""
    found = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):

        def stop(self: Any) -> None:
            found.append(self.task.group.worker.engine.module)
            raise InterruptedError

        patch.setattr(SupervisedTrainer, "fit", stop)
        make(*args, **more)
    return found[0]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def scores(model: Any) -> torch.Tensor:
    return padded_scores(model.eval(), [[5, 9, 3, 77, 12], [4, 8]])

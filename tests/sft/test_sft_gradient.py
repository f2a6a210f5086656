"""The SFT gradient: equal to a plain formula in float64, whatever the packing and the micro-batches."""

from __future__ import annotations

import random

import pytest
import torch

from posttrain.config.model import ModelConfig
from posttrain.config.root import OptimConfig
from posttrain.data.chat import TrainedRow
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.models.loading import load_causal_lm
from posttrain.trainer.supervised.tasks import sft_batch

CPU = torch.device("cpu")
LAYOUTS = [
    {},
    {"max_rows": 1},
    {"max_rows": 3},
    {"token_budget": 50},
    {"pack": False},
    {"share_prompts": False},
    {"gradient_checkpointing": True, "max_rows": 4},
]


def ragged_rows(count: int = 12) -> list[TrainedRow]:
    """Rows of several turns: trained spans between others, one row trained from its second token, equal beginnings."""
    draw = random.Random(0)
    rows = []
    for number in range(count):
        ids = [7, 8, 9] * (number % 3) + [draw.randrange(250) for _ in range(draw.randrange(4, 30))]
        trained = [at > 2 and (at // 4) % 2 == 1 for at in range(len(ids))]
        trained[-1] = number % 2 == 0 or not any(trained)
        rows.append(TrainedRow(ids, trained))
    rows[0].trained[1] = True
    return rows


def model(folder):
    return load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float64, device=CPU)


def engine_gradient(folder, rows, **layout) -> tuple[float, torch.Tensor]:
    engine = TorchEngine(model(folder), EngineSettings(device=CPU, optim=OptimConfig(), **layout))
    total = 0.0

    def loss(micro, outputs):
        nonlocal total
        share = -(micro.batch["loss_weights"] * outputs["log_probs"]).sum()
        total += float(share.detach())
        return share

    engine.runner.gradients(sft_batch(rows, 0), loss, 1.0)
    assert engine.optimizer is not None
    return total, torch.cat([master.grad.flatten() for master in engine.optimizer.masters])


def plain_gradient(folder, rows) -> tuple[float, torch.Tensor]:
    """One row at a time by the model's own forward pass; the mean over all trained tokens."""
    plain = model(folder)
    losses = []
    for row in rows:
        logits = plain(torch.tensor([row.ids])).logits[0].double()
        log_probs = logits.log_softmax(-1)
        losses += [-log_probs[at - 1, row.ids[at]] for at in range(1, len(row.ids)) if row.trained[at]]
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), torch.cat([weight.grad.flatten() for weight in plain.parameters()])


@pytest.fixture(scope="module")
def expected(tiny_model):
    return plain_gradient(tiny_model, ragged_rows())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_and_gradient_are_the_token_mean_of_the_whole_batch_in_every_layout(tiny_model, expected, layout):
    loss, gradient = engine_gradient(tiny_model, ragged_rows(), **layout)
    assert loss == pytest.approx(expected[0], rel=1e-7)  # the weight 1 / tokens is float32
    assert float((gradient - expected[1]).norm() / expected[1].norm()) < 1e-7
    first_loss, first = engine_gradient(tiny_model, ragged_rows())
    assert loss == pytest.approx(first_loss, rel=1e-13)
    assert float((gradient - first).norm() / first.norm()) < 1e-12


def test_a_token_more_in_the_mask_would_be_seen(tiny_model, expected):
    rows = ragged_rows()
    rows[3].trained[2] = True
    loss, gradient = engine_gradient(tiny_model, rows)
    assert abs(loss - expected[0]) > 1e-4
    assert float((gradient - expected[1]).norm() / expected[1].norm()) > 1e-3

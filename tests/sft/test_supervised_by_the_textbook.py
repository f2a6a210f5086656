"""Whole supervised runs against the textbook: plain transformers row by row, AdamW written out, in float64.

Every setting of optimizer, schedule, clipping and loss has an unusual value; one that is ignored leaves other weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sft_runs import PAIRS, PREFERENCES, metrics_of, reward_model, sft, tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workers"))
from plain import PlainAdamW, plain_model
from textbook import CLIP, OPTIM, rates
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from posttrain.config.model import ModelConfig
from posttrain.config.supervised import PairDataConfig, SFTDataConfig
from posttrain.data.supervised import PairDataset, SFTDataset
from posttrain.models.loading import load_tokenizer

STEPS, ROWS = 4, 3
RUN: dict[str, Any] = {
    "model__dtype": "float64",
    "data__shuffle": False,
    "data__train_batch_size": ROWS,
    "trainer__total_training_steps": STEPS,
    "optim__clip_grad": CLIP,
    **{f"optim__{name}": value for name, value in OPTIM.items()},
}


@pytest.fixture(autouse=True)
def float64_norms(monkeypatch):
    """transformers' norms compute in float32 in any model. Adam divides by small gradients, and their rounding would
    grow to 2e-5 within four steps on some processors."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(Qwen2RMSNorm, "forward", forward)


def adamw(model: Any) -> PlainAdamW:
    betas = (OPTIM["betas"][0], OPTIM["betas"][1])
    return PlainAdamW(model, betas=betas, eps=OPTIM["eps"], decay=OPTIM["weight_decay"], clip=CLIP)


def compare(run: Any, model: Any, norms: list[float]) -> None:
    """Weights, norms and rates of the run are those of the textbook."""
    lines = [line for line in metrics_of(run.path) if line["step"] > 0]
    assert [line["train/lr"] for line in lines] == pytest.approx(rates(STEPS))
    assert [line["train/grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-5) and max(norms) > 2 * CLIP
    found = tensors(run.path)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], weight.detach(), rtol=0, atol=1e-6)


def test_an_sft_run_is_adamw_on_the_mean_over_trained_tokens(tiny_model, tmp_path):
    run = sft(tiny_model, tmp_path, **RUN)
    data = SFTDataset(PAIRS, load_tokenizer(ModelConfig(path=str(tiny_model))), SFTDataConfig())
    model, norms = plain_model(tiny_model), []
    textbook = adamw(model)
    for step, rate in enumerate(rates(STEPS)):
        losses = []
        for row in list(data)[step * ROWS : (step + 1) * ROWS]:
            log_probs = model(torch.tensor([row.ids])).logits[0].double().log_softmax(-1)
            losses += [-log_probs[at - 1, row.ids[at]] for at in range(1, len(row.ids)) if row.trained[at]]
        norms.append(textbook.step(torch.stack(losses).mean(), rate))
    compare(run, model, norms)


def test_a_reward_models_run_is_adamw_on_the_pairwise_loss_with_margin_and_centre(tiny_model, tmp_path):
    pairs = [{**pair, "by": 0.25 * number} for number, pair in enumerate(PREFERENCES)]
    run = reward_model(tiny_model, tmp_path, data=pairs, data__margin_key="by", loss__center_coef=0.2, **RUN)
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    data = PairDataset(pairs, tokenizer, PairDataConfig(margin_key="by"))
    model = torch.nn.Module()
    model.model, model.score = plain_model(tiny_model).base_model, torch.nn.Linear(32, 1, bias=False).double()
    torch.nn.init.zeros_(model.score.weight)
    textbook, norms = adamw(model), []
    for step, rate in enumerate(rates(STEPS)):
        losses = []
        for pair in list(data)[step * ROWS : (step + 1) * ROWS]:
            chosen, rejected = (
                model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1])[0]
                for ids in (pair.chosen, pair.rejected)
            )
            lead = chosen - rejected - pair.margin
            losses.append(torch.log1p(torch.exp(-lead)) + 0.2 * (chosen + rejected) ** 2)
        norms.append(textbook.step(torch.stack(losses).mean(), rate))
    compare(run, model, norms)

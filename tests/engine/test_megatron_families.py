"""Every family of models in Megatron-Core's modules, in one process: log-probs and gradients of plain transformers, and
an export that is the model bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_tools import ragged_batch
from megatron_runs import MIXTURES, tiny_models

from posttrain.config.optim import OptimConfig
from posttrain.engine.base import EngineLayout, EngineSettings
from posttrain.engine.registry import build_train_engine
from posttrain.models.forward import ForwardMode

pytest.importorskip("megatron.core")
FAMILIES = ("llama", "qwen2", "qwen3", *MIXTURES)


@pytest.fixture(scope="module")
def models():
    """Widened to float64, in which transformers computes experts one after the other only."""
    models = tiny_models()
    for model in models.values():
        model.config._experts_implementation = "eager"
        model.double().eval()
        model.forward_mode = ForwardMode(packed=True)  # as loading proves it
    yield models
    from posttrain.engine.megatron.groups import leave_groups

    leave_groups()
    torch.distributed.destroy_process_group()  # of this process alone, which the engine made


def plain(model: Any, batch: Any) -> tuple[torch.Tensor, float]:
    """Log-probs (B, R) by transformers' own forward pass, one row at a time, and the norm of their sum's gradient."""
    fields, width = batch.batch, batch.batch["responses"].shape[1]
    found = []
    for ids, seen, mask in zip(fields["input_ids"], fields["attention_mask"], fields["response_mask"], strict=True):
        row = ids[seen.bool()]
        count = int(seen[-width:].sum())
        log_p = torch.log_softmax(model(row[None]).logits[0].double(), -1)[-count - 1 : -1]
        log_p = log_p.gather(1, row[-count:, None])[:, 0]
        found.append(torch.nn.functional.pad(log_p, (0, width - count)) * mask)
    log_probs = torch.stack(found)
    log_probs.sum().backward()
    squares = [w.grad.double().square().sum() for w in model.parameters() if w.grad is not None]
    return log_probs.detach(), float(sum(squares).sqrt())  # pyright: ignore


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_gradients_and_weights_are_those_of_transformers(models, family):
    model, batch = models[family], ragged_batch(6, torch.float64, prompts=2)
    wanted, norm = plain(copy.deepcopy(model), batch)
    settings = EngineSettings(torch.device("cpu"), optim=OptimConfig(lr=0.0), grad_clip=1e9)
    engine = build_train_engine(copy.deepcopy(model), settings, EngineLayout("megatron"))
    mask = batch.batch["response_mask"]
    assert torch.allclose(engine.log_probs(batch)["log_probs"] * mask, wanted, atol=2e-6, rtol=0)
    step = engine.update(batch, lambda micro, out: (out["log_probs"] * micro.batch["response_mask"]).sum())
    assert step["grad_norm"] == pytest.approx(norm, rel=2e-6)
    whole = model.state_dict()
    here = dict(engine.export_weights())
    assert here.keys() == whole.keys() and all(torch.equal(here[name], whole[name]) for name in whole)

"""Every family of models in Megatron-Core's modules, in one process: log-probs and gradients of plain transformers, and
an export that is the model bit for bit."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_tools import ragged_batch
from megatron_cases import MIXTURES, tiny_models

from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineLayout, EngineSettings
from posttrain.engine.megatron.groups import ParallelSizes
from posttrain.engine.megatron.model import stage_chunks, stage_layers
from posttrain.engine.megatron.optimizer import EMBEDDING, TIED_COPY, _owners
from posttrain.engine.megatron.package import MegatronError
from posttrain.engine.registry import build_train_engine
from posttrain.models.forward import ForwardMode

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")
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


def layers(own: dict[str, int], count: int) -> list[int]:
    sizes = ParallelSizes.of(EngineLayout("megatron", own=own))
    config: Any = SimpleNamespace(num_hidden_layers=count)
    return [len(stage_layers(config, sizes, stage)) for stage in range(sizes.pipeline)]


def test_stages_share_the_layers_as_evenly_as_they_can_or_as_it_is_set():
    first, last = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
    assert layers({"pipeline_parallel_size": 4}, 61) == [16, 15, 15, 15]
    assert layers({"pipeline_parallel_size": 4, last: 13}, 61) == [16, 16, 16, 13]
    assert layers({"pipeline_parallel_size": 4, first: 3, last: 2}, 61) == [3, 28, 28, 2]
    assert layers({"pipeline_parallel_size": 2, first: 3}, 8) == [3, 5]
    for own, count in (({"pipeline_parallel_size": 3}, 2), ({"pipeline_parallel_size": 2, first: 3, last: 3}, 8)):
        with pytest.raises(MegatronError, match=rf"the model has {count} layers"):
            layers(own, count)


def test_chunks_of_all_stages_follow_each_other():
    sizes = ParallelSizes(pipeline=2, virtual=2, first_layers=3)
    config: Any = SimpleNamespace(num_hidden_layers=8)
    chunks = [[list(chunk) for chunk in stage_chunks(config, sizes, stage)] for stage in range(2)]
    assert chunks == [[[0, 1], [5]], [[2, 3, 4], [6, 7]]]
    with pytest.raises(MegatronError, match="do not fill 2 stages with 4 chunks of at least one each"):
        stage_chunks(config, ParallelSizes(pipeline=2, virtual=4, first_layers=3), 0)


def test_copies_of_a_model_share_the_moments_equally_and_both_ends_of_a_tied_one_agree():
    def group(size: int) -> Any:
        return SimpleNamespace(size=lambda: size)

    groups: Any = SimpleNamespace(data=group(2), expert_data=group(1))
    sizes = {"a": 9, "b": 5, "c": 5, "x.local_experts.0.y": 7}
    for tied in (EMBEDDING, TIED_COPY):
        named = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in {**sizes, tied: 3}.items()}
        owners = _owners(named, groups)
        assert owners[tied] == 0 and owners["x.local_experts.0.y"] == 0
        loads = [sum(named[name].numel() for name in owners if "x" not in name and owners[name] == r) for r in (0, 1)]
        assert sorted(loads) == [9, 13]

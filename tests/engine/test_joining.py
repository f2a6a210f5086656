"""When prompts are shared where attention must join two parts (a CUDA device): only if it saves more than it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posttrain.engine import facts as facts_module
from posttrain.engine.facts import WIDTH, facts_of, joining_cost
from posttrain.engine.micro_batches import plan_passes
from posttrain.models.loading import load_causal_lm
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch


@pytest.fixture(scope="module")
def module(tiny_model):
    from posttrain.config.model import ModelConfig

    return load_causal_lm(ModelConfig(path=str(tiny_model)), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def facts(module):
    return replace(facts_of(module, packed=True), all_pairs=False)


def batch(prompt: int, response: int, n: int = 8):
    generator = torch.Generator().manual_seed(0)
    answers = torch.randint(0, 200, (n, response + 1), generator=generator).tolist()
    outputs = [Output(row, ids, [0.0] * len(ids), "stop") for row, ids in enumerate(answers)]
    return to_batch([[7] * prompt] * n, outputs, pad_token_id=0)


def tokens(data, facts) -> int:
    return sum(unit.tokens for units in plan_passes(data, facts) for unit in units)


@pytest.mark.parametrize(
    ("width", "prompt", "response", "shared"),
    [
        (WIDTH, 128, 512, True),  # 4,224 tokens instead of 5,120
        (WIDTH, 512, 128, True),
        (WIDTH, 16, 512, False),
        (WIDTH // 2, 48, 512, False),  # 4,144 tokens instead of 4,480: a thirteenth, less than joining costs
        (2 * WIDTH, 48, 512, True),
    ],
)
def test_prompts_are_shared_where_that_saves_more_than_joining_costs(facts, width, prompt, response, shared):
    data, joined = batch(prompt, response), replace(facts, joining=joining_cost(width))
    together, apart = prompt + 8 * response, 8 * (prompt + response)
    assert (together * (1 + joining_cost(width)) <= apart) == shared
    assert tokens(data, joined) == (together if shared else apart)
    assert tokens(data, facts) == together, "where nothing is joined a shared prompt is always cheaper"


def test_joining_costs_something_on_a_cuda_device_alone(facts, module, monkeypatch):
    assert facts.joining == 0.0
    monkeypatch.setattr(facts_module, "on_cuda", lambda weight: True)
    assert facts_of(module, packed=True).joining == joining_cost(module.config.hidden_size) > 0

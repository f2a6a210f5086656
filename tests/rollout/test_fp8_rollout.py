"""Decoding with fp8 products: the engine computes what transformers' model does with rounded weights and inputs."""

from __future__ import annotations

import copy

import pytest
import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.kernels.quantized import round_rows
from posttrain.rollout.base import Sampling
from posttrain.rollout.generate import generate
from posttrain.rollout.native.build import build_native
from tests.rollout.tiny import tiny

ROWS = [list(range(3, 40)), [5, 6, 7, 8, 9], list(range(20, 70, 2))]


def rounded(module):
    """A copy of the model whose linear layers round their weights and inputs; the head stays as it is."""
    module = copy.deepcopy(module)
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.data = round_rows(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, given: (round_rows(given[0]),))
    return module


def log_probs(module, row):
    ids = torch.tensor([row])
    return module(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen2-tied"])
def test_scores_are_those_of_transformers_with_rounded_numbers(kind):
    module = tiny(kind)
    engine, name = build_native(module, RolloutConfig(kv_cache_gb=0.05), decode=None, fp8=True)
    assert "fp8 products" in name
    wanted = rounded(module)
    # Rounding in between may fall to the other side of an edge where sums differ in their last digits.
    for row, found in zip(ROWS, engine.score(ROWS), strict=True):
        gap = (found - log_probs(wanted, row)).abs()
        assert float(gap.mean()) < 5e-3, gap
        assert float((found - log_probs(module, row)).abs().mean()) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe", "qwen2-moe"])
def test_what_is_generated_has_the_log_probs_that_are_scored(kind):
    engine = build_native(tiny(kind), RolloutConfig(kv_cache_gb=0.05), decode=None, fp8=True)[0]
    outputs = generate(engine, ROWS, [Sampling(max_tokens=24)] * 3, range(3))
    scored = engine.score([row + output.token_ids for row, output in zip(ROWS, outputs, strict=True)])
    for row, output, found in zip(ROWS, outputs, scored, strict=True):
        torch.testing.assert_close(found[len(row) - 1 :], torch.tensor(output.log_probs), rtol=0, atol=2e-2)


@torch.no_grad()
def test_new_weights_are_rounded_anew():
    module = tiny("qwen2")
    engine = build_native(module, RolloutConfig(kv_cache_gb=0.05), decode=None, fp8=True)[0]
    engine.score(ROWS)
    other = tiny("qwen2", seed=1)
    engine.load_weights(other.state_dict().items(), version=1)
    fresh = build_native(other, RolloutConfig(kv_cache_gb=0.05), decode=None, fp8=True)[0]
    for found, wanted in zip(engine.score(ROWS), fresh.score(ROWS), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3-moe", "qwen2-moe"])
def test_on_a_cuda_device_samples_have_the_log_probs_that_are_scored_and_steps_see_new_weights(kind):
    sizes = {"hidden_size": 64, "initializer_range": 0.1} | ({"moe_intermediate_size": 32} if "moe" in kind else {})
    module = tiny(kind, **sizes).bfloat16().cuda()
    engine = build_native(module, RolloutConfig(kv_cache_gb=0.1), decode=None, fp8=True)[0]
    for version in (1, 2):
        prompts, settings = ROWS * 8, [Sampling(max_tokens=40)] * 24
        outputs = generate(engine, prompts, settings, range(24))
        rows = [row + output.token_ids for row, output in zip(prompts, outputs, strict=True)]
        plain = build_native(copy.deepcopy(module), RolloutConfig(kv_cache_gb=0.1), decode=None)[0]
        fresh = build_native(copy.deepcopy(module), RolloutConfig(kv_cache_gb=0.1), decode=None, fp8=True)[0]
        made = torch.cat([torch.tensor(output.log_probs) for output in outputs])
        by_engine = [torch.cat([found[-40:].cpu() for found in one.score(rows)]) for one in (engine, fresh, plain)]
        off = [float((made - scored).abs().mean()) for scored in by_engine]
        # Decoding and scoring round at other places, which fp8 enlarges; bfloat16's own numbers are further away.
        assert off[0] < 0.7 * off[2] and torch.equal(*by_engine[:2]), off
        for weight in module.parameters():  # an optimizer step in place
            weight.mul_(1.1)
        engine.load_weights(module.state_dict().items(), version=version)

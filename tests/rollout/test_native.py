"""The native engine against plain transformers, kind by kind, and its own promises: sharing, slots, blocks, versions."""

import numpy as np
import pytest
import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.kernels import compiled
from posttrain.models.decoder import can_decode_fast
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.generate import generate
from posttrain.rollout.native.build import build_native
from tests.rollout.tiny import FAST, KINDS, VOCABULARY, tiny

PROMPTS = [[5, 6, 7], list(range(40)), [5, 6, 7], [9], list(range(10, 75)), list(range(32))]


def native(module, **settings):
    return build_native(module, RolloutConfig(kv_cache_gb=0.05, **settings), decode=None)[0]


def plain_log_probs(model, prompt, response, temperature=1.0):
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids).logits[0].float() / temperature, -1)
    return log_p[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1)


@pytest.fixture(params=["compiled", "torch"])
def kernels(request, monkeypatch):
    """Both ways of computing: the compiled kernels and their torch twins."""
    if request.param == "torch":
        monkeypatch.setattr(compiled, "_functions", lambda: None)
    elif compiled.why_not():
        pytest.skip(f"no compiled kernels here: {compiled.why_not()}")
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers_and_log_probs_within_1e_5(kernels, kind):
    oracle = tiny(kind, attention="eager")
    module = tiny(kind)
    assert can_decode_fast(module) == (kind in FAST)
    outputs = generate(native(module), PROMPTS, [Sampling(max_tokens=40, greedy=True)] * 6, [0] * 6)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        plain = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        assert output.token_ids == plain[0, len(prompt) :].tolist()
        expected = plain_log_probs(oracle, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma3", "gpt2"])
def test_score_equals_transformers(kernels, kind):
    oracle = tiny(kind, attention="eager")
    for row, scored in zip(PROMPTS, native(tiny(kind)).score(PROMPTS, temperature=0.7), strict=True):
        expected = plain_log_probs(oracle, row[:1], row[1:], 0.7)
        torch.testing.assert_close(scored, expected, rtol=0, atol=1e-5)

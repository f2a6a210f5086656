"""Captured steps of the general decoder, which runs transformers' modules: samples and log-probs of `hf`.

On a CUDA device with graphs. Without one in Triton's interpreter, where each step is run as it is, if Triton is
installed: `TRITON_INTERPRET=1 pytest tests/rollout/test_general_captured.py`.
"""

from __future__ import annotations

import pytest
import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.models.forward import ForwardMode
from posttrain.models.lora import add_adapters
from posttrain.models.paged_modules import watch_experts
from posttrain.rollout.base import Sampling
from posttrain.rollout.engines import why_wrong
from posttrain.rollout.generate import generate
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native
from tests.rollout.test_ahead import DEVICE, ON_CUDA, ROUND, interpret
from tests.rollout.tiny import tiny

pytestmark = pytest.mark.gpu(interpreter=True)
PROMPTS = [[5, 6, 7], list(range(33)), [5, 6, 7], [9]]
LAYERS = {"num_hidden_layers": 2}  # as the interpreter takes its time
KINDS = ["gemma2", "gpt-oss", "glm4-moe", "deepseek-v2", "deepseek-v3", "gemma3", "gpt2"]


@pytest.fixture
def build(monkeypatch):
    def make(module, **settings):
        if not ON_CUDA:
            interpret(monkeypatch)
        engine, name = build_native(module, RolloutConfig(kv_cache_gb=0.01, **settings), decode=None)
        engine.rounds.tokens_per_step, engine.rounds.tokens_unseen = 256, ROUND
        if not ON_CUDA:
            engine.decoder.captures = True
            watch_experts(module, on=True)
        return engine, name

    return make


def settings() -> list[Sampling]:
    tokens = 40 if ON_CUDA else 4
    return [Sampling(max_tokens=tokens, greedy=True), Sampling(max_tokens=tokens, temperature=0.8)] * 2


def same(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_of_a_module_give_its_samples_and_log_probs(kind, build):
    module = tiny(kind, **({} if kind == "gpt2" else LAYERS)).to(DEVICE)
    engine, name = build(module)
    found = generate(engine, PROMPTS, settings(), range(4))
    assert "general decoder" in name and engine.decoder.graphs.replays, "steps were captured"
    same(found, generate(HFEngine(module, pad_token_id=0), PROMPTS, settings(), range(4)))


def test_adapters_of_a_module_are_in_its_captured_steps(build):
    from posttrain.config.model import ModelConfig
    from tests.models.test_lora_rollout import shake

    given = ModelConfig(lora_rank=4, lora_alpha=8, target_modules=["kv_b_proj", "q_b_proj", "o_proj"])
    module = add_adapters(tiny("deepseek-v3", **LAYERS), given).to(DEVICE)
    shake(module, 1)
    engine, _ = build(module)
    found = generate(engine, PROMPTS, settings(), range(4))
    same(found, generate(HFEngine(module, pad_token_id=0), PROMPTS, settings(), range(4)))
    shake(module, 2)
    engine.load_weights((), 1)
    again = generate(engine, PROMPTS, settings(), range(4))
    same(again, generate(HFEngine(module, pad_token_id=0), PROMPTS, settings(), range(4)))
    assert [x.token_ids for x in found] != [x.token_ids for x in again], "captured steps see adapters that have changed"


def test_routes_are_recorded_in_captured_steps(build):
    module = tiny("glm4-moe", **LAYERS).to(DEVICE)
    engine, _ = build(module, enable_rollout_routing_replay=True)
    outputs = generate(engine, PROMPTS, settings(), range(4))
    flat, _ = build(tiny("glm4-moe", **LAYERS).to(DEVICE), enable_rollout_routing_replay=True)
    flat.rounds.tokens_per_step, flat.rounds.tokens_unseen, flat.decoder.captures = 1, None, False
    expected = generate(flat, PROMPTS, settings(), range(4))
    assert engine.decoder.graphs.replays and flat.decoder.graphs is None
    for one, other in zip(outputs, expected, strict=True):
        assert one.token_ids == other.token_ids and (one.routes == other.routes).all() and len(one.routes)


@pytest.mark.skipif(not ON_CUDA, reason="waits are found on a CUDA device only")
def test_a_module_that_waits_for_the_device_is_not_captured(build, monkeypatch):
    from posttrain.rollout.engines import build_engine

    module = tiny("gpt2").to(DEVICE)
    kept = type(module.base_model.h[0]).forward

    def waits(self, hidden_states, *args, **kwargs):
        float(hidden_states.sum())
        return kept(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(type(module.base_model.h[0]), "forward", waits)
    engine, _ = build(module)
    assert "synchroniz" in (why_wrong(engine, module) or "")
    module.forward_mode = ForwardMode(packed=True, padded=True)

    class Words:
        pad_token_id = 0

        def decode(self, ids, **_):
            return ""

    engine, name = build_engine(RolloutConfig(kv_cache_gb=0.01), module, Words())
    assert "steps not captured" in name
    assert why_wrong(engine, module) is None

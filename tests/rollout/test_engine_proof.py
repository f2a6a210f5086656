"""An engine that does not report the model's own log-probs is not used; the next way that is right is, with a note."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError
from posttrain.models.decoder import FastDecoder
from posttrain.models.loading import load_causal_lm, load_tokenizer
from posttrain.rollout import engines, hf
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.generate import generate

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [5, 6, 7], [4], [9, 8, 7, 6, 5]]


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_causal_lm(ModelConfig(path=str(tiny_model)), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(ModelConfig(path=str(tiny_model)))


def build(model, tokenizer, name="hf") -> tuple[Any, str]:
    return build_engine(RolloutConfig(name=name), model, tokenizer)


def test_native_is_left_where_it_computes_something_else(model, tokenizer, monkeypatch):
    assert build(model, tokenizer, "native")[1].startswith("native")
    kept = FastDecoder.logits
    monkeypatch.setattr(FastDecoder, "logits", lambda self, hidden: kept(self, hidden) * 1.05)
    engine, said = build(model, tokenizer, "native")
    assert isinstance(engine, hf.HFEngine) and engine.mode == "cache"
    assert said.startswith("hf") and "native is not used for qwen2 models: its log-probs are not those" in said


def test_an_engine_built_from_a_folder_answers_as_one_built_from_the_model(model, tokenizer, tiny_model):
    engine, said = build(tiny_model, tokenizer, "native")
    assert said.startswith("native")
    assert_same_responses(engine, build(model, tokenizer, "native")[0])


def test_a_registered_engine_is_built_by_its_name_and_where_it_cannot_serve_hf_does(model, tokenizer, monkeypatch):
    for name in ("native", "vllm", "sglang", "server"):
        monkeypatch.delitem(engines.ENGINES, name)
    asked = []

    @engines.register_engine("mine")
    def make(order):
        asked.append(order.module)
        return "it has no layers" if len(asked) > 1 else (hf.HFEngine(order.module, pad_token_id=0), "mine 1.0")

    assert build(model, tokenizer, "mine")[1] == "mine 1.0" and asked == [model]
    engine, said = build(model, tokenizer, "mine")
    assert isinstance(engine, hf.HFEngine) and "mine is not used for qwen2 models: it has no layers" in said
    with pytest.raises(ValueError, match="`mine` is already registered by"):
        engines.register_engine("mine")(lambda order: "")
    with pytest.raises(UserError, match=r"rollout\.name=native: there is no such rollout engine; known: hf, mine\."):
        build(model, tokenizer, "native")


def test_padding_on_the_left_that_is_felt_gives_waves_of_one_length(model, tokenizer, monkeypatch):
    kept = hf.HFEngine._forward

    def blind(self, ids, cache):
        self.mask_BL = torch.ones_like(self.mask_BL)
        return kept(self, ids, cache)

    monkeypatch.setattr(hf.HFEngine, "_forward", blind)
    engine, said = build(model, tokenizer)
    assert engine.mode == "equal lengths" and "only prompts of one length together" in said
    monkeypatch.undo()
    assert_same_responses(engine, build(model, tokenizer)[0])


def test_a_cache_that_does_not_serve_gives_every_token_anew(model, tokenizer, monkeypatch):
    def broken(self, ids, cache):
        raise AttributeError("no attribute 'batch_select_indices'")

    monkeypatch.setattr(hf.HFEngine, "_forward", broken)
    engine, said = build(model, tokenizer)
    assert engine.mode == "no cache" and "slow" in said
    assert_same_responses(engine, build_cached(model, tokenizer, monkeypatch))


def test_a_model_that_no_engine_generates_with_is_refused(model, tokenizer, monkeypatch):
    kept = hf.HFEngine._sample
    monkeypatch.setattr(
        hf.HFEngine, "_sample", lambda self: [x + 1 if x.is_floating_point() else x for x in kept(self)]
    )
    with pytest.raises(UserError, match=r"rollout\.name=hf: no engine generates with this model .*\(qwen2\)"):
        build(model, tokenizer)


def test_rows_of_an_engine_without_a_cache_can_be_aborted(model):
    engine = hf.HFEngine(model, pad_token_id=0, mode="no cache")
    for number, prompt in enumerate(PROMPTS):
        engine.submit(Request(number, prompt, Sampling(max_tokens=3), number))
    engine.step()
    assert [(out.id, len(out.token_ids)) for out in engine.abort([1, 3])] == [(1, 1), (3, 1)]
    done = [out for _ in range(2) for out in engine.step()]
    assert [out.id for out in done] == [0, 2, 4] and not engine.has_work()


def build_cached(model, tokenizer, monkeypatch):
    monkeypatch.undo()
    engine, _ = build(model, tokenizer)
    assert engine.mode == "cache"
    return engine


def assert_same_responses(one, other):
    sampling = [Sampling(max_tokens=2 + number) for number in range(len(PROMPTS))]
    made, expected = ([*generate(engine, PROMPTS, sampling, [3, 1, 4, 1, 5])] for engine in (one, other))
    assert [out.token_ids for out in made] == [out.token_ids for out in expected]
    for mine, theirs in zip(made, expected, strict=True):
        assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)

"""The embedded model: made by supervised steps on packed rows, until enough of the withheld sums are right."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.models.embedded import build_model
from posttrain.trainer import embedded

SMALL = {"hidden_size": 32, "intermediate_size": 64}


@pytest.fixture
def warm_up(tmp_path, monkeypatch):
    """`warm_up(**recipe)`: the folder that a small model's warm-up leaves, and the engines that trained it."""
    monkeypatch.setattr(embedded, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(embedded, "build_model", lambda tokenizer, seed: build_model(tokenizer, seed=seed, **SMALL))
    engines, plain = [], embedded.TorchEngine
    monkeypatch.setattr(embedded, "TorchEngine", lambda *args: engines.append(plain(*args)) or engines[-1])

    def warmed(**recipe):
        monkeypatch.setattr(embedded, "RECIPE", embedded.RECIPE | {"max_steps": 8, "sft_batch_size": 16} | recipe)
        return embedded.ensure_embedded(print), engines

    return warmed


def test_all_rows_of_a_step_are_one_packed_pass_and_the_model_loads(warm_up):
    folder, (engine,) = warm_up()
    assert engine.facts().packed
    assert engine.optimizer.steps_done == 8
    AutoModelForCausalLM.from_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(folder / "model")
    assert warm_up()[1] == [engine]  # made once


def test_it_ends_when_enough_of_the_withheld_sums_are_right_and_those_are_not_shown(warm_up, monkeypatch):
    asked, shown = [], []
    monkeypatch.setattr(embedded, "greedy_accuracy", lambda model, pairs, pad: asked.append(pairs) or 0.4)
    plain = embedded.fit_pairs
    seen = lambda engine, pairs, **more: shown.extend(pairs) or plain(engine, pairs, **more)  # noqa: E731
    monkeypatch.setattr(embedded, "fit_pairs", seen)
    folder, (engine,) = warm_up(until=0.3, withheld=50)
    assert engine.optimizer.steps_done == embedded.CHECK_EVERY
    rows = json.loads((folder / "train.json").read_text())
    assert len(asked[0]) == 50 and len(shown) == len(rows) - 50
    assert not {tuple(prompt) for prompt, _ in asked[0]} & {tuple(prompt) for prompt, _ in shown}

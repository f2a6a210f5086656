"""What an engine promises to those who plan its passes: given passes, passes without rows, facts, and no way around."""

import re
from pathlib import Path

import pytest
import torch
from engine_tools import TEMPERATURE, VOCABULARY, gradient, objective, ragged_batch

import posttrain
from posttrain.config.root import PPOConfig
from posttrain.config.schema import leaves
from posttrain.config.supervised import SFTConfig
from posttrain.engine.micro_batches import plan_micro_batches, plan_passes, plan_units
from posttrain.engine.registry import BUILT_IN
from posttrain.engine.settings import ENGINES, RL, SUPERVISED
from posttrain.models.forward import TokenPass
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_passes_without_rows_change_neither_outputs_nor_gradient(make_engine, pack):
    engine, batch = make_engine(pack=pack), ragged_batch()
    passes = plan_micro_batches(plan_units(batch, share=pack), token_budget=40)
    assert len(passes) > 2
    with_empty = [[], *passes[:1], [], *passes[1:], []]
    expected, found = (engine.log_probs(batch, passes=plan) for plan in (passes, with_empty))
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in found)
    loss = objective()
    prepared = loss.prepare(batch)
    grads = []
    for plan in (passes, with_empty):
        assert engine.runner.gradients(prepared, loss, 1.0, plan)
        grads.append([weight.grad.clone() for weight in engine.module.parameters()])
        engine.module.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_given_passes_are_the_ones_that_are_computed(make_engine, monkeypatch):
    engine, batch = make_engine(), ragged_batch()
    seen = []
    forward = TokenPass.forward
    monkeypatch.setattr(
        TokenPass, "forward", lambda self, ids, *rest: seen.append(ids.numel()) or forward(self, ids, *rest)
    )
    one = gradient(engine, batch, objective())
    assert len(seen) == len(plan_passes(batch, engine.facts())) == 1
    engine.optimizer.adam.zero_grad()
    loss = objective()
    engine.runner.gradients(loss.prepare(batch), loss, TEMPERATURE, [[unit] for unit in plan_units(batch, share=False)])
    assert len(seen) == 1 + len(batch)
    rows = torch.cat([weight.grad.flatten() for weight in engine.module.parameters()])
    torch.testing.assert_close(rows, one, rtol=0, atol=1e-12)


def test_facts_say_what_the_model_is(make_engine):
    facts = make_engine(torch.float32, token_budget=77, max_rows=3).facts()
    config = make_engine(torch.float32).module.config
    assert (facts.dtype, facts.vocabulary, facts.width) == (torch.float32, VOCABULARY, config.hidden_size)
    assert facts.parameters == facts.trained == sum(w.numel() for w in make_engine().module.parameters())
    assert (facts.token_budget, facts.max_rows, facts.packed, facts.shares_prompts) == (77, 3, True, True)
    assert not make_engine(pack=False).facts().shares_prompts
    assert facts.adapters is None and facts.positions.limit == config.max_position_embeddings


def test_nobody_outside_the_engine_reaches_for_its_module():
    root = Path(posttrain.__file__).parent
    files = [file for file in root.rglob("*.py") if file.parent != root / "engine"]
    reaching = [str(file) for file in files if re.search(r"(engine|trainer|reference)\.module\b", file.read_text())]
    assert reaching == []


def test_nothing_but_a_registration_asks_which_engine_was_chosen():
    root = Path(posttrain.__file__).parent
    own = {root / "engine" / "megatron" / "settings.py"}  # the checks that Megatron's registration names
    files = [file for file in root.rglob("*.py") if file not in own and file.parent.name != "verl"]
    asking = [str(file) for file in files if re.search(r"strategy\)* *[!=]= ", file.read_text())]
    assert asking == []


def test_answers_without_tokens_that_share_a_prompt_are_a_pass_like_any_other(make_engine):
    answers = [[], [], [5]]
    outputs = [Output(row, ids, [0.0] * len(ids), "stop") for row, ids in enumerate(answers)]
    found = make_engine().log_probs(to_batch([[7, 8, 9]] * 3, outputs, pad_token_id=0)[[0, 1]])
    assert float(found["log_probs"].abs().sum()) == 0 and len(found["log_probs"]) == 2


def test_every_built_in_engine_goes_through_the_whole_suite_and_is_in_the_sentence_of_its_setting():
    from megatron_cases import CASES, layout
    from megatron_runs import WHOLE

    suite = {layout(cut).strategy for model, cut, _ in CASES if model in WHOLE}
    missing = BUILT_IN.keys() - suite
    assert not missing, f"add cases of {missing} (model {WHOLE[0]}) to CASES of tests/engine/megatron_cases.py"
    assert ENGINES.keys() >= BUILT_IN.keys(), "add it to ENGINES of posttrain/engine/settings.py"
    for config, key in ((PPOConfig, RL.strategy), (SFTConfig, SUPERVISED.strategy)):
        sentence = leaves(config)[key].sentence
        unnamed = [name for name in BUILT_IN if f"`{name}`" not in sentence]
        assert not unnamed, f"name {unnamed} in the sentence of {key} (posttrain/config)"

"""Recurrent layers in training: log-probs and gradients of packed sequences are those of sequences one at a time."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.ranks import RanksError, check_heads
from posttrain.engine.torch_engine import TorchEngine
from posttrain.models import proof, recurrent
from posttrain.models.forward import ForwardMode, recompute_layers
from posttrain.models.recurrent import answer_recurrence, recurrent_layers
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from tests.rollout.tiny import RECURRENT, tiny

CPU = torch.device("cpu")
# Responses begin with others, at their first token too: states continue from within a response.
RESPONSES = [[7], [7, 8], [7, 8, 9, 9, 3], [7, 8, 5], [6, 5, 4, 3, 2, 1, 9, 8], [7, 8, 9, 9, 4], [11] * 70]
PROMPTS = [[*range(20, 32)], [9]]


def batch():
    prompts = [prompt for prompt in PROMPTS for _ in RESPONSES]
    responses = [*RESPONSES, *[[one + 1 for one in response] for response in RESPONSES]]
    return to_batch(prompts, [Output(0, list(ids), [0.0] * len(ids), "stop") for ids in responses], 0)


def log_probs_and_gradients(model, *, pack, checkpointing=False):
    """The log-probs, and the gradients of a loss that weighs each differently."""
    settings = EngineSettings(CPU, optim=OptimConfig(lr=0.0), pack=pack, token_budget=512)
    engine, rows = TorchEngine(model, settings), batch()
    recurrent_weights = torch.linspace(-1, 1, rows.batch["response_mask"].numel()).view_as(rows.batch["response_mask"])
    rows.batch["weights"] = recurrent_weights * rows.batch["response_mask"]
    found = engine.log_probs(rows)["log_probs"]
    if checkpointing:
        recompute_layers(model)
    engine.runner.gradients(rows, lambda micro, out: (out["log_probs"] * micro.batch["weights"]).sum(), 1.0)
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found, gradients


def loaded(kind, mode):
    model = tiny(kind)
    answer_recurrence(model)
    model.forward_mode = mode
    return model


PACKED, ALONE = ForwardMode(packed=True, padded=True), ForwardMode()


@cache
def one_by_one(kind):
    return log_probs_and_gradients(loaded(kind, ALONE), pack=False)


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_do_not_depend_on_packing(kind, checkpointing):
    expected, theirs = one_by_one(kind)
    found, ours = log_probs_and_gradients(loaded(kind, PACKED), pack=True, checkpointing=checkpointing)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert ours.keys() == theirs.keys()
    length = sum(float(one.square().sum()) for one in theirs.values()) ** 0.5
    apart = sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs) ** 0.5
    assert apart < 2e-5 * length


def test_packed_passes_compute_a_prompt_once(monkeypatch):
    model, tokens = loaded("qwen3-next", PACKED), []
    call = recurrent._call
    monkeypatch.setattr(
        recurrent, "_call", lambda layer, x, states: tokens.append(x.shape[0] * x.shape[1]) or call(layer, x, states)
    )
    log_probs_and_gradients(model, pack=True)
    first_layer = sum(tokens) / len(recurrent_layers(model)) / 2  # log-probs, then gradients
    alone = sum(len(prompt) + len(response) for prompt in PROMPTS for response in RESPONSES)
    assert first_layer < 0.75 * alone


@pytest.mark.parametrize(
    "fault",
    ["states of the prompt are dropped", "sequences continue from each other"],
)
def test_a_wrong_packed_pass_is_found_when_the_model_is_loaded(fault, monkeypatch):
    model = tiny("qwen3-next", attention="eager")
    plain = proof.plain_pass(model, "the model")
    if fault == "states of the prompt are dropped":
        call = recurrent._call
        monkeypatch.setattr(
            recurrent, "_call", lambda layer, x, states: call(layer, x, states and recurrent.CallStates())
        )
    else:
        plan = recurrent.segment_plan
        monkeypatch.setattr(recurrent, "segment_plan", lambda lengths, ends, *given, **named: plan(
            [sum(lengths)], None, *given, **named
        ))  # fmt: skip
    mode = proof.find_forward_mode(model, plain, "the model")
    assert not mode.packed and mode.padded and "packed rows do not give" in (mode.note or "")


def test_a_layer_that_is_not_asked_is_not_packed(monkeypatch):
    model = tiny("qwen3-next", attention="eager")
    plain = proof.plain_pass(model, "the model")
    monkeypatch.setattr(proof, "answer_recurrence", lambda model: False)
    mode = proof.find_forward_mode(model, plain, "the model")
    assert not mode.packed and "does not go through" in (mode.note or "")


@pytest.mark.parametrize("kind", RECURRENT)
def test_only_mambas_first_version_begins_anew_with_several_tokens(kind):
    model = tiny(kind)
    answer_recurrence(model)
    assert {layer.can_continue for layer in recurrent_layers(model)} == {kind != "mamba"}


def test_models_without_recurrent_layers_are_left_as_they_are():
    model = tiny("gemma3")
    assert not answer_recurrence(model) and not any("forward" in vars(part) for part in model.modules())


def test_a_sequence_on_several_ranks_is_rejected_where_layers_have_states():
    check_heads(tiny("qwen2").config, 2, packed=True)
    check_heads(tiny("qwen3-next").config, 1, packed=True)
    with pytest.raises(RanksError, match=r"ulysses_sequence_parallel_size=2: layers of this model \(qwen3_next\) have"):
        check_heads(tiny("qwen3-next").config, 2, packed=True)


def test_layers_of_the_oldest_transformers_read_their_states_and_write_to_a_copy():
    """transformers 5.17 reads `cache.layers[n].conv_states[0]`, and writes there where a single token follows."""
    given = torch.zeros(2, 3, 4)
    states = recurrent.CallStates({(recurrent.CONV, 0): given})
    layer = states.layers[7]
    assert not layer.record_past
    layer.conv_states[0].add_(1)
    assert torch.equal(states.held[recurrent.CONV, 0], torch.ones(2, 3, 4)), "what is written goes on"
    assert torch.equal(given, torch.zeros(2, 3, 4)), "and does not change what was given, which gradients may need"

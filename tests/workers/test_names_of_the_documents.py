"""Rows about engines and parallel sizes, by their ids."""

from __future__ import annotations

import pytest

from posttrain.config import ConfigError, load_config

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
NAMES_OF_DOCUMENT_4 = [
    "trainer.reward_fn.path=a.py",
    "actor.megatron_config.tensor_parallel_size=2",
    f"{ACTOR}.megatron.tensor_model_parallel_size=2",
    "actor.peft_config.lora_rank=8",
    f"{ROLLOUT}.enable_lora=False",
    f"{ROLLOUT}.max_turns=2",
    f"{ROLLOUT}.tools=[a]",
    f"{ROLLOUT}.tool_config.path=a",
    f"{ROLLOUT}.multi_turn=True",
    f"{ROLLOUT}.multi_turn.enable=True",
    "training.learning_rate=1e-5",
    "fsdp.strategy=fsdp2",
    "actor.policy_loss_fn=gspo",
    f"{ACTOR}.policy_loss.loss_mode=gspo",
    "trainer.node_rank=0",
]


def test_workers_engine_gives_the_contract_and_its_fsdp_implementation():
    from posttrain.engine import base, torch_engine
    from posttrain.workers import engine

    assert engine.TrainEngine is base.TrainEngine and engine.FSDPEngine is torch_engine.TorchEngine
    assert issubclass(engine.FSDPEngine, engine.TrainEngine)


def test_sizes_of_rollout_and_training_are_settings_of_their_own():
    for spelling in ("tensor_model_parallel_size", "tensor_parallel_size"):
        resolved = load_config(["trainer.n_workers=4", f"rollout.{spelling}=2", f"{ACTOR}.fsdp_config.fsdp_size=4"])
        assert resolved.value(f"{ROLLOUT}.tensor_model_parallel_size") == 2
        assert resolved.value(f"{ACTOR}.fsdp_config.fsdp_size") == 4
        assert resolved.value(f"{ACTOR}.ulysses_sequence_parallel_size") == 1


@pytest.mark.parametrize("argument", NAMES_OF_DOCUMENT_4)
def test_keys_that_only_document_4_has_are_taken_or_answered_by_name(argument):
    try:
        load_config([argument, "trainer.seed=1"])
    except ConfigError as error:
        assert "Unknown key" not in str(error) and argument.partition("=")[0].rpartition(".")[2] in str(error)

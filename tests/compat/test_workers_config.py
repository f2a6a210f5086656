"""Settings of engines, critics, rollouts and models by verl's classes: defaults, checks, frozen fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl.utils.profiler import ProfilerConfig
from verl.workers import config as settings


def test_an_engine_has_verls_defaults_and_frozen_fields() -> None:
    engine = settings.McoreEngineConfig(tensor_model_parallel_size=2)
    assert (engine.sequence_parallel, engine.seed, engine["strategy"]) == (True, 42, "megatron")
    engine.param_offload = True  # one of those that may change
    with pytest.raises(AttributeError, match="frozen"):
        engine.tensor_model_parallel_size = 4
    with pytest.warns(UserWarning, match="sequence parallel"):
        assert settings.McoreEngineConfig().sequence_parallel is False
    with pytest.raises(ValueError, match="max_seqlen_per_dp_cp_rank"):
        settings.McoreEngineConfig(tensor_model_parallel_size=2, dynamic_context_parallel=True)
    first, second = settings.FSDPEngineConfig(), settings.FSDPEngineConfig(strategy="fsdp2")
    first.wrap_policy["x"] = 1
    assert second.wrap_policy == {} and second.fsdp_size == -1
    with pytest.raises(AssertionError, match="veomni"):
        settings.FSDPEngineConfig(strategy="veomni")


def test_a_critic_checks_its_sizes() -> None:
    critic = settings.FSDPCriticConfig(ppo_micro_batch_size_per_gpu=1, strategy="fsdp2")
    assert critic.engine.strategy == "fsdp2" and isinstance(critic, settings.CriticConfig)
    critic.ppo_mini_batch_size = 8
    with pytest.raises(AttributeError):
        critic.grad_clip = 2.0
    with pytest.raises(ValueError, match="train_batch_size"):
        critic.validate(n_gpus=1, train_batch_size=4)
    with pytest.raises(ValueError, match="at least one of"):
        settings.McoreCriticConfig()
    with pytest.raises(ValueError, match="set both"):
        settings.CriticConfig(strategy="fsdp", ppo_micro_batch_size=4, ppo_micro_batch_size_per_gpu=2)
    with pytest.raises(ValueError, match="divisible"):
        settings.CriticConfig(strategy="fsdp", ppo_mini_batch_size=7, ppo_micro_batch_size=4)
    few = settings.FSDPCriticConfig(ppo_mini_batch_size=8, ppo_micro_batch_size=2)
    few.validate(n_gpus=2, train_batch_size=8)
    with pytest.raises(ValueError, match="must be >= n_gpus"):
        few.validate(n_gpus=4, train_batch_size=8)
    assert settings.CriticConfig(strategy="fsdp", use_dynamic_bsz=True).rollout_n == 1


def test_profilers_are_joined_by_their_ranks() -> None:
    one, other = ProfilerConfig(enable=True, ranks=[0, 1]), ProfilerConfig(all_ranks=True, ranks=[1, 2])
    both, common = one.union(other), one.intersect(other)
    assert (both.enable, both.all_ranks, both.ranks) == (True, True, [0, 1, 2])
    assert (common.enable, common.all_ranks, common.ranks) == (False, False, [1])
    with pytest.raises(AssertionError, match="two tools"):
        one.union(ProfilerConfig(tool="nsys"))


def test_a_rollout_rejects_what_verl_rejects() -> None:
    assert settings.RolloutConfig(name="vllm", temperature=0.5).temperature == 0.5
    with pytest.raises(ValueError, match="sync"):
        settings.RolloutConfig(name="vllm", mode="sync")
    with pytest.raises(NotImplementedError, match="pipeline"):
        settings.RolloutConfig(name="vllm", pipeline_model_parallel_size=2)
    with pytest.raises(AssertionError, match="expert_parallel_size"):
        settings.RolloutConfig(name="vllm", expert_parallel_size=4, tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="non-negative"):
        settings.TraceConfig(max_samples_per_step_per_worker=-1)


def test_a_model_is_read_when_its_settings_are_made(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    facts = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 9, **shape}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    model = settings.HFModelConfig(
        path=str(tmp_path), load_tokenizer=False, override_config={"model_config": {"hidden_size": 64}}
    )
    assert model.hf_config.hidden_size == 64 and model.architectures == ["Qwen2ForCausalLM"]
    assert model.local_path == str(tmp_path) and model.share_embeddings_and_output_weights is False
    with pytest.raises(TypeError, match="target_modules"):
        settings.HFModelConfig(path=str(tmp_path), load_tokenizer=False, target_modules=3)
    with pytest.raises(ValueError, match="path is missing"):
        settings.HFModelConfig()

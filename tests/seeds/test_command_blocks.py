"""Command blocks of the documents that ask for what is not built: refused at once, and every part of them named."""

from __future__ import annotations

import sys

import pytest

from posttrain.config import load_config
from posttrain.config.resolved import ConfigError
from posttrain.external import import_external
from posttrain.rewards import RewardError
from posttrain.rewards.scorers import check_sources

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
VLLM = f"`{ROLLOUT}.name=vllm`: the package vllm is not installed in this environment"
ONE_WORKER = f"`{ROLLOUT}.tensor_model_parallel_size=2` does not divide the 1 x 1 = 1 worker(s)"
EIGHT = "`trainer.n_gpus_per_node=8` asks for 8 workers; this machine has 2 CPU core(s)"
FOUR_MACHINES = "`trainer.nnodes=4` asks for 4 machines, but no cluster or head address is given"
REFUSED = {
    "document 0, 1.4, four YAML parts as one file": (
        ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2"],
        [VLLM, ONE_WORKER],
    ),
    "document 0, 2.2, and document 4, 2.1, in full": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=8"],
        [VLLM, EIGHT],
    ),
    "document 0, 2.3, several nodes": (
        ["algorithm.adv_estimator=grpo", "trainer.nnodes=4", "trainer.n_gpus_per_node=8"],
        [EIGHT, FOUR_MACHINES],
    ),
    "document 4, 4.1, Megatron": (
        [
            "actor_rollout_ref.model.path=DeepSeek-V3",
            f"{ACTOR}.strategy=megatron",
            f"{ACTOR}.megatron_config.tensor_parallel_size=8",
            f"{ACTOR}.megatron_config.pipeline_parallel_size=4",
            f"{ACTOR}.megatron_config.expert_parallel_size=8",
            f"{ROLLOUT}.tensor_model_parallel_size=8",
            "trainer.n_gpus_per_node=8",
            "trainer.nnodes=4",
        ],
        [
            f"`{ACTOR}.strategy=megatron`: the package megatron-core is not installed in this environment",
            f"{ROLLOUT}.tensor_model_parallel_size=8: models of the kind deepseek_v3 cannot be cut over the workers",
            EIGHT,
            FOUR_MACHINES,
        ],
    ),
    "document 4, 6.1, several turns and tools": (
        [
            f"{ROLLOUT}.name=sglang",
            f"{ROLLOUT}.multi_turn=True",
            f"{ROLLOUT}.max_turns=5",
            f'{ROLLOUT}.tools=["search"]',
            f"{ROLLOUT}.tool_config.search.api_key=secret-4711",
        ],
        [
            f"`{ROLLOUT}.name=sglang`: the package sglang is not installed",
        ],
    ),
}


@pytest.mark.parametrize("block", REFUSED)
def test_a_block_is_refused_for_every_part_that_is_not_built_and_for_nothing_else(block, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posttrain.cores.usable", lambda: 2)
    monkeypatch.setattr("posttrain.rollout.outside_engine.OutsideEngine.is_installed", lambda self: False)
    monkeypatch.setattr("posttrain.engine.megatron.entry.is_installed", lambda: False)
    monkeypatch.setattr("posttrain.config.environment.gpus_present", lambda: 0)
    (tmp_path / "DeepSeek-V3").mkdir()  # with the sizes that transformers knows, and no weights
    (tmp_path / "DeepSeek-V3" / "config.json").write_text('{"model_type": "deepseek_v3"}')
    (tmp_path / "DeepSeek-V3" / "tokenizer.json").write_text("{}")
    given, reasons = REFUSED[block]
    with pytest.raises(ConfigError) as refused:
        load_config(given, environment=True)
    said = str(refused.value)
    assert [reason for reason in reasons if reason not in said] == []
    assert said.startswith(f"{len(reasons)} problem"), said
    assert "4711" not in said


def test_rows_of_a_prompt_alone_are_told_that_they_name_no_source():
    with pytest.raises(RewardError, match="not named: the rows have none") as refused:
        check_sources([None])
    assert "'None'" not in str(refused.value) and "data.data_source" in str(refused.value)


def test_a_file_that_imports_verl_says_what_to_do_without_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", None)  # as where it is not installed
    (tmp_path / "my_algorithm.py").write_text("import verl\n")
    with pytest.raises(Exception, match="Write `posttrain` for `verl` in it, or install"):
        import_external(str(tmp_path / "my_algorithm.py"))

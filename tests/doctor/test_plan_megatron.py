"""The memory plan of runs that Megatron's engine trains: what each rank holds by its sizes, and sizes that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain import cli
from posttrain.config import load_config
from posttrain.planning.counting import ModelBytes
from posttrain.planning.memory_plan import GIB, Device, Plan, find_cuts
from posttrain.planning.rl import RLPlanner

GPU = Device("cuda", 80 * GIB, "a GPU of 80 GiB")
KEY = "actor_rollout_ref.actor.megatron_config"
LARGE = {
    "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 2,
    "moe_intermediate_size": 512, "tie_word_embeddings": False, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("no-weights")
    (made / "config.json").write_text(json.dumps(LARGE))
    return made


@pytest.fixture(scope="module")
def planned(folder):
    planner = RLPlanner()

    def make(workers: int = 8, device: Device = GPU, **more: Any) -> tuple[Any, Plan, RLPlanner]:
        given = {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.model.path": str(folder),
            "actor_rollout_ref.actor.strategy": "megatron",
            "trainer.n_gpus_per_node": workers,
            "data.train_files": "x.json",
            "data.train_batch_size": 64,
            "data.max_prompt_length": 64,
            "data.max_response_length": 64,
            "rollout.n": 4,
            "actor.ppo_mini_batch_size": 64,
            "actor.ppo_max_token_len_per_gpu": 2048,
        }
        for name, value in more.items():
            key = f"{KEY}.{name}" if "parallel" in name or "distributed" in name else name.replace("__", ".")
            given[key] = value
        config = load_config(given).config
        return config, planner.plan(config, device), planner

    return make


def rank(planned, part: str, **sizes: Any) -> int:
    return planned(**sizes)[1].largest(f"actor {part}")


def test_weights_of_a_rank_follow_from_its_sizes(planned):
    config, plan, planner = planned(workers=1)
    whole = planner.count(config, GPU, "actor", ModelBytes.of).weights
    assert plan.largest("actor weights") == whole
    model = {name: w for name, w in planner._kept[next(iter(planner._kept))].named_parameters()}
    size = lambda *words: sum(w.numel() * w.itemsize for n, w in model.items() if any(word in n for word in words))  # noqa: E731
    experts, whole_everywhere = size(".experts."), size("norm", "mlp.gate.")
    cut = whole - experts - whole_everywhere
    assert rank(planned, "weights", tensor_parallel_size=2) == cut // 2 + experts + whole_everywhere
    assert rank(planned, "weights", expert_parallel_size=8) == whole - experts * 7 // 8
    assert rank(planned, "weights", context_parallel_size=2) == whole
    layers = size("layers.")
    head, embedding = size("lm_head") + model["model.norm.weight"].nbytes, size("embed_tokens")
    assert rank(planned, "weights", pipeline_parallel_size=4) == layers // 4 + max(head, embedding)


def test_copies_of_a_model_share_the_moments_and_may_hold_all(planned):
    whole, alone = rank(planned, "optimizer", workers=1), {"use_distributed_optimizer": False}
    assert rank(planned, "optimizer") == pytest.approx(whole / 8, rel=1e-3)
    assert rank(planned, "optimizer", **alone) == whole
    assert rank(planned, "optimizer", expert_parallel_size=8, tensor_parallel_size=2) < whole / 6


def test_activations_follow_from_the_tokens_and_layers_of_a_rank(planned):
    whole = rank(planned, "activations")
    assert rank(planned, "activations", context_parallel_size=2) == pytest.approx(whole / 2, rel=0.01)
    assert rank(planned, "activations", tensor_parallel_size=4) == pytest.approx(whole / 4, rel=0.01)
    unshared = rank(planned, "activations", tensor_parallel_size=4, sequence_parallel=False)
    assert 1.5 * whole / 4 < unshared < whole  # what lies between the matrices of a layer is on all of them
    # The first stage of two holds two passes of half of the layers; with chunks, five of a quarter.
    assert rank(planned, "activations", pipeline_parallel_size=2) == pytest.approx(whole, rel=0.01)
    chunks = rank(planned, "activations", pipeline_parallel_size=2, virtual_pipeline_parallel_size=2)
    assert chunks == pytest.approx(1.25 * whole, rel=0.01)
    again = rank(planned, "activations", actor_rollout_ref__model__enable_gradient_checkpointing=True)
    assert again < whole / 10


def test_sizes_that_fit_are_found_and_tried(planned):
    config, whole, planner = planned()
    device = Device("cuda", int(whole.peak() * 0.7 / 0.9), "a smaller GPU")
    plan = planner.plan(config, device)
    assert not plan.fits
    cuts = find_cuts(config, plan, planner)
    assert cuts and all(cut.fits and cut.sizes for cut in cuts)
    for cut in cuts:
        assert planned(device=device, **cut.sizes)[1].peak() == cut.peak <= 0.9 * device.bytes
    (lowest,) = find_cuts(config, plan, planner, most=0)  # none of them is taken
    assert lowest.peak <= min(cut.peak for cut in cuts)


@pytest.mark.slow
def test_the_command_prints_sizes_that_fit_and_fsdp_has_none(planned, folder, capsys):
    command = [
        "plan", "--gpu_gb", "8", "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={folder}",
        "rollout.n=4", "trainer.n_gpus_per_node=2", "data.train_files=x.json", "data.max_prompt_length=64",
        "data.max_response_length=64", "data.train_batch_size=16",
    ]  # fmt: skip
    assert cli.main([*command, "actor_rollout_ref.actor.strategy=megatron", f"{KEY}.tensor_parallel_size=2"]) == 0
    told = capsys.readouterr().out
    assert "Each part is that of the rank that holds most of it" in told
    assert "Sizes of Megatron's ranks that fit, on 2 worker(s):\n  expert_parallel_size=2: the peak is" in told
    assert cli.main(command) == 0
    assert "Megatron" not in capsys.readouterr().out

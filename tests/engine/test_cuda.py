"""On a CUDA device: packed = padded, exact offload, small runs in bfloat16 and float32, and exact repetition."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_tools import gradient, objective, ragged_batch

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture
def cuda_engine(tiny_model):
    from posttrain.config.model import ModelConfig
    from posttrain.config.root import OptimConfig
    from posttrain.engine.base import EngineSettings
    from posttrain.engine.torch_engine import TorchEngine
    from posttrain.models.loading import load_causal_lm
    from posttrain.models.lora import with_adapters

    def make(dtype=torch.float64, rank=0, **settings):
        device = torch.device("cuda")
        config = ModelConfig(path=str(tiny_model), lora_rank=rank, lora_alpha=2 * rank)
        module = load_causal_lm(config, dtype=dtype, device=device)
        if rank:
            torch.manual_seed(0)  # the same adapters, whichever engine was made first
            module = with_adapters(module, config)
            for name, weight in module.named_parameters():
                if ".lora_B." in name:  # zero at first, and then A has no gradient
                    weight.data.normal_(std=0.1)
        return TorchEngine(module, EngineSettings(device=device, optim=OptimConfig(lr=1e-3), grad_clip=1e9, **settings))

    return make


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gradient_is_the_same_packed_padded_shared_and_split(cuda_engine, dtype, limit):
    batch = ragged_batch(dtype=dtype, prompts=5)
    whole = gradient(cuda_engine(dtype, share_prompts=False), batch, objective())
    for layout in ({}, {"max_rows": 2}, {"pack": False}, {"token_budget": 60}):
        part = gradient(cuda_engine(dtype, **layout), batch, objective())
        assert float((part - whole).norm() / whole.norm()) < limit, layout


@pytest.mark.parametrize("rank", [0, 3, 40])
def test_matrices_and_adapters_in_bfloat16_get_their_gradients_added_up_by_the_products(cuda_engine, rank, monkeypatch):
    from posttrain.engine.optim import Optimizer

    batch = ragged_batch(dtype=torch.float32, prompts=5)
    gathered = Optimizer.gather_gradients
    left = set()

    def gather(self):
        left.update(name for name, weight in zip(self.names, self.weights, strict=True) if weight.grad is not None)
        gathered(self)

    monkeypatch.setattr(Optimizer, "gather_gradients", gather)
    exact = gradient(cuda_engine(torch.float32, rank, max_rows=1), batch, objective())
    left.clear()
    added = gradient(cuda_engine(torch.bfloat16, rank, max_rows=1), batch, objective())
    assert rank or not any("proj.weight" in name for name in left)
    monkeypatch.setattr(Optimizer, "open_sums", lambda self: None)
    rounded = gradient(cuda_engine(torch.bfloat16, rank, max_rows=1), batch, objective())
    assert any(".lora_A." in name if rank else "proj.weight" in name for name in left)
    off = [float((found.float() - exact).norm() / exact.norm()) for found in (added, rounded)]
    assert off[0] < 1.05 * off[1] < 0.1


@pytest.fixture
def many_rows(tmp_path):
    """An engine with a real model's heads, and enough rows that share prompts for the device's units to overtake each
    other."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from posttrain.config.model import ModelConfig
    from posttrain.config.root import OptimConfig
    from posttrain.engine.base import EngineSettings
    from posttrain.engine.micro_batches import plan_passes
    from posttrain.engine.torch_engine import TorchEngine
    from posttrain.models.loading import load_causal_lm
    from posttrain.rollout.base import Output
    from posttrain.rollout.generate import to_batch

    torch.manual_seed(0)
    sizes = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 512}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=512, num_hidden_layers=6, **sizes)).save_pretrained(tmp_path)
    device = torch.device(DEVICE)
    module = load_causal_lm(ModelConfig(path=str(tmp_path)), dtype=torch.bfloat16, device=device)
    engine = TorchEngine(module, EngineSettings(device=device, optim=OptimConfig()))
    draw = torch.randint(512, (64, 384)).tolist()
    outputs = [Output(number, row[128:], [0.0] * 256, "length") for number, row in enumerate(draw)]
    batch = to_batch([row[:128] for row in draw[::8] for _ in range(8)], outputs, pad_token_id=0)
    batch.non_tensor_batch["uid"] = np.repeat(np.array(list("abcdefgh"), dtype=object), 8)
    assert any(len(unit.rows) > 1 for units in plan_passes(batch, engine.facts()) for unit in units), (
        "prompts are shared"
    )
    return engine, batch


def test_log_probs_of_many_rows_are_the_same_to_the_bit_each_time(many_rows):
    engine, batch = many_rows
    found = [engine.log_probs(batch)["log_probs"] for _ in range(6)]
    assert all(torch.equal(again, found[0]) for again in found[1:])


def test_gradients_of_many_rows_are_the_same_to_the_bit_each_time_whatever_memory_held(many_rows, monkeypatch):
    from posttrain.trainer.run.process import restore_determinism

    engine, batch = many_rows
    old = engine.log_probs(batch)["log_probs"]
    batch.batch["old_log_probs"] = batch.batch["ref_log_prob"] = old
    batch.batch["advantages"] = torch.randn_like(old)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with restore_determinism():
        torch.use_deterministic_algorithms(True)
        found = []
        for filled in (False,) * 6 + (True,) * 2:  # with what was there before, or with NaN
            torch.utils.deterministic.fill_uninitialized_memory = filled
            found.append(gradient(engine, batch, objective()))
            engine.optimizer.clear_gradients()
    assert bool(found[0].isfinite().all()) and float(found[0].norm()) > 0
    assert all(torch.equal(again, found[0]) for again in found[1:])


def test_offload_frees_the_device_and_changes_no_number(cuda_engine):
    batch = ragged_batch(dtype=torch.float32, prompts=5)
    plain, away = cuda_engine(torch.float32), cuda_engine(torch.float32, param_offload=True, optimizer_offload=True)
    for engine in (plain, away):
        loss = objective()
        with engine.on_device(optimizer=True):
            engine.update(loss.prepare(batch.select()), loss)
    assert all(weight.device.type == "cpu" for weight in away.module.parameters())
    moments = [value for state in away.optimizer.adam.state.values() for value in state.values()]
    assert all(value.device.type == "cpu" for value in moments)
    with away.on_device():
        there = away.log_probs(batch)["log_probs"]
    torch.testing.assert_close(there, plain.log_probs(batch)["log_probs"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_on_cuda_agrees_with_itself_and_learns_something(tiny_model, sums, tmp_path, dtype):
    from runs import metrics_of, run

    result = run(
        tiny_model,
        sums,
        tmp_path,
        trainer__device="cuda",
        actor_rollout_ref__model__dtype=dtype,
        trainer__deterministic=True,
    )
    again = run(
        tiny_model,
        sums,
        tmp_path / "b",
        trainer__device="cuda",
        actor_rollout_ref__model__dtype=dtype,
        trainer__deterministic=True,
    )
    assert metrics_of(result.path) == metrics_of(again.path)
    assert result.metrics[0]["mismatch/logp_mean"] < (5e-2 if dtype == "bfloat16" else 1e-3)


def test_a_resumed_run_on_cuda_equals_the_straight_one_to_the_bit(tiny_model, sums, tmp_path):
    from runs import metrics_of, run

    more = {"trainer__device": "cuda", "trainer__deterministic": True, "trainer__total_training_steps": 3}
    straight = run(tiny_model, sums, tmp_path, trainer__save_freq=1, **more)
    start = straight.path / "checkpoints" / "global_step_1"
    given = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(start)}
    branch = run(tiny_model, sums, tmp_path, trainer__experiment_name="branch", **given, **more)
    assert metrics_of(branch.path) == metrics_of(straight.path)[1:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_save_is_copied_beside_training_and_beside_captured_graphs(cuda_engine, tmp_path, monkeypatch, dtype):
    """The thread waits for the device while this one captures graphs, as a rollout does, and then trains."""
    from posttrain.checkpoint import CheckpointManager, parts

    engine, loss, batch = cuda_engine(dtype), objective(), ragged_batch(dtype=torch.float32, prompts=5)
    manager, square = CheckpointManager(tmp_path), torch.ones(64, 64, device=DEVICE)
    monkeypatch.setattr(parts, "_STAGING", 2**14)  # many loads: many waits
    for step in (1, 2):
        engine.update(loss.prepare(copy.copy(batch).select()), loss)
        before = {name: tensor.clone() for name, tensor in engine.state.tensors().items()}
        manager.save(step, tensors={"actor": engine.begin_save}, state={}, rng={}, background=True)
        captured = 0
        while not (engine.state.copies.is_idle.is_set() and captured):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                square @ square
            captured += 1
        engine.update(loss.prepare(copy.copy(batch).select()), loss)
        manager.save(step + 2, tensors={"actor": engine.begin_save}, state={}, rng={}, background=True)
        after = {name: tensor.clone() for name, tensor in engine.state.tensors().items()}
        engine.update(loss.prepare(copy.copy(batch).select()), loss)  # at once
        manager.wait()
        for number, held in ((step, before), (step + 2, after)):
            into = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
            manager.load_tensors(manager.path_of(number), "actor", into)
            assert [name for name in held if not torch.equal(into[name], held[name])] == []

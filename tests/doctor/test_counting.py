"""Counted bytes against real tensors: an engine that trains a tiny model on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.config import load_config
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.micro_batches import plan_units
from posttrain.engine.packing import packed_units
from posttrain.engine.torch_engine import TorchEngine
from posttrain.kernels.decode import BLOCK
from posttrain.kernels.packed_attention import packed_rows
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapters
from posttrain.planning import counting
from posttrain.planning.counting import LiveBytes, ModelBytes
from posttrain.planning.memory_plan import GIB, Device
from posttrain.planning.meta_models import actor_model
from posttrain.planning.rl import RLPlanner
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output, Request, Sampling
from posttrain.rollout.generate import to_batch
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native

CPU = torch.device("cpu")
ROWS, PROMPT, LENGTH = 4, 8, 64
CASES = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "lora": (torch.bfloat16, {"lora_rank": 4}),
}


def real_engine(config: ModelConfig, dtype: torch.dtype, **settings) -> TorchEngine:
    model = load_causal_lm(config, dtype=dtype, device=CPU)
    if config.lora_rank:
        model = add_adapters(model, config)
    return TorchEngine(model, EngineSettings(device=CPU, optim=OptimConfig(), share_prompts=False, **settings))


def full_rows(rows: int = ROWS, length: int = LENGTH, vocabulary: int = 250) -> DataProto:
    """Rows of the full length whose prompts are as short as can be: nearly every token is a response's."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary, size=(rows, length)).tolist()
    return to_batch([row[:1] for row in ids], [Output(0, row[1:], [0.0] * (length - 1), "stop") for row in ids], 0)


def loss(micro: DataProto, out: dict[str, torch.Tensor]) -> torch.Tensor:
    return out["log_probs"].sum()


def size(tensors) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("case", CASES)
def test_weights_gradients_and_optimizer_equal_the_real_tensors_to_the_byte(tiny_model, case):
    dtype, adapters = CASES[case]
    config = ModelConfig(path=str(tiny_model), **adapters)
    planned = ModelBytes.of(actor_model(config, dtype))
    engine = real_engine(config, dtype, max_rows=4)
    optimizer = engine.optimizer
    assert optimizer is not None
    engine.runner.gradients(full_rows(), loss, 1.0)
    gradients = size(master.grad for master in optimizer.masters)
    optimizer.step(grad_clip=1.0, total_steps=1)
    masters = [m for m, w in zip(optimizer.masters, optimizer.weights, strict=True) if m is not w]
    moments = [optimizer.adam.state[m][name] for m in optimizer.masters for name in ("exp_avg", "exp_avg_sq")]
    assert planned.weights == size(engine.module.parameters()) > 0
    assert planned.gradients == gradients > 0
    assert planned.optimizer == size([*masters, *moments]) > 0


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("case", CASES)
def test_activations_and_peak_are_those_of_a_real_update(tiny_model, case, checkpointing):
    """Activations within 10% of torch's saved tensors, the peak within 5% of all tensors that were alive."""
    dtype, adapters = CASES[case]
    config = ModelConfig(path=str(tiny_model), **adapters)
    planned, peak = counting.training_bytes(actor_model(config, dtype), ROWS, LENGTH, checkpointing, "cpu")
    engine = real_engine(config, dtype, gradient_checkpointing=checkpointing)
    batch = full_rows()
    engine.runner.gradients(batch, loss, 1.0)  # from here on the sums of the gradients exist
    engine.module.train(checkpointing)
    rows = packed_units(batch, plan_units(batch, share=False), CPU)
    with packed_rows(rows.layout):
        saved, _ = counting.saved_bytes(engine.module, lambda: engine.stage.forward(rows, None, 1.0))
    assert planned == pytest.approx(saved, rel=0.1)
    with LiveBytes(engine.module) as live:
        engine.runner.gradients(batch, loss, 1.0)
    assert peak == pytest.approx(live.peak, rel=0.05)


def test_a_pass_without_gradient_takes_what_is_planned(tiny_model):
    config = ModelConfig(path=str(tiny_model))
    engine = real_engine(config, torch.float32)
    with LiveBytes(engine.module) as live:
        engine.log_probs(full_rows())
    planned = counting.scoring_peak(actor_model(config, torch.float32), ROWS, LENGTH, "cpu")
    assert planned == pytest.approx(live.peak, rel=0.05)


def test_cache_equals_the_engines_to_the_byte(tiny_model):
    config = ModelConfig(path=str(tiny_model))
    model = load_causal_lm(config, dtype=torch.float32, device=CPU)
    engine = HFEngine(model, pad_token_id=0)
    for row in range(6):
        engine.submit(Request(row, [1] * PROMPT, Sampling(max_tokens=20), seed=row))
    while engine.rows or engine.waiting:
        before = engine.cache
        engine.step()
        cache = engine.cache or before
    assert cache is not None
    real = size(kept for layer in cache.layers for kept in (layer.keys, layer.values))
    tokens = 6 * (PROMPT + 20 - 1)  # the last token is never fed back
    assert counting.cache_bytes_per_token(actor_model(config, torch.float32)) * tokens == real


@pytest.mark.parametrize("prompts, n, prompt, new", [(4, 8, 8, 24), (16, 1, 60, 3)])
def test_native_generation_takes_the_planned_cache_and_temporary_tensors(tiny_model, prompts, n, prompt, new):
    """The cache to the byte; all that is alive at the peak within 80% and 102% of the plan."""
    config = ModelConfig(path=str(tiny_model))
    model = load_causal_lm(config, dtype=torch.float32, device=CPU)
    engine = build_native(model, RolloutConfig(), decode=None)[0]
    engine.score([[1, 2, 3]])  # compiles the kernels and makes the table of angles
    engine.pool.clear()
    sampling = Sampling(max_tokens=new)
    with LiveBytes(model) as live:
        for row in range(prompts * n):
            engine.submit(Request(row, [row // n + 1] * prompt, sampling, seed=row))
        while engine.has_work():
            engine.step()
    planned_run = {
        "actor_rollout_ref.model.path": str(tiny_model),
        "data.train_files": "x.json",
        "data.train_batch_size": prompts,
        "data.max_prompt_length": prompt,
        "data.max_response_length": new,
        "actor_rollout_ref.rollout.n": n,
        "algorithm.adv_estimator": "gae",
    }
    plan = RLPlanner().plan(load_config(planned_run).config, Device("cpu", 16 * GIB, "the CPU"))
    parts = plan.stages["generate"]
    assert size(tensor for cache in engine.pool.layers.values() for tensor in cache) == parts["KV cache"]
    planned = sum(parts[part] for part in ("KV cache", "temporary tensors", "rollout weights"))
    assert 0.8 * planned < live.peak < 1.02 * planned


@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v3", "qwen3-next"])
def test_an_update_of_experts_in_float32_takes_what_is_planned(kind, tmp_path):
    from tests.rollout.tiny import VOCABULARY, tiny

    tiny(kind).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    _, peak = counting.training_bytes(actor_model(config, torch.float32), ROWS, LENGTH, False, "cpu")
    engine, batch = real_engine(config, torch.float32), full_rows(vocabulary=VOCABULARY)
    engine.runner.gradients(batch, loss, 1.0)
    with LiveBytes(engine.module) as live:
        engine.runner.gradients(batch, loss, 1.0)
    assert peak == pytest.approx(live.peak, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gemma2", "gpt-oss", "gemma3"])
def test_scores_and_masks_of_windows_are_counted_where_they_are_held(kind, dtype, tmp_path):
    """An update holds the scores of a row if they are capped or beside sinks, and the masks of windows (within 2% of
    the real tensors), a step of the rollout engine none."""
    from tests.rollout.tiny import VOCABULARY, tiny

    length = 256  # long enough for scores to count most
    tiny(kind, dtype=dtype).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    planned, peak = counting.training_bytes(actor_model(config, dtype), ROWS, length, False, "cpu")
    engine, batch = real_engine(config, dtype), full_rows(length=length, vocabulary=VOCABULARY)
    engine.runner.gradients(batch, loss, 1.0)
    rows = packed_units(batch, plan_units(batch, share=False), CPU)
    with packed_rows(rows.layout):
        saved, _ = counting.saved_bytes(engine.module, lambda: engine.stage.forward(rows, None, 1.0))
    assert planned == pytest.approx(saved, rel=0.02)
    with LiveBytes(engine.module) as live:
        engine.runner.gradients(batch, loss, 1.0)
    assert peak == pytest.approx(live.peak, rel=0.02)
    tokens, heads = ROWS * length, 4
    step = counting.native_step_peak(actor_model(config, dtype), tokens, ROWS, Sampling(max_tokens=8))
    assert step < heads * tokens * tokens


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_plan_of_latent_attention_counts_the_cache_that_its_engine_holds(kind, tmp_path):
    from posttrain.rollout.native.build import bytes_per_token
    from posttrain.rollout.native.pool import blocks_for, with_slack
    from tests.rollout.tiny import tiny

    model = tiny("deepseek-v3", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    planned_run = {
        "actor_rollout_ref.model.path": str(tmp_path),
        "actor_rollout_ref.model.dtype": "bfloat16",
        "data.train_files": "x.json",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 40,
        "data.max_response_length": 24,
        "actor_rollout_ref.rollout.n": 2,
    }
    device = Device(kind, 16 * GIB, "the device")
    plan = RLPlanner().plan(load_config(planned_run).config, device)
    blocks = with_slack(4 * blocks_for(40) + 8 * blocks_for(24))
    per_token = 3 * (20 + 8) * 2
    assert bytes_per_token(model, 1, latents=True) == per_token
    assert plan.stages["generate"]["KV cache"] == blocks * BLOCK * per_token


@pytest.mark.parametrize("kind", ["qwen3-next", "qwen3.5", "mamba2"])
def test_the_plan_counts_the_recurrent_states_that_the_engine_holds(kind, tmp_path):
    from tests.rollout.tiny import tiny

    tiny(kind, attention="eager").save_pretrained(tmp_path)
    model = load_causal_lm(ModelConfig(path=str(tmp_path)), dtype=torch.float32, device=CPU)
    engine = build_native(model, RolloutConfig(), decode=None)[0]
    for row in range(12):
        engine.submit(Request(row, [row // 3 + 1] * 40, Sampling(max_tokens=24), seed=row))
    while engine.has_work():
        engine.step()
    planned_run = {
        "actor_rollout_ref.model.path": str(tmp_path),
        "data.train_files": "x.json",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 40,
        "data.max_response_length": 24,
        "actor_rollout_ref.rollout.n": 3,
    }
    parts = RLPlanner().plan(load_config(planned_run).config, Device("cpu", 16 * GIB, "the CPU")).stages["generate"]
    states, blocks = engine.pool.states.store.nbytes, [x for cache in engine.pool.layers.values() for x in cache]
    assert states > 0 and (len(blocks) > 0) == (kind != "mamba2")
    assert parts["KV cache"] == states + size(blocks) == engine.cache_bytes()


def test_live_bytes_follow_what_is_alive():
    weight = torch.nn.Linear(10, 10)
    with LiveBytes(weight) as live:
        kept = torch.zeros(100)
        assert (live.now, live.peak) == (400, 400)
        other = kept + 1
        view = other[:50]
        assert live.now == 800
        del other
        assert live.now == 800  # the view holds the storage
        del view
        assert (live.now, live.peak) == (400, 800)
        weight.weight.t()
        assert live.now == 400


def test_generation_takes_the_planned_cache_and_temporary_tensors(tiny_model):
    """The peak of a real wave, prefill and decoding, lies between 80% and 102% of the plan."""
    config = ModelConfig(path=str(tiny_model))
    model = load_causal_lm(config, dtype=torch.float32, device=CPU)
    prompts, n, new = 4, 8, 24
    engine = HFEngine(model, pad_token_id=0)
    sampling = Sampling(max_tokens=new)
    with LiveBytes(model) as live:
        for row in range(prompts * n):
            engine.submit(Request(row, [row // n + 1] * PROMPT, sampling, seed=row))
        while engine.has_work():
            engine.step()
    meta = actor_model(config, torch.float32)
    cache = prompts * n * (PROMPT + new) * counting.cache_bytes_per_token(meta)
    decode = counting.decode_peak(meta, prompts * n, PROMPT + new, sampling)
    planned = max(counting.prefill_peak(meta, prompts, PROMPT), cache + decode)
    assert 0.8 * planned < live.peak < 1.02 * planned


@pytest.mark.parametrize("kind", counting.KNOWN)
def test_the_cache_of_known_models_is_what_their_pass_leaves_in_it(kind, monkeypatch):
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    config = AutoConfig.for_model(kind, vocab_size=50, intermediate_size=64, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    known = counting.cache_bytes_per_token(model)
    monkeypatch.setattr(counting, "KNOWN", ())
    assert known == counting.cache_bytes_per_token(model) > 0

"""Generation through adapters beside the base: equal to the trainer for every kind of target, and the base stays."""

from __future__ import annotations

import pytest
import torch

from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.models.arena import Arena
from posttrain.models.decodable import can_decode_fast
from posttrain.models.lora import add_adapters, base_only
from posttrain.models.low_rank import Adapter, LowRank, fill
from posttrain.rollout.base import Output, Sampling
from posttrain.rollout.generate import generate, to_batch
from posttrain.rollout.native.build import build_native
from tests.machine import multiplies
from tests.rollout.tiny import tiny

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], list(range(40)), [5, 6, 7], [9]]
TARGETS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "query and value": ["q_proj", "v_proj"],
    "gated layer": ["gate_proj", "up_proj", "down_proj"],
    "one layer": r".*layers\.1\..*",
    "head": ["lm_head", "o_proj"],
    "all": "all-linear",
}


def with_adapters(kind: str, targets, rank: int = 3, seed: int = 1):
    """A model whose adapters are not zero."""
    module = add_adapters(tiny(kind), ModelConfig(lora_rank=rank, lora_alpha=6, target_modules=targets))
    shake(module, seed)
    return module


@torch.no_grad()
def shake(module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if "lora_" in name:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


def trainer_log_probs(module, outputs) -> list[torch.Tensor]:
    engine = TorchEngine(module, EngineSettings(device=CPU))
    found = engine.log_probs(to_batch(PROMPTS, outputs, 0))["log_probs"]
    return [row[: len(output.token_ids)] for row, output in zip(found, outputs, strict=True)]


@pytest.mark.parametrize("targets", ["all", "query and value"])
@torch.no_grad()
def test_copies_of_adapters_multiply_as_the_adapters_do_at_the_same_addresses(targets):
    module = with_adapters("qwen2", TARGETS[targets])
    product = Arena(module, share=True).layers[1]["qkv"]
    x = torch.randn(5, product.weight.shape[1], generator=torch.Generator().manual_seed(0))
    adapters = [(columns, Adapter.of(layer)) for columns, layer in product.adapters]
    first, copies = product(x), LowRank.like(adapters, len(product.weight), product.weight)
    places = [copies.down_RE.data_ptr(), *(up.data_ptr() for up in copies.ups)]
    for seed in (1, 2):
        shake(module, seed)
        product.low = None
        wanted = product(x)
        fill([(copies, adapters)])
        product.low = copies
        torch.testing.assert_close(product(x), wanted, rtol=0, atol=1e-6)
        assert seed == 1 or not torch.equal(wanted, first)
    assert places == [copies.down_RE.data_ptr(), *(up.data_ptr() for up in copies.ups)]
    grad, in_parts = torch.randn(5, len(product.weight)), (wanted, None)
    for whole in (False, True):  # as a CPU multiplies, and as a CUDA device does
        copies.whole = whole
        found = product(x), copies.back(grad)
        for ours, theirs in zip(found, in_parts, strict=True):
            assert theirs is None or torch.allclose(ours, theirs, rtol=0, atol=1e-6)
        in_parts = found


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("kind", ["qwen2", "qwen2-tied", "qwen3", "llama"])
@pytest.mark.parametrize("tokens", [6, 24], ids=["beside", "folded into packed copies"])
def test_rollout_log_probs_equal_the_trainers_within_1e_5(kind, targets, tokens):
    """Short responses go through base and adapters; long ones, in float32, through copies that hold both."""
    module = with_adapters(kind, TARGETS[targets])
    assert can_decode_fast(module)
    engine = build_native(module, RolloutConfig(kv_cache_gb=0.05), decode=None)[0]
    outputs = generate(engine, PROMPTS, [Sampling(max_tokens=tokens)] * len(PROMPTS), range(len(PROMPTS)))
    whole = tokens >= 16 and multiplies("float32")
    assert (engine.decoder.whole is not None) is whole  # pyright: ignore
    for output, expected in zip(outputs, trainer_log_probs(module, outputs), strict=True):
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)
    with base_only(module):
        bare = trainer_log_probs(module, outputs)
    assert max(float((a - torch.tensor(o.log_probs)).abs().max()) for a, o in zip(bare, outputs, strict=True)) > 1e-3


def test_bfloat16_adapters_stay_beside_the_base_where_folding_would_round_them_away():
    module = add_adapters(tiny("qwen2", torch.bfloat16), ModelConfig(lora_rank=3))
    shake(module, 1)
    engine = build_native(module, RolloutConfig(kv_cache_gb=0.05), decode=None)[0]
    outputs = generate(engine, PROMPTS, [Sampling(max_tokens=24)] * 4, range(4))
    assert engine.decoder.whole is None  # pyright: ignore
    gaps = torch.cat(
        [torch.tensor(o.log_probs) - t for o, t in zip(outputs, trainer_log_probs(module, outputs), strict=True)]
    )
    assert gaps.abs().mean() < 0.03 and gaps.abs().max() < 0.3


@pytest.mark.slow
def test_the_base_is_bit_identical_after_200_updates_and_weight_syncs():
    module = add_adapters(tiny("qwen2-tied"), ModelConfig(lora_rank=2))
    before = {name: w.detach().clone() for name, w in module.named_parameters() if "lora_" not in name}
    engine = TorchEngine(module, EngineSettings(device=CPU, optim=OptimConfig(lr=1e-2), total_steps=200))
    rollout = build_native(module, RolloutConfig(kv_cache_gb=0.05), decode=None)[0]
    row = to_batch([[1, 2]], [Output(0, [3, 4, 5], [0.0] * 3, "stop")], 0)
    start = rollout.score([[1, 2, 3, 4, 5]])[0]
    for step in range(200):
        engine.update(row, lambda micro, out: -out["log_probs"].sum())
        rollout.load_weights((), version=step)
        generate(rollout, [[1, 2]], [Sampling(max_tokens=16 if step % 20 == 0 else 2)], [step])
    assert float((rollout.score([[1, 2, 3, 4, 5]])[0] - start).abs().max()) > 1.0  # it did learn
    for name, weight in module.named_parameters():
        assert "lora_" in name or torch.equal(weight, before[name]), name


def test_weights_with_adapters_folded_in_are_never_written_over_the_live_base():
    module = with_adapters("llama", "all-linear")
    rollout = build_native(module, RolloutConfig(kv_cache_gb=0.05), decode=None)[0]
    engine = TorchEngine(module, EngineSettings(device=CPU))
    with pytest.raises(RuntimeError, match="live base weights"):
        rollout.load_weights(engine.export_weights(), version=1)


def test_a_head_with_adapters_is_computed_in_chunks_and_gives_the_gradient_of_all_logits_at_once(monkeypatch):
    from posttrain.models import forward

    module = with_adapters("llama", ["lm_head"])
    hidden, labels = torch.randn(50, 32), torch.arange(50)
    weights = [w for w in module.parameters() if w.requires_grad]
    results = []
    for chunk in (1 << 24, 97 * 7):  # all at once, 7 tokens at a time
        monkeypatch.setattr(forward, "CHUNK_ELEMENTS", chunk)
        log_probs, entropies = forward.token_log_probs(module, hidden, labels, 0.7)
        results.append([log_probs, *torch.autograd.grad((log_probs - entropies).sum(), weights)])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


def plain_log_probs(module, prompt, response) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        log_p = torch.log_softmax(module(ids).logits[0].float(), -1)
    return log_p[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_of_latents_are_decoded_in_float32_beside_any_base_and_never_stale(dtype):
    """`kv_b_proj` is multiplied with queries and with weighted latents instead of the latents themselves."""
    config = ModelConfig(lora_rank=3, lora_alpha=6, target_modules=["kv_b_proj"])
    dense = tiny("deepseek-v3", dtype=dtype, first_k_dense_replace=3)  # in bfloat16 routers may choose other experts
    module = add_adapters(dense, config)
    engine, name = build_native(module, RolloutConfig(kv_cache_gb=0.01), decode=None)
    assert "general decoder" in name
    found: list[torch.Tensor] = []
    for seed in (1, 2):
        shake(module, seed)
        engine.load_weights((), seed)
        outputs = generate(engine, PROMPTS, [Sampling(max_tokens=8)] * 4, range(4))
        found.append(torch.stack([torch.tensor(output.log_probs) for output in outputs]))
        expected = [
            plain_log_probs(module, prompt, output.token_ids) for prompt, output in zip(PROMPTS, outputs, strict=True)
        ]
        gap = (found[-1] - torch.stack(expected)).abs().max()
        assert gap < (1e-5 if dtype is torch.float32 else 0.05)
    assert engine.pool.layers[0][0].shape[-1] == 28 and (found[0] - found[1]).abs().max() > 1e-3


def test_latents_of_a_4_bit_base_are_multiplied_by_its_plain_numbers(monkeypatch):
    """With a stand-in for the weights and layers of bitsandbytes."""
    import sys
    from types import ModuleType

    class Params4bit(torch.nn.Parameter):
        quant_state: torch.Tensor

    class Linear4bit(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight.quant_state)

    functional = ModuleType("bitsandbytes.functional")
    functional.dequantize_4bit = lambda data, state: state
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)
    module = tiny("deepseek-v3").requires_grad_(False)
    for layer in module.model.layers:
        plain = layer.self_attn.kv_b_proj.weight
        packed = Params4bit(torch.zeros(plain.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
        packed.quant_state = plain.data
        layer.self_attn.kv_b_proj.__class__, layer.self_attn.kv_b_proj.weight = Linear4bit, packed
    engine, _ = build_native(module, RolloutConfig(kv_cache_gb=0.01), decode=None)
    outputs = generate(engine, PROMPTS, [Sampling(max_tokens=8)] * 4, range(4))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = plain_log_probs(module, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)

"""Adapters of experts that lie in one tensor: products, gradients, generation, files, and what is rejected."""

from __future__ import annotations

import json
import types
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.facts import facts_of
from posttrain.engine.megatron.adapters import check_adapters, scalings_of
from posttrain.engine.settings import RL
from posttrain.engine.torch_engine import TorchEngine
from posttrain.errors import UserError
from posttrain.models import expert_adapters
from posttrain.models.adapter_files import adapter_parameters, adapter_settings, write_adapter
from posttrain.models.adapter_targets import AdapterError, find_targets
from posttrain.models.expert_adapters import AdaptedExperts, is_wrapper, plain_experts
from posttrain.models.forward import ForwardMode
from posttrain.models.layer_weights import check_fp8_base
from posttrain.models.lora import add_adapters, base_only, merged_state, save_merged, with_adapters
from posttrain.planning.counting import ModelBytes
from posttrain.planning.meta_models import META
from posttrain.rollout.base import Sampling
from posttrain.rollout.generate import generate, to_batch
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native
from posttrain.workers.roles import adapter_notes
from tests.rollout.tiny import MIXTURES, tiny

CPU = torch.device("cpu")
EVERY = ["all-linear", "experts"]
BOTH = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
GENERAL = ["gpt-oss", "glm4-moe", "deepseek-v2", "deepseek-v3"]
PROMPTS = [[5, 6, 7], list(range(40)), [5, 6, 7], [9]]
IDS = torch.tensor([[5, 9, 3, 77, 12, 5, 60, 61, 62]])


@torch.no_grad()
def shake(module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if "lora_" in name:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


def adapted(kind: str, targets=EVERY, dtype=torch.float32, **more):
    """A model whose adapters are not zero."""
    shape = ModelConfig(lora_rank=3, lora_alpha=6, target_modules=targets)
    module = add_adapters(tiny(kind, dtype, **more), shape)
    for name, weight in module.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(torch.promote_types(dtype, torch.float32))
    shake(module)
    return module


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def holder(module):
    """The outermost wrapper around the experts of the last layer."""
    return module.get_base_model().model.layers[-1].mlp.experts


def by_experts(wrapper) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of (A, B) of each expert that can be trained, taken from peft's layout number by number."""
    a, b, rank, count = (
        wrapper.lora_A["default"].weight,
        wrapper.lora_B["default"].weight,
        wrapper.r["default"],
        wrapper.num_experts,
    )
    a = torch.stack([a[expert * rank : (expert + 1) * rank] for expert in range(count)])
    b = torch.stack([torch.stack([b[:, k * count + expert] for k in range(rank)], 1) for expert in range(count)])
    return a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()


def as_peft(name: str, grad: torch.Tensor) -> torch.Tensor:
    """What belongs to each expert, as peft lays it out."""
    if "lora_A" in name:
        return grad.flatten(0, 1)
    return torch.stack([grad[expert, :, k] for k in range(grad.shape[2]) for expert in range(len(grad))], 1)


def dense(experts, pairs, x_TE, chosen_TK, share_TK):
    """Experts token by token with W + s B A in full; `pairs` are (A, B) by the name of the weight."""
    out = []
    for token, x_E in enumerate(x_TE):
        row = torch.zeros_like(x_E)
        for place, expert in enumerate(chosen_TK[token].tolist()):
            y = x_E
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(experts, name)[expert]
                weight = weight.T if experts.is_transposed else weight
                if name in pairs:
                    weight = weight + 2.0 * pairs[name][1][expert] @ pairs[name][0][expert]
                y = weight @ y
                if experts.has_bias:
                    y = y + getattr(experts, f"{name}_bias")[expert]
                y = gated(experts, y) if name == "gate_up_proj" else y
            row = row + share_TK[token, place] * y
        out.append(row)
    return torch.stack(out)


def gated(experts, y):
    if not hasattr(experts, "limit"):
        gate, up = y.chunk(2)
        return torch.nn.functional.silu(gate) * up
    gate, up = y[::2].clamp(max=experts.limit), y[1::2].clamp(-experts.limit, experts.limit)
    return (up + 1) * gate * torch.sigmoid(experts.alpha * gate)


@pytest.mark.parametrize("targets", [["experts"], ["experts.gate_up_proj"], ["experts.down_proj"]], ids=str)
@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3"])
def test_outputs_and_gradients_are_those_of_dense_weights_of_each_expert(kind, targets):
    wrapper = holder(adapted(kind, targets, torch.float64))
    layers, experts = AdaptedExperts(wrapper).wrappers, plain_experts(wrapper)
    for name, bias in experts.named_parameters():
        if name.endswith("_bias"):
            torch.nn.init.normal_(bias)
    assert set(layers) == ({"gate_up_proj", "down_proj"} if targets == ["experts"] else {targets[0].split(".")[1]})
    rng = np.random.default_rng(0)
    tokens = 7
    chosen = torch.from_numpy(np.stack([rng.permutation(experts.num_experts)[:2] for _ in range(tokens)]))
    chosen[chosen == 1] = 0 if kind == "mixtral" else 1  # an expert without tokens; another twice for a token
    x, share = (torch.from_numpy(rng.normal(size=size)) for size in ((tokens, 32), (tokens, 2)))
    weight = torch.from_numpy(rng.normal(size=(tokens, 32)))
    x.requires_grad_(), share.requires_grad_()
    pairs = {name: by_experts(layer) for name, layer in layers.items()}
    expected = dense(experts, pairs, x, chosen, share)
    wanted = torch.autograd.grad(
        (expected * weight).sum(), [x, share, *(each for pair in pairs.values() for each in pair)]
    )
    found = wrapper(x, chosen, share)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    own = [(f"lora_{letter}", getattr(layer, f"lora_{letter}")["default"].weight) for layer in layers.values()
           for letter in "AB"]  # fmt: skip
    grads = torch.autograd.grad((found * weight).sum(), [x, share, *(each for _, each in own)])
    for (name, _), ours, theirs in zip([("", None), ("", None), *own], grads, wanted, strict=True):
        torch.testing.assert_close(ours, as_peft(name, theirs) if name else theirs, rtol=0, atol=1e-10)
        assert float(theirs.abs().max()) > 1e-3


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_products_of_a_device_are_compared_with_the_loop_before_they_are_used(monkeypatch, dtype, rank):
    """With torch's grouped products on a CPU in place of a GPU's."""
    calls, plain = [], expert_adapters._grouped
    monkeypatch.setattr(expert_adapters, "_by_loop", lambda x: len(calls) % 4 == 3)  # the second of two computations

    def grouped(x, weight, groups):
        calls.append(weight.shape)
        return plain(x, weight, groups)

    monkeypatch.setattr(expert_adapters, "_grouped", grouped)
    prove = expert_adapters._prove.__wrapped__
    prove(CPU, dtype, rank)
    assert calls == [(4, 128, 64), (4, rank + -rank % 8, 64), (4, 128, rank + -rank % 8)]
    calls.clear()
    wrong = lambda x, weight, groups: grouped(x, weight.roll(1, 0), groups)  # noqa: E731
    monkeypatch.setattr(expert_adapters, "_grouped", wrong)
    with pytest.raises(UserError, match=r"adapters of experts are not computed right on cpu in torch"):
        prove(CPU, dtype, rank)


def test_fresh_adapters_change_nothing_and_only_they_are_trained_in_float32():
    base = tiny("qwen3-moe", torch.bfloat16)
    before = logits(base)
    module = add_adapters(base, ModelConfig(lora_rank=4, lora_alpha=2, target_modules=EVERY))
    assert torch.equal(logits(module), before)
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    assert all("lora_" in name and weight.dtype is torch.float32 for name, weight in trained.items())
    assert sum("experts" in name for name in trained) == 3 * 4
    assert holder(module).scaling["default"] == 0.5
    layers = AdaptedExperts(holder(module)).wrappers
    shapes = {name: [tuple(part.shape) for part in by_experts(layer)] for name, layer in layers.items()}
    assert shapes == {"gate_up_proj": [(4, 4, 32), (4, 48, 4)], "down_proj": [(4, 4, 24), (4, 32, 4)]}


# -- training ---------------------------------------------------------------------------------------------------------
def plain_route(self, hidden_states):
    """A router in the model's own precision: transformers' would round to float32."""
    logits = hidden_states.reshape(-1, self.hidden_dim) @ self.weight.T
    share, chosen = logits.softmax(-1).topk(self.top_k)
    return logits, share, chosen


def plain_norm(self, x):
    return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


@pytest.fixture
def plain_routers(monkeypatch):
    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", plain_route)


LAYOUTS = {
    "shared prompts": {},
    "apart": {"share_prompts": False},
    "three passes": {"token_budget": 60},
    "one row each": {"max_rows": 1},
    "padded": {"pack": False},
    "recomputed": {"gradient_checkpointing": True},
}


def some_rows():
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 97, length).tolist() for length in (6, 6, 12, 9)]
    prompts[1] = prompts[0]
    from posttrain.rollout.base import Output

    outputs = [Output(i, rng.integers(0, 97, 4 + 3 * i).tolist(), [0.0] * (4 + 3 * i), "stop") for i in range(4)]
    batch = to_batch(prompts, outputs, pad_token_id=0)
    batch.non_tensor_batch["uid"] = np.array(["a", "a", "b", "c"], dtype=object)
    mask = batch.batch["response_mask"]
    batch.batch["advantages"] = torch.from_numpy(rng.normal(size=mask.shape)) * mask
    return batch


def weighted(micro, outputs):
    return (outputs["log_probs"] * micro.batch["advantages"] + 0.3 * outputs["entropy"]).sum()


@cache
def reference_gradients():
    """Of all adapters, by an independent model: rows one by one, dense weights, plain float64."""
    ours = adapted("qwen3-moe", ["experts"], torch.float64)
    twin = tiny("qwen3-moe", torch.float64, attention="sdpa")
    for norm in (module for module in twin.modules() if type(module).__name__ == "Qwen3MoeRMSNorm"):
        norm.forward = types.MethodType(plain_norm, norm)
    leaves: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(twin.model.layers):
        held = AdaptedExperts(ours.get_base_model().model.layers[number].mlp.experts).wrappers
        pairs = {name: by_experts(wrapper) for name, wrapper in held.items()}
        experts = layer.mlp.experts
        experts.forward = lambda x, c, s, experts=experts, pairs=pairs: dense(experts, pairs, x, c, s)
        for name, (a, b) in pairs.items():
            inner = "base_layer." if name == "gate_up_proj" else ""
            home = f"base_model.model.model.layers.{number}.mlp.experts.{inner}lora_"
            leaves |= {f"{home}A.default.weight": a, f"{home}B.default.weight": b}
    batch, total = some_rows(), torch.zeros((), dtype=torch.float64)
    width = batch.batch["responses"].shape[1]
    for ids, mask, advantage in zip(
        batch.batch["input_ids"], batch.batch["attention_mask"].bool(), batch.batch["advantages"], strict=True
    ):
        tokens, length = ids[mask], int(mask[-width:].sum())
        logp = (twin(tokens[None]).logits[0] / 0.7).log_softmax(-1)[-length - 1 : -1]
        total = total + (logp.gather(1, tokens[-length:, None])[:, 0] * advantage[:length]).sum()
        total = total - 0.3 * (logp.exp() * logp).sum()
    grads = torch.autograd.grad(total, list(leaves.values()))
    return {name: as_peft(name, grad) for name, grad in zip(leaves, grads, strict=True)}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_are_the_references_however_rows_are_packed(plain_routers, layout):
    reference = reference_gradients()
    module = adapted("qwen3-moe", ["experts"], torch.float64)
    module.get_base_model().forward_mode = ForwardMode(packed=True, padded=True)
    engine = TorchEngine(module, EngineSettings(device=CPU, optim=OptimConfig(lr=1e-3), **layout))
    batch = some_rows()
    assert engine.runner.gradients(batch, weighted, 0.7)
    found = {name: weight.grad for name, weight in module.named_parameters() if weight.requires_grad}
    assert found.keys() == reference.keys()
    for name, grad in found.items():
        assert float((grad - reference[name]).abs().max()) < 1e-10, name
        assert float(grad.abs().max()) > 1e-3


# -- generation -------------------------------------------------------------------------------------------------------
def trainer_log_probs(module, outputs) -> list[torch.Tensor]:
    engine = TorchEngine(module, EngineSettings(device=CPU))
    found = engine.log_probs(to_batch(PROMPTS, outputs, 0))["log_probs"]
    return [row[: len(output.token_ids)] for row, output in zip(found, outputs, strict=True)]


def sampled(engine, tokens: int = 20):
    return generate(engine, PROMPTS, [Sampling(max_tokens=tokens)] * len(PROMPTS), range(len(PROMPTS)))


def furthest(outputs, expected) -> float:
    return max(
        float((torch.tensor(output.log_probs) - row).abs().max()) for output, row in zip(outputs, expected, strict=True)
    )


@pytest.mark.parametrize("kind", [*sorted(MIXTURES), *GENERAL])
def test_rollout_log_probs_equal_the_trainers_by_the_fused_and_the_general_decoder(kind):
    module = adapted(kind, ["experts"])
    engine, name = build_native(module, RolloutConfig(kv_cache_gb=0.05), decode=None)
    assert ("fused decoder" in name) is (kind in MIXTURES) and engine.takes_adapters
    for seed in (1, 2):  # adapters are never stale
        shake(module, seed)
        engine.load_weights((), seed)
        outputs = sampled(engine)
        assert furthest(outputs, trainer_log_probs(module, outputs)) < 1e-5
        with base_only(module):
            assert furthest(outputs, trainer_log_probs(module, outputs)) > 1e-2


def test_hf_generates_with_the_adapters():
    module = adapted("qwen3-moe")
    engine = HFEngine(module, pad_token_id=0, max_num_seqs=4)
    outputs = sampled(engine, 6)
    assert engine.takes_adapters and furthest(outputs, trainer_log_probs(module, outputs)) < 1e-5


def test_routes_are_recorded_with_the_experts_that_the_adapted_layers_choose():
    module = adapted("qwen3-moe")
    config = RolloutConfig(kv_cache_gb=0.05, enable_rollout_routing_replay=True)
    engine, _ = build_native(module, config, decode=None)
    batch = to_batch(PROMPTS, sampled(engine), 0)
    recording = TorchEngine(module, EngineSettings(device=CPU, record_routes=True))
    recording.log_probs(batch.select(None, []))
    for rollout, own in zip(batch.non_tensor_batch["routed_experts"], recording.take_routes(), strict=True):
        assert np.array_equal(np.sort(rollout), np.sort(own))


def test_a_rollout_with_a_copy_of_its_own_gets_the_adapters_alone_and_one_without_adapters_the_merged_weights():
    trained, copy = adapted("qwen2-moe"), adapted("qwen2-moe")
    shake(trained, 5)
    engine, _ = build_native(copy, RolloutConfig(kv_cache_gb=0.05), decode=None)
    trainer = TorchEngine(trained, EngineSettings(device=CPU))
    sent = dict(trainer.export_adapters())
    assert all(".lora_" in name for name in sent) and len(sent) == len(adapter_parameters(copy))
    before = {name: weight.clone() for name, weight in copy.named_parameters() if "lora_" not in name}
    engine.load_weights(sent.items(), 1)
    assert all(torch.equal(weight, before[name]) for name, weight in copy.named_parameters() if name in before)
    whole, _ = build_native(tiny("qwen2-moe"), RolloutConfig(kv_cache_gb=0.05), decode=None, share=False)
    whole.load_weights(trainer.export_weights(), 1)
    for rollout in (engine, whole):
        outputs = sampled(rollout)
        assert furthest(outputs, trainer_log_probs(trained, outputs)) < 1e-5


def test_bfloat16_adapters_stay_beside_the_base():
    module = adapted("qwen3-moe", ["experts"], torch.bfloat16)
    assert all(weight.dtype is torch.float32 for weight in adapter_parameters(module).values())
    engine, _ = build_native(module, RolloutConfig(kv_cache_gb=0.05), decode=None)
    outputs = sampled(engine)
    gaps = [torch.tensor(o.log_probs) - t for o, t in zip(outputs, trainer_log_probs(module, outputs), strict=True)]
    assert torch.cat(gaps).abs().mean() < 0.05


# -- files ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("targets", [EVERY, ["experts"], ["q_proj", "layers.1.mlp.experts.down_proj"]], ids=str)
@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss"])
def test_the_adapter_folder_loads_in_peft_and_here_and_the_merged_one_in_transformers(kind, targets, tmp_path):
    tiny(kind).save_pretrained(tmp_path / "base")
    ours = adapted(kind, targets)
    expected = logits(ours)
    assert float((expected - logits(tiny(kind))).abs().max()) > 0.01
    write_adapter(tmp_path / "adapter", adapter_parameters(ours), adapter_settings(ours, str(tmp_path / "base")))

    def plain(folder: Path):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    theirs = PeftModel.from_pretrained(plain(tmp_path / "base"), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=1e-5)
    stored = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert stored["target_parameters"] == (
        ["model.layers.1.mlp.experts.down_proj"] if "q_proj" in targets else sorted(BOTH)
    )
    shape = ModelConfig(lora_rank=3, lora_alpha=6, lora_adapter_path=str(tmp_path / "adapter"))
    again = with_adapters(tiny(kind), shape)
    assert torch.equal(logits(again), expected)

    save_merged(ours, tmp_path / "merged")
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), expected, rtol=0, atol=1e-5)
    assert torch.equal(logits(ours), expected)  # the live base is what it was
    assert merged_state(ours).keys() == tiny(kind).state_dict().keys()


def test_an_adapter_that_peft_wrote_is_taken_with_its_own_ranks(tmp_path):
    """By the names that experts once had: peft then gives gate and up together twice the rank."""
    theirs = get_peft_model(
        tiny("qwen3-moe"),
        LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]),
    )
    shake(theirs)
    theirs.save_pretrained(str(tmp_path))
    assert not hasattr(vars(holder(theirs)).get("forward"), "__func__")  # peft's own products
    shape = ModelConfig(lora_rank=3, lora_alpha=6, lora_adapter_path=str(tmp_path))
    ours = with_adapters(tiny("qwen3-moe"), shape)
    ranks = {one.parameter_name: one.r["default"] for one in ours.modules() if is_wrapper(one)}
    assert ranks == {"gate_up_proj": 6, "down_proj": 3}
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)


def test_adapters_of_single_experts_are_read_after_peft_has_converted_them(tmp_path):
    """As they were trained while each expert had modules of its own."""
    sizes, draw = {"gate_proj": (24, 32), "up_proj": (24, 32), "down_proj": (32, 24)}, torch.Generator().manual_seed(0)
    stored, whole = {}, tiny("qwen3-moe")
    for layer in range(3):
        experts = whole.model.layers[layer].mlp.experts
        for expert in range(4):
            changes = {}
            for name, (outputs, inputs) in sizes.items():
                home = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}.lora_"
                a, b = (torch.randn(size, generator=draw) / 10 for size in ((3, inputs), (outputs, 3)))
                stored |= {f"{home}A.weight": a, f"{home}B.weight": b}
                changes[name] = 2 * b @ a
            with torch.no_grad():
                experts.gate_up_proj[expert] += torch.cat([changes["gate_proj"], changes["up_proj"]])
                experts.down_proj[expert] += changes["down_proj"]
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": [*sizes], "task_type": "CAUSAL_LM"}
    write_adapter(tmp_path, stored, settings)
    shape = ModelConfig(lora_rank=3, lora_alpha=6, lora_adapter_path=str(tmp_path))
    with pytest.raises(AdapterError, match=r"holds the adapter of each expert by itself.*PeftModel\.from_pretrained"):
        with_adapters(tiny("qwen3-moe"), shape)
    PeftModel.from_pretrained(tiny("qwen3-moe"), str(tmp_path)).save_pretrained(str(tmp_path / "new"))
    shape = ModelConfig(lora_rank=3, lora_alpha=6, lora_adapter_path=str(tmp_path / "new"))
    again = with_adapters(tiny("qwen3-moe"), shape)
    torch.testing.assert_close(logits(again), logits(whole), rtol=0, atol=1e-5)


def test_an_adapter_of_other_parameters_is_rejected(tmp_path):
    theirs = get_peft_model(tiny("qwen3-moe"), LoraConfig(r=3, target_modules=[], target_parameters=["gate.weight"]))
    theirs.save_pretrained(str(tmp_path))
    with pytest.raises(AdapterError, match=r"gate\.weight is no weight of this model that stacks experts"):
        with_adapters(tiny("qwen3-moe"), ModelConfig(lora_rank=3, lora_adapter_path=str(tmp_path)))


# -- targets ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("targets", "exclude", "modules", "parameters"),
    [
        ("all-linear", None, ATTENTION, []),
        (EVERY, None, ATTENTION, BOTH),
        (["q_proj", "gate_up_proj", "down_proj"], None, ["q_proj"], BOTH),
        (["gate_proj", "up_proj", "down_proj"], None, [], BOTH),
        (["w1", "w2", "w3"], None, [], BOTH),
        (["experts.gate_proj", "experts.up_proj"], None, [], BOTH[1:]),
        ("mlp.experts.down_proj", None, [], BOTH[:1]),
        (r".*\.(q|gate|up|down)_proj", None, ["q_proj"], BOTH),
        (r".*layers\.1\.mlp\.experts", None, [],
         ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]),
        (EVERY, ["down_proj"], ATTENTION, BOTH[1:]),
        (EVERY, ["experts"], ATTENTION, []),
    ],
    ids=str,
)  # fmt: skip
def test_exactly_the_experts_that_are_meant_have_adapters(targets, exclude, modules, parameters):
    found = find_targets(tiny("qwen3-moe"), targets, exclude)
    assert (sorted(found.modules), found.parameters) == (modules, parameters)


@pytest.mark.parametrize(
    ("kind", "targets", "words"),
    [
        ("qwen3-moe", ["gate_proj", "q_proj"], r"gate_proj of the experts lies in one tensor .* name both halves"),
        ("qwen3-moe", ["gate"], r"gate is of the kind Qwen3MoeTopKRouter; adapters stand beside linear modules and"),
        ("qwen3-moe", ["w4"], r"called w4\. .*full names look like .*Its experts: model\.layers\.N\.mlp\.experts"),
        ("glm4-moe", ["gate_proj"], r"peft puts adapters of this name on the stacked experts.*leave out gate_proj"),
        ("glm4-moe", ["layers.0.mlp.down_proj"], r"leave out down_proj, or name experts instead"),
        ("qwen2", ["experts"], r"no linear module of the model is called experts"),
    ],
)
def test_names_that_mean_no_adapters_are_rejected_in_words(kind, targets, words):
    with pytest.raises(AdapterError, match=words):
        find_targets(tiny(kind), targets)


def test_one_name_means_shared_and_stacked_experts_where_peft_can_tell_them_apart():
    both = find_targets(tiny("qwen2-moe"), ["down_proj"])
    assert (both.modules, both.parameters) == (["down_proj"], BOTH[:1])
    experts = find_targets(tiny("glm4-moe"), ["gate_proj", "up_proj", "down_proj", "o_proj"])
    assert (experts.modules, experts.parameters) == (["o_proj"], BOTH)


def test_a_rank_above_the_widest_matrix_of_the_experts_is_rejected():
    shape = ModelConfig(lora_rank=49, target_modules=["gate_up_proj"])
    with pytest.raises(AdapterError, match="the widest layer that would get an adapter has 48 columns"):
        add_adapters(tiny("qwen3-moe"), shape)
    add_adapters(tiny("qwen3-moe"), ModelConfig(lora_rank=48, target_modules=["gate_up_proj"]))


# -- notes, memory, and what is not built -------------------------------------------------------------------------
def test_notes_count_the_adapters_and_warn_where_they_are_large():
    shape = ModelConfig(lora_rank=4, target_modules=EVERY)
    small = add_adapters(tiny("qwen3-moe", vocab_size=20000), shape)
    assert len(adapter_notes(facts_of(small, packed=True), shape)) == 1
    module = add_adapters(tiny("qwen3-moe"), shape)
    counted = sum(w.numel() for name, w in module.named_parameters() if "lora_" in name and "experts" in name)
    trained = sum(w.numel() for w in module.parameters() if w.requires_grad)
    base = sum(w.numel() for name, w in module.named_parameters() if "lora_" not in name)
    assert counted == 3 * 4 * 4 * ((32 + 48) + (24 + 32))
    about, large = adapter_notes(facts_of(module, packed=True), shape)
    assert f"{counted / 1e6:,.3g} million numbers, {counted / base:.1%} of the base" in about
    assert "for 4 experts of each layer" in about and "get none" not in about
    assert f"model.lora_rank: the adapters have {trained / base:.0%} of the base's numbers" in large
    left = facts_of(add_adapters(tiny("glm4-moe"), shape), packed=True)
    assert "gate_proj, up_proj, down_proj of other layers" in adapter_notes(left, shape)[0]


def test_memory_is_counted_with_the_adapters_of_experts():
    def trained(targets) -> ModelBytes:
        with META:
            model = tiny_on_meta()
        return ModelBytes.of(add_adapters(model, ModelConfig(lora_rank=2, target_modules=targets)))

    plain, whole = trained("all-linear"), trained(EVERY)
    assert whole.gradients - plain.gradients == 4 * 3 * 4 * 2 * ((32 + 48) + (24 + 32))
    assert whole.optimizer - plain.optimizer == 2 * (whole.gradients - plain.gradients)
    assert whole.weights - plain.weights == whole.gradients - plain.gradients


def tiny_on_meta():
    config = tiny("qwen3-moe").config
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_a_peft_that_lays_adapters_out_the_other_way_round_is_rejected(monkeypatch):
    from peft.tuners.lora.layer import ParamWrapper

    built = ParamWrapper.__init__

    def older(self, *args, **named):
        built(self, *args, **named)
        del self._did_swap_in_out_features

    monkeypatch.setattr(ParamWrapper, "__init__", older)
    with pytest.raises(AdapterError, match=r"adapters of experts need a newer peft than \d"):
        adapted("qwen3-moe", ["experts"])
    adapted("qwen3-moe", ["q_proj"])


def test_bases_and_engines_that_cannot_have_them_say_so():
    module = tiny("qwen3-moe")
    next(module.parameters()).held_bytes = 1  # as a plan marks a base of 4 bits
    with pytest.raises(AdapterError, match=r"adapters of experts are not built beside a base of 4 bits"):
        add_adapters(module, ModelConfig(lora_rank=2, target_modules=["experts"]))
    module = adapted("qwen3-moe")
    with pytest.raises(UserError, match=r"actor\.quantization=fp8: models of the kind qwen3_moe have no fused"):
        check_fp8_base(module, CPU)
    with pytest.raises(UserError, match=r"rollout\.quantization=fp8: it is not built for experts with adapters"):
        build_native(module, RolloutConfig(kv_cache_gb=0.05), decode=None, fp8=True)
    with pytest.raises(UserError, match=r"model\.target_modules: adapters on .*layers\.0\.mlp\.experts\.down_proj"):
        check_adapters([], {n: s for n, s in scalings_of(module).items() if "experts" in n}, RL)

"""Training passes whose frozen base is in fp8: against transformers' layers over rounded weights and inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from posttrain.config.model import ModelConfig
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.errors import UserError
from posttrain.kernels.fp8 import Fp8Weight
from posttrain.kernels.packed_attention import PackedLayout, packed_rows
from posttrain.models import fused_layer
from posttrain.models.forward import hidden_states
from posttrain.models.fused_layer import fuse_layers, join_weights
from posttrain.models.layer_weights import Fp8Base
from posttrain.models.loading import fuse_and_prove
from posttrain.models.lora import add_adapters, base_only
from tests.engine.engine_tools import gradient, objective, ragged_batch
from tests.machine import has_compiler
from tests.rollout.tiny import tiny

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")
LENGTHS = [37, 5, 26]
PLACES = torch.cat([torch.arange(length) for length in LENGTHS])[None]


def adapted(kind, targets="all-linear", **sizes):
    """Adapters whose B is not zero: otherwise A has no gradient."""
    model = tiny(kind, **sizes)
    fuse_layers(model)
    model = add_adapters(model, ModelConfig(lora_rank=4, lora_alpha=8, target_modules=targets))
    generator = torch.Generator().manual_seed(4)
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    return model


def fp8(x):
    """Written out: every row divided by its largest number over 448, as e4m3, and multiplied again."""
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(weight)
        return torch.nn.functional.linear(fp8(x), fp8(weight), bias)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        scale = weight.abs().amax(-1) / 448
        return (fp8(grad * scale) / scale) @ fp8(weight), None, None


class Together:
    """Linear layers with the same input as one `RoundedLinear`, computed when the first of them is called."""

    def __init__(self, parts):
        self.parts = [getattr(part, "base_layer", part) for part in parts]
        self.weight = torch.cat([part.weight.detach() for part in self.parts])
        biases = [part.bias for part in self.parts]
        self.bias = None if biases[0] is None else torch.cat(biases).detach()
        for number, part in enumerate(self.parts):
            part.forward = lambda x, number=number: self(x, number)

    def __call__(self, x, number):
        if number == 0:
            whole = RoundedLinear.apply(x, self.weight, self.bias)
            self.made = whole.split([part.out_features for part in self.parts], -1)
        return self.made[number]


def round_base(model):
    """A copy whose linear layers below the head round, beside adapters by peft."""
    model = copy.deepcopy(model)
    for layer in model.get_base_model().model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for parts in (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        ):
            Together(parts)
    return model


def passes(model, base=None, wanted=None):
    """(hidden states, gradients of adapters in one vector)."""
    place, ids = PackedLayout(LENGTHS), torch.randint(0, 97, PLACES.shape, generator=torch.Generator().manual_seed(1))
    place.fp8 = base
    place.wanted_T = wanted if base else None
    model.zero_grad()
    with packed_rows(place):
        hidden = hidden_states(model, ids, PLACES)[0]
        hidden = hidden[wanted] if wanted is not None and not base else hidden
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all("lora_" in name for name in grads)
    return hidden.detach(), torch.cat([grad.flatten() for grad in grads.values()])


def apart(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@needs_compiler
@pytest.mark.parametrize("end_to_end", [False, True], ids=["apart", "end to end"])
@pytest.mark.parametrize("wanted", [None, torch.tensor([0, 6, 7, 36, 37, 50])], ids=["all", "some tokens"])
@pytest.mark.parametrize(("kind", "targets"), [("qwen2", "all-linear"), ("qwen3", ["o_proj", "up_proj"])])
def test_values_and_gradients_of_adapters_are_those_of_rounded_numbers(kind, targets, wanted, end_to_end, monkeypatch):
    """In one layer, where hardly a number lies so near the edge between two roundings that it falls to the other."""
    model = adapted(kind, targets, num_hidden_layers=1)
    if end_to_end:
        join_weights(model)
    found = passes(model, Fp8Base(), wanted)
    plain = passes(model, None, wanted)
    monkeypatch.setattr(fused_layer, "_can_fuse", lambda *args: False)
    rounded = passes(round_base(model), None, wanted)
    for ours, expected, unrounded in zip(found, rounded, plain, strict=True):
        assert apart(ours, expected) < 0.02 * apart(unrounded, expected), "values, then gradients"
        assert 0.01 < apart(ours, unrounded) < 0.3


@needs_compiler
def test_without_adapters_the_pass_is_that_of_the_rounded_base():
    model = adapted("qwen2")
    base = Fp8Base()
    with base_only(model):
        found = hidden_of(model, base)
    fresh = tiny("qwen2")
    fuse_layers(fresh)
    torch.testing.assert_close(found, hidden_of(fresh, Fp8Base()), rtol=0, atol=1e-6)
    assert apart(found, hidden_of(fresh, None)) > 0.01


@torch.no_grad()
def hidden_of(model, base):
    place = PackedLayout(LENGTHS)
    place.fp8 = base
    with packed_rows(place):
        return hidden_states(model, torch.arange(PLACES.numel())[None] % 97, PLACES)[0]


@needs_compiler
def test_copies_are_made_once_and_are_those_of_a_rollout_over_the_same_weights(monkeypatch):
    model, base, filled = adapted("qwen2"), Fp8Base(), []
    join_weights(model)
    refill = Fp8Weight.refill
    monkeypatch.setattr(Fp8Weight, "refill", lambda self: filled.append(self) or refill(self))
    first = hidden_of(model, base)
    assert len(filled) == 4 * 3, "four products in each of three layers"
    assert torch.equal(hidden_of(model, base), first) and len(filled) == 4 * 3
    layer = model.get_base_model().model.layers[0]
    down = layer.mlp.down_proj.base_layer.weight.data
    assert Fp8Weight.of(down) is filled[3] and Fp8Weight.of(down.clone()) is not filled[3]


def engine_of(model, **settings):
    optim = OptimConfig(lr=1e-3)
    given: dict[str, Any] = {"device": torch.device("cpu"), "optim": optim, "grad_clip": 1e9, "fp8": True} | settings
    return TorchEngine(model, EngineSettings(**given))


@needs_compiler
def test_an_engine_rounds_log_probs_and_gradients_and_its_model_stays_as_it_is():
    batch = ragged_batch(dtype=torch.float32, prompts=5)
    module = proved()
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    found = {}
    for name, on in {"plain": False, "fp8": True}.items():
        engine = engine_of(copy.deepcopy(module), fp8=on)
        found[name] = (engine.log_probs(batch)["log_probs"], gradient(engine, batch, objective()))
        assert engine.facts().rounding is (torch.float8_e4m3fn if on else None)
        weights = dict(engine.module.named_parameters())
        assert all(torch.equal(weights[key], value) for key, value in before.items())
    assert 1e-3 < apart(found["fp8"][0], found["plain"][0]) < 0.1
    assert 1e-3 < apart(found["fp8"][1], found["plain"][1]) < 0.5


@needs_compiler
@pytest.mark.parametrize(
    "layout",
    [
        {"share_prompts": False, "max_rows": 3},
        {"share_prompts": False, "token_budget": 60},
        {"token_budget": 60},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_no_split_changes_the_gradient(layout):
    """A token's scales depend on no other token."""
    batch, module = ragged_batch(dtype=torch.float32, prompts=5), proved()
    shared = layout.get("share_prompts", True)
    whole = gradient(engine_of(copy.deepcopy(module), share_prompts=shared), batch, objective())
    part = gradient(engine_of(copy.deepcopy(module), **layout), batch, objective())
    assert apart(part, whole) < 1e-5


@needs_compiler
def test_sharing_prompts_moves_only_numbers_at_the_edge_between_two_roundings():
    """Attention then adds in another order: a number that rounds to the other side moves the rest of its token."""
    batch, module = ragged_batch(dtype=torch.float32, prompts=5), proved()
    shared, alone, plain = (
        gradient(engine_of(copy.deepcopy(module), **how), batch, objective())
        for how in ({}, {"share_prompts": False}, {"fp8": False})
    )
    assert apart(alone, shared) < 0.5 * apart(plain, shared)


class Linear:
    """The advantages' product with the log-probs."""

    def prepare(self, batch):
        return batch

    def __call__(self, rows, outputs):
        return (outputs["log_probs"] * rows.batch["advantages"] * rows.batch["response_mask"]).sum() / 50


LINEAR: Any = Linear()


def proved(kind="qwen2", **more):
    model = fuse_and_prove(tiny(kind, vocab_size=261, initializer_range=0.05, **more), "tiny")
    mode = model.forward_mode
    model = add_adapters(model, ModelConfig(lora_rank=4, lora_alpha=8))
    assert mode.packed
    for number, (name, weight) in enumerate(model.named_parameters()):
        if ".lora_B." in name:
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)) * 0.1
    return model


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("qwen2", lambda model: model.double(), "cpu has no fused training pass for torch.float64"),
        ("gpt2", lambda model: model, "models of the kind gpt2 have no fused training pass"),
    ],
)
def test_models_without_the_fused_pass_are_rejected_when_the_engine_is_made(kind, change, words):
    model = change(fuse_and_prove(tiny(kind), "tiny"))
    with pytest.raises(UserError, match=f"actor.quantization=fp8: {words}"):
        engine_of(model)


def test_a_sharded_model_is_rejected():
    from posttrain.models.layer_weights import check_fp8_base

    with pytest.raises(UserError, match="sharded over ranks"):
        check_fp8_base(proved(), torch.device("cpu"), sharded=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_on_a_cuda_device_log_probs_and_gradients_are_those_of_the_emulation(kind):
    """The same weights in bfloat16 there and in float32 here: both round to fp8, and agree better than without it.

    bfloat16 moves some numbers across the edge between two fp8 values, and each of those moves the rest of its token.
    If the two roundings had nothing in common, they would be sqrt(2) times as far apart as one is from the pass without
    fp8. With every result of a layer's kernels rounded to bfloat16 on a CPU, it is 0.57 to 0.79 times as far, for both
    kinds and three batches. The loss is linear in log-probs: with clips, and a KL's exponentials, one token's gradient
    can jump by more than all of this (0.2 to 2.4 times as far, in the same emulation).
    """
    batch, module = ragged_batch(dtype=torch.float32, prompts=5), proved(kind, hidden_size=64, intermediate_size=128)
    for weight in module.parameters():
        weight.data = weight.data.bfloat16().float()
    found = {}
    for name, how in {"fp8": {}, "plain": {"fp8": False}}.items():
        engine = engine_of(copy.deepcopy(module), **how)
        found[name] = engine.log_probs(batch)["log_probs"], gradient(engine, batch, LINEAR)
    on_cuda = copy.deepcopy(module).cuda()
    for name, weight in on_cuda.named_parameters():
        weight.data = weight.data if "lora_" in name else weight.data.bfloat16()
    engine = engine_of(on_cuda, device=torch.device("cuda"))
    ours = engine.log_probs(batch)["log_probs"], gradient(engine, batch, LINEAR)
    for there, here, plain in zip(ours, found["fp8"], found["plain"], strict=True):
        assert apart(there.cpu().float(), here) < apart(plain, here)

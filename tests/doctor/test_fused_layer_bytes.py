"""The formulas of plans for CUDA against the same code on the meta device, counted in float32 to the byte."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from posttrain.config.model import ModelConfig
from posttrain.kernels import logprob_head
from posttrain.kernels.packed_attention import PackedLayout, packed_rows
from posttrain.models.forward import hidden_states
from posttrain.models.fused_layer import fuse_layers, fuse_norms
from posttrain.models.lora import with_adapters
from posttrain.planning import cuda_bytes
from posttrain.planning.counting import LiveBytes, saved_bytes
from posttrain.planning.meta_models import META
from tests.machine import has_compiler

FAMILIES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
SHAPE = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2}
SHAPE |= {"head_dim": 16, "vocab_size": 100, "tie_word_embeddings": True}

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")


def meta_model(family: str, layers: int, rank: int = 0):
    settings, kind = FAMILIES[family]
    with META:
        model = kind(settings(**SHAPE, num_hidden_layers=layers))  # pyright: ignore
    fuse_norms(model)
    fuse_layers(model)
    if rank:
        model = with_adapters(model, ModelConfig(lora_rank=rank, target_modules="all-linear"))
    return model.eval()


def sizes(family: str, layers: int, rank: int = 0) -> cuda_bytes.Sizes:
    """As a plan reads them from a model in half precision, but for its numbers of four bytes."""
    with META:
        settings, kind = FAMILIES[family]
        model = kind(settings(**SHAPE, num_hidden_layers=layers)).to(torch.bfloat16)  # pyright: ignore
    if rank:
        model = with_adapters(model, ModelConfig(lora_rank=rank, target_modules="all-linear"))
    found = cuda_bytes.sizes_of(model)
    assert found is not None
    return replace(found, itemsize=4)


def passes(model, rows: int, wanted: float) -> tuple[int, int]:
    """(bytes saved by the layers, most alive in their backward pass beyond all that is alive before it)."""
    tokens = rows * 50
    layout = PackedLayout([50] * rows, wanted_T=torch.empty(int(tokens * wanted), dtype=torch.long, device=META))
    ids = torch.zeros(1, tokens, dtype=torch.long, device=META)
    with packed_rows(layout), LiveBytes(model) as live:
        saved, hidden = saved_bytes(model, lambda: hidden_states(model, ids, ids, torch.ones_like(ids)))
        assert layout.answered == model.config.num_hidden_layers, "every layer is the fused one"
        before = live.now
        live.peak = live.now
        hidden.backward(torch.empty_like(hidden))
        peak = live.peak
    return saved, peak - before


@pytest.mark.parametrize(("family", "rank"), [("qwen2", 0), ("qwen3", 0), ("qwen2", 4)])
def test_a_layer_keeps_for_its_backward_pass_what_the_formula_says_to_the_byte(family, rank):
    two, three = (passes(meta_model(family, layers, rank), 4, 1.0)[0] for layers in (2, 3))
    assert three - two == 200 * sizes(family, 3, rank).kept


@pytest.mark.parametrize("wanted", [1.0, 0.5])
def test_a_backward_pass_makes_what_the_formula_says_within_a_percent(wanted):
    """By the growth with the tokens: gradients of weights do not grow."""
    few, many = (passes(meta_model("qwen2", 3), rows, wanted)[1] for rows in (40, 80))
    found = sizes("qwen2", 3)
    of_flash = 6 * 16 * (4 + 2 * 4)  # its own tensors are not there on a CPU
    assert (many - few) / 2000 == pytest.approx(found.going_back(wanted) - of_flash, rel=0.01)


def head_on_meta(monkeypatch, keep: bool, chunks: int) -> tuple[int, int]:
    """(most alive in the CUDA head's forward pass, and in both) with kernels that only make their tensors."""
    kernels = types.ModuleType("posttrain.kernels.cuda.logprob")
    kernels.statistics = lambda logits, labels, temperature: tuple(logits.new_empty(len(logits)) for _ in range(3))  # pyright: ignore
    kernels.gradient = lambda logits, columns, temperature, dtype: torch.empty_like(logits, dtype=dtype)  # pyright: ignore
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(logprob_head, "_may_keep", lambda chunks, weight: len(chunks) if keep else 0)
    monkeypatch.setattr(logprob_head.cuda, "runs_here", lambda tensor: True)
    monkeypatch.setattr(logprob_head, "_chunks", lambda tokens, vocabulary, device: parts)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(1000, 8, device=META))
    model.weight.gradient_sum = torch.empty(1000, 8, device=META)  # pyright: ignore
    hidden, labels = torch.empty(600, 8, device=META, requires_grad=True), torch.empty(600, device=META).long()
    size = 600 // chunks
    parts = [slice(start, start + size) for start in range(0, 600, size)]
    with LiveBytes(model) as live:
        logp, entropy = logprob_head.logprob_head(hidden, model.weight, labels)  # pyright: ignore
        forward = live.peak
        if not torch.is_grad_enabled():
            return forward, live.now
        (logp.sum() + entropy.sum()).backward()
    return forward, live.peak


def test_the_heads_chunks_are_there_one_at_a_time_with_the_gradient_of_one(monkeypatch):
    logits, little = 600 * 1000 * 4, 600 * 8 * 4 * 5  # columns of a number for each token, and the hidden states'
    forward, both = head_on_meta(monkeypatch, keep=False, chunks=6)
    assert forward <= logits / 6 + little and both <= 2 * logits / 6 + little
    with torch.no_grad():  # nobody waits for a backward pass, though the weights could have a gradient
        forward, left = head_on_meta(monkeypatch, keep=True, chunks=6)
    assert forward <= logits / 6 + little and left <= little
    forward, both = head_on_meta(monkeypatch, keep=True, chunks=6)
    assert logits <= forward <= logits + little and both <= logits + logits / 6 + little

"""Families of transformers' models with tiny random weights give what plain transformers gives, or are refused."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from posttrain.config.model import ModelConfig
from posttrain.models import attention, proof
from posttrain.models.forward import forward_mode_of
from posttrain.models.loading import load_causal_lm

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def check():
    """scripts/check_model_families.py, which makes the table in the docs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("check_model_families")


@pytest.fixture(scope="module")
def families(check):
    return importlib.import_module("tiny_families")


def load(families, kind: str, folder: Path, **config):
    families.write_tiny(kind, folder, **config)
    return load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float32, device=CPU)


# One of each sort: experts in the fused decoder (with one for all tokens beside them; with a norm over all heads),
# windows, latent attention, learned positions, attention of its own, chosen when it is made, with a window that the
# interface does not know, with sinks, with capped scores, none at all, recurrence of its own beside attention; states
# in transformers' cache beside attention, in all layers, with single tokens only, and beside latents.
KINDS = {
    "qwen2_moe": ("right", "packed"),
    "olmoe": ("right", "packed"),
    "gemma3_text": ("right", "packed"),
    "deepseek_v3": ("right", "packed"),
    "opt": ("right", "packed"),
    "bloom": ("right by fallback", "padded"),
    "codegen": ("right by fallback", "padded"),
    "falcon": ("right by fallback", "padded"),
    "gpt_neo": ("right by fallback", "padded"),
    "gpt_oss": ("right", "packed"),
    "gemma2": ("right", "packed"),
    "rwkv": ("right by fallback", "padded"),
    "recurrent_gemma": ("right by fallback", "padded"),
    "qwen3_next": ("right", "packed"),
    "qwen3_5_text": ("right", "packed"),
    "mamba2": ("right", "packed"),
    "mamba": ("right", "packed"),
    "kimi_linear": ("right", "packed"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_training_and_losses_are_those_of_plain_transformers(kind, check, tmp_path):
    result = check.check_family(kind, tmp_path)
    assert {name: gap for name, gap in result.gaps.items() if gap > 1e-4} == {}
    assert len(result.gaps) == 8 and (result.verdict, result.rows) == KINDS[kind]


def test_a_model_whose_tokens_see_later_ones_is_refused(families, tmp_path):
    with pytest.raises(proof.ProofError, match=r"model.path=.*\(bert\) tokens see those that come after them"):
        load(families, "bert", tmp_path)


def test_attention_that_never_asks_is_not_packed_even_where_it_hardly_counts(families, tmp_path):
    """Fresh from its initialisation a model's log-probs hardly depend on attention, so that numbers would not tell."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(families.tiny_config("gptj")).save_pretrained(tmp_path)
    forward_mode = forward_mode_of(load_causal_lm(ModelConfig(path=str(tmp_path)), dtype=torch.float32, device=CPU))
    assert not forward_mode.packed and forward_mode.padded and "gptj" in (forward_mode.note or "")


def test_windows_are_proved_on_rows_that_are_shorter_than_they(families, tmp_path, monkeypatch):
    kept = attention.stretch_attention
    monkeypatch.setattr(
        attention, "stretch_attention", lambda *args, sliding_window=None, **named: kept(*args, **named)
    )
    monkeypatch.setitem(families.SHAPE, "sliding_window", 4096)
    model = load(families, "starcoder2", tmp_path)
    assert model.config.sliding_window == 4096 and not forward_mode_of(model).packed
    monkeypatch.undo()
    assert forward_mode_of(load(families, "starcoder2", tmp_path / "again")).packed


def test_a_row_that_sees_its_neighbour_is_not_packed(families, tmp_path, monkeypatch):
    kept = proof.PackedLayout
    monkeypatch.setattr(
        proof,
        "PackedLayout",
        lambda lengths, *args, **named: kept([sum(lengths)], *args, position_T=named["position_T"]),
    )
    forward_mode = forward_mode_of(load(families, "qwen2", tmp_path))
    assert (forward_mode.packed, forward_mode.padded, forward_mode.split_head) == (False, True, True)
    assert "padded rows" in (forward_mode.note or "")


def test_padding_that_changes_a_row_sends_rows_one_by_one(families, tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "PACKABLE", set())
    monkeypatch.setattr(proof, "padding", _padding_on_the_left)
    forward_mode = forward_mode_of(load(families, "rwkv", tmp_path))
    assert (forward_mode.packed, forward_mode.padded) == (False, False) and "one row at a time" in (
        forward_mode.note or ""
    )


def _padding_on_the_left(rows, device):
    width = max(map(len, rows))
    return torch.tensor([[*[5] * (width - len(row)), *row] for row in rows]), None


def test_a_head_that_changes_logits_in_its_own_way_is_called_whole(check, families, tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.models.forward._logit_changes", lambda model: (None, 1.0))
    model = load(families, "cohere", tmp_path)  # it multiplies its logits by 1/16
    assert (forward_mode_of(model).packed, forward_mode_of(model).padded, forward_mode_of(model).split_head) == (
        False,
        True,
        False,
    )
    plain = type(model).from_pretrained(tmp_path).eval()
    batch = check._batch(plain)
    engine = check.TorchEngine(model, check.EngineSettings(CPU))
    found = engine.log_probs(batch, temperature=check.TEMPERATURE)["log_probs"]
    torch.testing.assert_close(found, batch.batch["plain_log_probs"], atol=1e-5, rtol=0)

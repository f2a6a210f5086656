"""Packed passes that are wrong are rejected by the proof of a loaded model, in half precision too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from posttrain.config.model import ModelConfig
from posttrain.models import attention, proof
from posttrain.models.forward import forward_mode_of
from posttrain.models.loading import load_causal_lm

CPU = torch.device("cpu")
SEEDS = {torch.float32: (0,), torch.bfloat16: (0, 1, 2, 3, 4, 5)}  # of weights


@pytest.fixture(scope="module")
def families():
    path = Path(__file__).resolve().parents[2] / "scripts" / "tiny_families.py"
    spec = importlib.util.spec_from_file_location("tiny_families_of_wrong_passes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packs(families, kind: str, dtype: torch.dtype, folder: Path) -> list[bool]:
    """Whether models with these weights are trained packed."""
    found = []
    for seed in SEEDS[dtype]:
        path = families.write_tiny(kind, folder / f"{kind} {seed}", seed)
        model = load_causal_lm(ModelConfig(path=str(path)), dtype=dtype, device=CPU)
        found.append(forward_mode_of(model).packed)
    return found


def without(monkeypatch, name: str) -> None:
    kept = attention.stretch_attention

    def attend(*args, **named):
        return kept(*args, **{key: value for key, value in named.items() if key != name})

    monkeypatch.setattr(attention, "stretch_attention", attend)


def one_row(monkeypatch) -> None:
    kept = proof.PackedLayout
    monkeypatch.setattr(
        proof, "PackedLayout", lambda lengths, *args, end_T, **named: kept([sum(lengths)], *args, **named)
    )


def seen_siblings(monkeypatch) -> None:
    kept = proof.PackedLayout
    monkeypatch.setattr(proof, "PackedLayout", lambda *args, end_T, **named: kept(*args, **named))


def places_for_positions(monkeypatch) -> None:
    kept = proof.checked_hidden
    monkeypatch.setattr(
        proof,
        "checked_hidden",
        lambda model, ids_T, position_T, layout: kept(model, ids_T, torch.arange(len(ids_T)), layout),
    )


WRONG = {
    "window": ("starcoder2", lambda monkeypatch: without(monkeypatch, "sliding_window")),
    "sinks": ("gpt_oss", lambda monkeypatch: without(monkeypatch, "changes")),
    "neighbours": ("starcoder2", one_row),
    "siblings": ("starcoder2", seen_siblings),
    "positions": ("starcoder2", places_for_positions),
    "learned positions": ("gpt2", places_for_positions),
}


@pytest.mark.parametrize("dtype", SEEDS, ids=str)
@pytest.mark.parametrize("kind", sorted({kind for kind, _ in WRONG.values()}))
def test_the_right_pass_is_packed(families, kind, dtype, tmp_path):
    assert all(packs(families, kind, dtype, tmp_path))


@pytest.mark.parametrize(
    "dtype", [pytest.param(one, marks=[pytest.mark.slow] * (one is torch.bfloat16)) for one in SEEDS], ids=str
)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_pass_is_not_packed(families, wrong, dtype, tmp_path, monkeypatch):
    kind, plant = WRONG[wrong]
    plant(monkeypatch)
    assert not any(packs(families, kind, dtype, tmp_path))


def test_missing_score_caps_are_found(families, tmp_path, monkeypatch):
    """In half precision a cap of 50 is within rounding of small scores, and changes nothing."""
    without(monkeypatch, "changes")
    assert packs(families, "gemma2", torch.float32, tmp_path) == [False]

"""Reward models and a batch of the policy's responses, made once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sft"))
from reward_models import other_tokenizer, write_reward_model


@pytest.fixture(scope="session")
def rm_same(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with the policy's tokenizer and template."""
    return write_reward_model(tmp_path_factory.mktemp("rm") / "same")


@pytest.fixture(scope="session")
def rm_other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a tokenizer and a template of its own."""
    return write_reward_model(tmp_path_factory.mktemp("rm") / "other", tokenizer=other_tokenizer())

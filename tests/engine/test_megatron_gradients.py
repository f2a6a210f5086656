"""Gradients that Megatron's ranks must add up: a small part of `test_megatron.py`, which takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_cases import GRADIENTS
from test_ranks import furthest

pytestmark = pytest.mark.slow


def test_copies_of_a_model_and_both_ends_of_a_pipeline_add_up_their_gradients(tmp_path, forked):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("megatron_runs.py")
    ran = subprocess.run(
        [forked.python, str(script), str(tmp_path), "gradients"], env=env, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    for model in ("qwen3", "qwen2"):
        one, two = (
            torch.load(tmp_path / f"{name} {cut} {ranks}.pt", weights_only=True)
            for name, cut, ranks in GRADIENTS
            if name == model
        )
        assert furthest(one, two) < 1e-9

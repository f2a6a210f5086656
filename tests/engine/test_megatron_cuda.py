"""Megatron's engine on a CUDA device gives what the torch engine gives there (one rank of `megatron_runs.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import CASES, FSDP
from test_megatron import both, bound, named, named_file
from test_ranks import furthest

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
ONE_RANK = [case for case in CASES if case[1] != FSDP and case[2] == 1]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("megatron")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-W", "ignore", str(HERE / "megatron_runs.py"), str(folder), "cuda"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return {file.stem: torch.load(file, weights_only=True, map_location="cpu") for file in folder.glob("*.pt")}


@pytest.mark.parametrize("case", ONE_RANK, ids=named)
@pytest.mark.parametrize("check", ["scores", "updates"])
def test_log_probs_losses_gradients_and_weights_are_those_of_the_torch_engine(found, case, check):
    assert furthest(*both(found, case, check)) < bound(case, check)


@pytest.mark.parametrize("case", ONE_RANK, ids=named)
def test_a_resumed_run_is_bitwise_identical_and_its_export_is_the_model(found, case):
    ran = found[named_file(case)]
    assert ran["resumed"] == {"same": 1.0} and ran["exported"] == {"same": 1.0}

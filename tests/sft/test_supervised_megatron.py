"""SFT and reward models trained by Megatron-Core's engine give what torch's engine gives (float64).

The processes run once (`megatron_supervised_runs.py`) and all tests read what they found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
KINDS = ("sft", "pairs")


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("megatron")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(HERE / "megatron_supervised_runs.py"), str(made), str(tiny_model)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return made


def read(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", ["one", "tensor", "pipeline", "data"])
def test_losses_gradients_and_weights_are_those_of_the_torch_engine(folder, kind, cut):
    plain, found = read(folder, f"{kind} torch"), read(folder, f"{kind} {cut}")
    assert found["losses"] == pytest.approx(plain["losses"], abs=1e-9)
    assert found["norms"] == pytest.approx(plain["norms"], abs=1e-9) and min(plain["norms"]) > 0
    assert found["weights"].keys() == plain["weights"].keys()
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_folder_is_the_model(folder, kind):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    loader = AutoModelForCausalLM if kind == "sft" else AutoModelForSequenceClassification
    for cut in ("one", "tensor"):
        loaded = loader.from_pretrained(folder / f"exported {kind} {cut}", dtype=torch.float64).state_dict()
        kept = read(folder, f"{kind} {cut}")["weights"]
        assert loaded.keys() == kept.keys() and all(torch.equal(loaded[name], kept[name]) for name in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_runs_train_validate_and_resume(folder, kind):
    found = read(folder, f"{kind} runs")
    assert found["losses"]["megatron"] == pytest.approx(found["losses"]["torch"], abs=1e-9)
    assert found["held_out"]["megatron"] == pytest.approx(found["held_out"]["torch"], abs=1e-9)
    assert len(found["losses"]["torch"]) == 4 and len(found["held_out"]["torch"]) >= 2
    assert found["resumed"], "a resumed run is bitwise identical"
    assert found["named"], "the run says what trains"

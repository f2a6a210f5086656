"""The scripts of examples/sft exit 0 in their small form, their loss falls, and what is added to them wins."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from sft_runs import PAIRS, TALKS, metrics_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["trainer.device=cpu", "optim.lr_warmup_steps=0", "trainer.total_training_steps=4"]
CASES = {
    "gsm8k": (PAIRS, ["training.learning_rate=3e-3"]),
    "multiturn": (TALKS, ["optim.lr=3e-3", "data.train_batch_size=9"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("folder", CASES)
def test_the_script_trains_in_its_small_form(tiny_model, tmp_path, folder, forked):
    rows, more = CASES[folder]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ["data.train_files=rows.jsonl", "data.val_files=rows.jsonl", f"model.path={tiny_model}"]
    script = ROOT / "examples" / "sft" / folder / "run_qwen_05.sh"
    # As under `torchrun --nproc_per_node=1`, which gives a program these.
    environment = {**os.environ, "PYTHON": forked.python, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run(
        ["bash", str(script), *files, *SMALL, *more], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    path = tmp_path / "outputs" / "sft" / f"{folder}_qwen_05"
    lines = metrics_of(path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[-1]["train/loss"] < lines[1]["train/loss"] and lines[-1]["val/loss"] < lines[0]["val/loss"]
    assert (path / "checkpoints" / "global_step_4" / "huggingface" / "model.safetensors").is_file()
    assert lines[1]["train/lr"] == 3e-3

"""torchrun's processes become one run with as many workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from runs import metrics_of
from sft_runs import PAIRS
from sft_runs import settings as sft_settings

from posttrain.trainer.fsdp_sft_trainer import run_sft

pytest.importorskip("ray")


def test_torchrun_trains_once_with_as_many_workers_as_it_starts_processes(tiny_model, tmp_path, forked):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps(PAIRS))
    given = {
        **sft_settings(tiny_model, tmp_path / "many", data__train_files=str(rows)),
        "trainer.val_before_train": False,
        "trainer.ray_init.runtime_env.py_executable": forked.python,
    }
    command = [forked.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    command += [
        forked.python,
        "-m",
        "posttrain.trainer.fsdp_sft_trainer",
        *(f"{key}={value}" for key, value in given.items()),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert ran.stdout.count("2 workers: starting Ray") == 1
    one = run_sft(sft_settings(tiny_model, tmp_path / "one"), data=PAIRS)
    losses = [line["train/loss"] for line in metrics_of(tmp_path / "many" / "test" / "run") if "train/loss" in line]
    assert losses == pytest.approx([line["train/loss"] for line in one.metrics], rel=1e-5) and len(losses) == 2

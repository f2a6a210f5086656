"""torchrun's processes become one run with as many workers, which other machines do not reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import pytest
from left_behind import processes_of
from open_ports import accepts, is_loopback, listening, name_of, own_address
from runs import metrics_of
from sft_runs import PAIRS
from sft_runs import settings as sft_settings

from posttrain.trainer.fsdp_sft_trainer import run_sft

pytestmark = pytest.mark.slow

pytest.importorskip("ray")


def watched(run: subprocess.Popen[Any], folders: list[str]) -> tuple[set[str], set[str]]:
    """(names of the run's processes that listened while it went on, those that other machines reach)."""
    names, open_ones, other = set(), set(), own_address()
    while run.poll() is None:
        ports = listening({pid for folder in folders for pid in processes_of(folder)})
        for (address, port), pid in ports.items():
            name = name_of(pid)
            names.add(name)
            if not is_loopback(address) or (other and accepts(other, port) and processes_of(folders[0])):
                open_ones.add(f"{name} {address}:{port}")
        time.sleep(1.0)
    return names, open_ones


def test_torchrun_trains_once_with_as_many_workers_as_it_starts_processes_and_nobody_else_reaches_them(
    tiny_model, tmp_path, forked
):
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
    said = tmp_path / "said"
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as rays, said.open("w") as file:
        env["TMPDIR"] = rays
        with subprocess.Popen(command, stdout=file, stderr=file, env=env) as run:
            names, open_ones = watched(run, [rays, str(tmp_path / "many")])
    assert run.returncode == 0, said.read_text()[-4000:]
    assert said.read_text().count("2 workers: starting Ray") == 1
    assert not open_ones and {"gcs_server", "raylet"} < names and any("RankHost" in name for name in names)
    one = run_sft(sft_settings(tiny_model, tmp_path / "one"), data=PAIRS)
    losses = [line["train/loss"] for line in metrics_of(tmp_path / "many" / "test" / "run") if "train/loss" in line]
    assert losses == pytest.approx([line["train/loss"] for line in one.metrics], rel=1e-5) and len(losses) == 2

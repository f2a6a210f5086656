"""The files for Slurm, KubeRay and SkyPilot: whole, with one and the same command, which the settings accept."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

from posttrain.config import load_config

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
SLURM = (FOLDER / "slurm.sbatch").read_text()
KUBERAY, SKYPILOT = (yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in ("kuberay", "skypilot"))
SIZES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"]  # torchrun knows them where it starts the command


def keys_of(command: str) -> list[str]:
    words = shlex.split(command.replace("\\\n", " ").replace("$RUNS", "/runs"))
    return [word for word in words if re.match(r"[a-z_]+(\.[a-z0-9_]+)+=", word)]


def test_all_files_give_the_same_command_and_the_settings_accept_it(monkeypatch):
    job = keys_of(KUBERAY["spec"]["entrypoint"])
    assert job[-2:] == SIZES and len(job) == 15
    slurm = keys_of("\n".join(line for line in SLURM.splitlines() if not line.startswith("#")))
    assert slurm == keys_of(SKYPILOT["run"]) == job[:-2]
    assert load_config(job).config.trainer.nnodes == 2


def test_scripts_are_whole_and_ask_for_the_machines_that_the_command_uses():
    for script in (SLURM, SKYPILOT["run"], SKYPILOT["setup"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8"} <= set(SLURM.splitlines())
    assert (SKYPILOT["num_nodes"], SKYPILOT["resources"]["accelerators"].split(":")[1]) == (2, "8")
    cluster: Any = KUBERAY["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert (workers["replicas"], container["resources"]["limits"]["nvidia.com/gpu"]) == (2, 8)
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}  # it drives, and has no workers

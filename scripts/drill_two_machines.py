#!/usr/bin/env python3
"""Trains over two Ray nodes, both on this machine; compares with one machine, and sees what is left when it is killed.

    python scripts/drill_two_machines.py [--steps 10] [--allowed 30]

`ray start --head` and a second `ray start --address` are two machines to Ray: each has its own node, store and
processes. `RAY_ADDRESS=... trainer.nnodes=2 trainer.n_workers=1` then puts one rank on each. Runs, from one seed:

    one machine     trainer.n_workers=2, in a Ray of its own
    two machines    trainer.nnodes=2 trainer.n_workers=1, in that Ray
    killed          the same, killed (-9) at step 2: its ranks must be gone, and the cluster stays

The first two must have the same numbers. Prints a table; exits 1 if one is wrong. Needs Ray; takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from needs import need

HERE = Path(__file__).resolve().parents[1]
TIMES = ("time", "timing_", "perf/")


class TwoNodes:
    """A Ray of two nodes on this machine; gone at the end of `with`."""

    def __init__(self, folder: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        port = self.address.rpartition(":")[2]
        self.folder, self.started = folder, []
        common = ["--block", "--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
        head = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        self._start([*head, f"--temp-dir={folder}", *common])
        self._wait(1)
        self._start([f"--address={self.address}", "--node-ip-address=127.0.0.1", *common])
        self._wait(2)

    def _start(self, options: list[str]) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.started.append(subprocess.Popen(command, start_new_session=True, **quiet))

    def _wait(self, count: int) -> None:
        code = (
            f"import ray; ray.init(address={self.address!r}, log_to_driver=False, logging_level=50); "
            "print(len([node for node in ray.nodes() if node['Alive']]))"
        )
        for _ in range(30):
            told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
            if told.strip() == str(count):
                return
            time.sleep(1)
        raise SystemExit(f"Ray did not come up with {count} node(s)")

    def ranks(self) -> list[int]:
        """Processes of ranks that live in this Ray."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and b"ray::RankHost" in (entry / "cmdline").read_bytes():
                    files = [os.readlink(fd) for fd in (entry / "fd").iterdir()]
                    found += [int(entry.name)] * any(file.startswith(self.folder) for file in files)
            except OSError:
                continue
        return found

    def close(self) -> None:
        for process in reversed(self.started):
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def command(folder: Path, name: str, steps: int, *more: str) -> list[str]:
    keys = {
        "preset": "embedded",
        "data.train_batch_size": 40,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 20,
        "trainer.total_training_steps": steps,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.export_hf": "none",
        "trainer.device": "cpu",
        "trainer.val_before_train": False,
        "trainer.default_local_dir": folder,
        "trainer.project_name": "drill",
        "trainer.experiment_name": name,
    }
    return [sys.executable, "-m", "posttrain.trainer.main_ppo", *(f"{k}={v}" for k, v in keys.items()), *more]


def numbers(folder: Path, name: str) -> list[dict[str, Any]]:
    """What a run measured, without its clocks."""
    lines = (folder / "drill" / name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMES)} for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--allowed", type=float, default=30.0, help="seconds until the ranks of a killed run are gone")
    args = parser.parse_args()
    need("ray", get=f"{sys.executable} -m pip install 'ray>=2.50'")
    clean = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_HEAD_ADDRESS")}
    clean["PYTHONPATH"] = str(HERE)
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as rays:
        folder = Path(made)
        subprocess.run(command(folder, "one", args.steps, "trainer.n_workers=2"), env=clean, check=True, stdout=2)
        nodes = TwoNodes(rays)
        try:
            env = {**clean, "RAY_ADDRESS": nodes.address}
            two = ["trainer.nnodes=2", "trainer.n_workers=1"]
            began = time.monotonic()
            ran = subprocess.run(command(folder, "two", args.steps, *two), env=env, text=True, stdout=subprocess.PIPE)
            seconds, left = time.monotonic() - began, len(nodes.ranks())
            print(ran.stdout, file=sys.stderr)
            same = ran.returncode == 0 and numbers(folder, "one") == numbers(folder, "two")
            at_work, gone = killed(nodes, command(folder, "killed", 1000, *two), env)
            stays = all(process.poll() is None for process in nodes.started)
        finally:
            nodes.close()
    print("| what | found |\n| --- | --- |")
    print(f"| two machines: exit status, seconds | {ran.returncode}, {seconds:.0f} |")
    print(f"| numbers of {args.steps} steps equal to the bit those of two ranks on one machine | {same} |")
    print(f"| ranks left when it has ended | {left} |")
    print(f"| killed: ranks at work; gone after; the cluster stays | {at_work}; {gone:.1f} s; {stays} |")
    return int(not (same and left == 0 and at_work == 2 and gone <= args.allowed and stays))


def killed(nodes: TwoNodes, line: list[str], env: dict[str, str]) -> tuple[int, float]:
    """(ranks at work at step 2, seconds after `kill -9` until none was)."""
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        next((said for said in run.stdout if said.startswith("step 2/")), None)
        at_work = len(nodes.ranks())
        run.kill()
    began = time.monotonic()
    while nodes.ranks() and time.monotonic() - began < 120:
        time.sleep(0.1)
    return at_work, time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())

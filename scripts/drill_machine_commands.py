#!/usr/bin/env python3
"""Gives the commands for several machines of docs/workers.md on this one, as if it were two or three of them.

    python scripts/drill_machine_commands.py [--only NAME ...]

    cluster    ray start on three nodes, then one command with RAY_ADDRESS and trainer.nnodes=3
    ranks      examples/grpo_trainer/run_qwen2-7b.sh (SMOKE=1) twice: RAY_HEAD_ADDRESS=auto trainer.node_rank=0, then
               RAY_HEAD_ADDRESS=HOST:6379 trainer.node_rank=1
    nobody     trainer.node_rank=1 with an address where nobody answers
    torchrun   torchrun --nnodes=2 twice, with two processes each where there are two cores
    killed     as `torchrun`, the first machine's process killed (-9) at step 2: the second leaves by itself

Every machine is a Ray node with a folder and processes of its own; a run's numbers must be those of as many workers on
one machine. Prints a table; exits 1 if something is wrong. Needs Ray and a free port 6379; takes four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from needs import need

from posttrain import cores

HERE = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
TIMES = ("time", "timing_", "perf/")
CLEAN = {
    **{name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_HEAD_ADDRESS")},
    "PYTHONPATH": str(HERE),
    "PYTHON": PYTHON,
    "PYTHONUNBUFFERED": "1",
}
SMALL = {
    "preset": "embedded",
    "data.train_batch_size": 24,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 12,
    "trainer.total_training_steps": 3,
    "trainer.test_freq": -1,
    "trainer.export_hf": "none",
    "trainer.device": "cpu",
    "trainer.val_before_train": False,
}
CHANGED = "import sys; from posttrain.controller import ray_node; from posttrain import cores; {}; "
CHANGED += "from posttrain.trainer.main_ppo import cli; sys.exit(cli())"
"""The trainer's module with a number changed."""


class Drill:
    """Rows of the table, and the processes that are still to be ended."""

    def __init__(self, folder: Path, rays: Path) -> None:
        self.folder, self.rays, self.started, self.wrong = folder, rays, [], 0
        self.env = {**CLEAN, "TMPDIR": str(rays)}

    def row(self, what: str, found: str, fine: bool) -> None:
        print(f"| {what} | {found} |{'' if fine else '  <- WRONG'}", flush=True)
        self.wrong += not fine

    def keys(self, name: str, **more: Any) -> list[str]:
        given = {**SMALL, "trainer.default_local_dir": self.folder, "trainer.project_name": "drill"}
        return [f"{key}={value}" for key, value in {**given, "trainer.experiment_name": name, **more}.items()]

    def start(self, command: list[str], **variables: str) -> subprocess.Popen[str]:
        run = subprocess.Popen(
            command,
            env={**self.env, **variables},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(run)
        return run

    def numbers(self, name: str) -> list[dict[str, Any]]:
        """What a run measured, without its clocks."""
        lines = (self.folder / "drill" / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMES)} for line in lines]

    def alike(self, name: str, workers: int) -> bool:
        """Whether the numbers of a run are to the bit those of as many workers on one machine, a thread each."""
        alone = f"{workers}_workers"
        if not (self.folder / "drill" / alone).exists():
            code = CHANGED.format(f"cores.usable = lambda: {workers}")
            self.start([PYTHON, "-c", code, *self.keys(alone), f"trainer.n_workers={workers}"]).communicate()
        return self.numbers(name) == self.numbers(alone)

    def left(self) -> list[str]:
        """Processes of a Ray that was started in these folders, and the folders."""
        found = [path.name for path in self.rays.glob("posttrain-*")]
        for entry in Path("/proc").iterdir():
            try:
                told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if entry.name.isdigit() and f"TMPDIR={self.rays}".encode() in told and int(entry.name) != os.getpid():
                found.append(f"{entry.name} {told[:50]!r}")
        return found

    def gone_after(self, limit: float = 60.0) -> float:
        began = time.monotonic()
        while self.left() and time.monotonic() - began < limit:
            time.sleep(0.1)
        return time.monotonic() - began

    def close(self) -> None:
        for run in reversed(self.started):
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGTERM)
                run.wait(60)


def until(run: subprocess.Popen[str], pattern: str) -> tuple[str, re.Match[str] | None]:
    """What a run says up to the first line that has the pattern."""
    assert run.stdout is not None
    said = ""
    for line in run.stdout:
        said += line
        if found := re.search(pattern, line):
            return said, found
    return said, None


def rays_options(drill: Drill) -> list[str]:
    return ["--block", "--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]


def cluster(drill: Drill) -> None:
    """One command on a running Ray of three nodes."""
    ray = [PYTHON, "-m", "ray.scripts.scripts", "start"]
    head = ["--head", "--port=6380", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    nodes = [drill.start([*ray, *head, f"--temp-dir={drill.rays}/h", *rays_options(drill)])]
    until(nodes[0], "Ray runtime started")
    for number in (1, 2):
        join = ["--address=127.0.0.1:6380", "--node-ip-address=127.0.0.1", f"--temp-dir={drill.rays}/n{number}"]
        nodes.append(drill.start([*ray, *join, *rays_options(drill)]))
    command = [PYTHON, "-m", "posttrain", "train", *drill.keys("cluster"), "trainer.nnodes=3", "trainer.n_workers=1"]
    run = drill.start(command, RAY_ADDRESS="127.0.0.1:6380")
    said, _ = run.communicate(timeout=300)
    stays = all(node.poll() is None for node in nodes)
    drill.close()
    same = run.returncode == 0 and drill.alike("cluster", 3)
    fine = same and stays and "3 processes on 3 machines" in said
    drill.row(
        "three nodes, RAY_ADDRESS: status; numbers of 3 workers; cluster stays",
        f"{run.returncode}; {same}; {stays}",
        fine,
    )
    if not fine:
        print(said, file=sys.stderr)


def ranks(drill: Drill) -> None:
    """The example's command on each of two machines."""
    script = ["bash", str(HERE / "examples/grpo_trainer/run_qwen2-7b.sh"), "trainer.nnodes=2"]
    smoke = {"SMOKE": "1", "SMOKE_OUT": str(drill.folder / "smoke")}
    first = drill.start([*script, "trainer.node_rank=0"], RAY_HEAD_ADDRESS="auto", **smoke)
    said, found = until(first, r"RAY_HEAD_ADDRESS=(\S+) ")
    waits, _ = until(first, r"Waiting 300 s for machines to join. 1 of 2 are here")
    address = found[1] if found else "127.0.0.1:6379"
    second = drill.start([*script, "trainer.node_rank=1"], RAY_HEAD_ADDRESS=address, **smoke)
    told, _ = second.communicate(timeout=300)
    rest, _ = first.communicate(timeout=60)
    runs = len(list((drill.folder / "smoke").rglob("metrics.jsonl")))
    gone = drill.gone_after()
    fine = (first.returncode, second.returncode, runs) == (0, 0, 1) and "Waiting 300 s" in waits and gone < 5
    what = "node ranks 0 and 1, the example: statuses; head told; waits and says so; runs; nothing left after"
    drill.row(
        what, f"{first.returncode}, {second.returncode}; {address}; {'Waiting' in waits}; {runs}; {gone:.1f} s", fine
    )
    if not fine:
        print(said, waits, rest, told, sep="\n", file=sys.stderr)


def nobody(drill: Drill) -> None:
    """A head that does not answer."""
    began = time.monotonic()
    command = [
        PYTHON,
        "-c",
        CHANGED.format("ray_node.HEAD_S = 5.0"),
        *drill.keys("nobody"),
        "trainer.nnodes=2",
        "trainer.node_rank=1",
    ]
    run = drill.start(command, RAY_HEAD_ADDRESS="127.0.0.1:9")
    said, _ = run.communicate(timeout=300)
    fine = run.returncode == 2 and "no Ray answers there" in said
    drill.row(
        "node rank 1, nobody at the address, deadline 5 s: status, seconds",
        f"{run.returncode}, {time.monotonic() - began:.0f}",
        fine,
    )


def both_torchruns(drill: Drill, name: str, each: int, steps: int) -> list[subprocess.Popen[str]]:
    line = [PYTHON, "-m", "torch.distributed.run", f"--nproc_per_node={each}", "--nnodes=2", "--master_addr=127.0.0.1"]
    keys = drill.keys(name, **{"trainer.total_training_steps": steps})
    return [
        drill.start([*line, f"--node_rank={rank}", "-m", "posttrain.trainer.main_ppo", *keys], OMP_NUM_THREADS="1")
        for rank in (0, 1)
    ]


def torchrun(drill: Drill) -> None:
    """Two commands of torchrun."""
    each = min(2, cores.usable())
    first, second = both_torchruns(drill, "torchrun", each, 3)
    said, _ = first.communicate(timeout=300)
    told, _ = second.communicate(timeout=60)
    gone = drill.gone_after()
    same = first.returncode == 0 and drill.alike("torchrun", 2 * each)
    fine = same and second.returncode == 0 and gone < 5 and "The run has left this machine." in told
    what = f"torchrun, 2 machines of {each}: statuses; numbers of {2 * each} workers; nothing left after"
    drill.row(what, f"{first.returncode}, {second.returncode}; {same}; {gone:.1f} s", fine)
    if not fine:
        print(said, told, sep="\n", file=sys.stderr)


def killed(drill: Drill) -> None:
    """The process that trains is killed."""
    first, second = both_torchruns(drill, "killed", 1, 1000)
    until(first, r"^step 2/")
    trains = next(pid for pid in children(first.pid) if pid != first.pid)
    os.kill(trains, signal.SIGKILL)
    began = time.monotonic()
    told, _ = second.communicate(timeout=120)
    seconds, gone = time.monotonic() - began, drill.gone_after()
    first.communicate(timeout=120)
    fine = "The run has left this machine." in told and seconds < 60 and first.returncode != 0
    what = "torchrun, killed at step 2: statuses; the second machine leaves after; nothing left after"
    drill.row(what, f"{first.returncode}, {second.returncode}; {seconds:.1f} s; {gone:.1f} s more", fine)
    if not fine:
        print(told, file=sys.stderr)


def children(parent: int) -> list[int]:
    """Processes that torchrun has started."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(word) for word in text.split()]


DRILLS: dict[str, Callable[[Drill], None]] = {
    drill.__name__: drill for drill in (cluster, ranks, nobody, torchrun, killed)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=DRILLS, default=list(DRILLS))
    chosen = parser.parse_args().only
    if {"cluster", "ranks", "nobody"} & {*chosen}:
        need("ray", get=f"{PYTHON} -m pip install 'ray>=2.50'")
    print("| what | found |\n| --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as rays:
        drill = Drill(Path(made), Path(rays))
        try:
            for name in chosen:
                DRILLS[name](drill)
        finally:
            drill.close()
    return int(drill.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

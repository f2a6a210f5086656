#!/usr/bin/env python3
"""Trains over three machines that have a network between them, in every way that docs/workers.md names.

    python scripts/drill_cluster.py [--only NAME ...] [--steps 10]

The machines are network namespaces of this Linux, each with an address of its own, on one bridge. They share the disk.
One process records its rollouts; every other run learns from the same responses, in float64, and must have its metrics
and weights within 1e-9:

    existing    a Ray of three nodes, whose head has no cores for workers (`ray start --head --num-cpus=0`); one command
                with RAY_ADDRESS on the head
    elsewhere   the same Ray; the command is given on another machine
    submitted   the same Ray; `ray job submit` (needs ray[default])
    ranks       `main_ppo` on each machine, with RAY_HEAD_ADDRESS and trainer.node_rank
    torchrun    `torchrun` on each machine
    killed      as `existing`, killed (-9) at step 2: its workers must be gone and its cores free, and the Ray stays

Each but the last is run colocated (a rank on every machine with cores) and with workers of their own for rollout.
Prints a table; exits 1 if something is wrong. Needs Linux, root, `ip` and Ray; takes ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from needs import need
from recorded_rollouts import ANNOUNCED

from posttrain.checkpoint.manager import CheckpointManager

HERE = Path(__file__).resolve().parents[1]
TIMES = ("time", "timing_", "perf/", "memory", "sync/")
NEAR = 1e-9
HEAD = "10.9.0.1"
ALLOWED_S = 30.0  # until the workers of a killed run are gone
SEPARATE = "actor_rollout_ref.rollout.n_workers=1"
SMALL = {
    "preset": "embedded",
    "data.train_batch_size": 12,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 6,
    "actor_rollout_ref.model.dtype": "float64",
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.rollout.name": "recorded",
    "trainer.test_freq": -1,
    "trainer.export_hf": "none",
    "trainer.device": "cpu",
    "trainer.val_before_train": False,
    "trainer.project_name": "drill",
}


class Machines:
    """Network namespaces on one bridge, which is in the first; gone at the end of `with`.

    Each sees a folder of its own at the path `temporary`: Ray reads there which machine it is on.
    """

    def __init__(self, count: int, temporary: Path) -> None:
        self.names = [f"posttrain{os.getpid()}m{number}" for number in range(count)]
        self.temporary = temporary

    def __enter__(self) -> Machines:
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        head = self.names[0]
        _ip("-n", head, "link", "add", "bridge", "type", "bridge")
        _ip("-n", head, "addr", "add", f"{HEAD}/24", "dev", "bridge")
        _ip("-n", head, "link", "set", "bridge", "up")
        _ip("-n", head, "route", "add", "default", "dev", "bridge")
        for number, name in enumerate(self.names[1:], 2):
            _ip("link", "add", "cable", "netns", name, "type", "veth", "peer", "name", f"port{number}", "netns", head)
            _ip("-n", head, "link", "set", f"port{number}", "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"10.9.0.{number}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "route", "add", "default", "via", HEAD)
        return self

    def __exit__(self, *exc: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def on(self, number: int, command: Sequence[str]) -> list[str]:
        """The command, given on machine `number`."""
        own = self.temporary.with_name(f"m{number}")
        own.mkdir(exist_ok=True)
        mounted = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', own, self.temporary]
        return ["ip", "netns", "exec", self.names[number], *map(str, mounted), *command]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Nodes:
    """A Ray over the machines, started by `ray start`: a head without cores, and a node with one on each other."""

    address = f"{HEAD}:6379"

    def __init__(self, drill: Drill) -> None:
        self.drill, self.started = drill, []
        head = ["--head", "--port=6379", f"--node-ip-address={HEAD}", "--num-cpus=0"]
        try:
            self._start(0, [*head, f"--include-dashboard={str(drill.has_jobs).lower()}"])
            self._wait(1)
            for number in range(1, len(drill.machines.names)):
                self._start(number, [f"--address={self.address}", "--num-cpus=1"])
            self._wait(len(drill.machines.names))
        except BaseException:
            self.close()
            raise

    def _start(self, number: int, options: list[str]) -> None:
        common = [
            f"--temp-dir={self.drill.rays}",
            "--block",
            "--num-gpus=0",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
        ]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *common]
        log = (self.drill.folder / f"node{number}.log").open("w")
        self.started.append(
            subprocess.Popen(
                self.drill.machines.on(number, command),
                env=self.drill.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )

    def ask(self, expression: str) -> str:
        """What Ray says, asked on the head."""
        code = f"import ray; ray.init({self.address!r}, log_to_driver=False, logging_level=50); print({expression})"
        command = self.drill.machines.on(0, [sys.executable, "-c", code])
        return subprocess.run(command, env=self.drill.env, capture_output=True, text=True).stdout.strip()

    def _wait(self, count: int) -> None:
        for _ in range(90):
            if self.ask("sum(node['Alive'] for node in ray.nodes())") == str(count):
                return
            time.sleep(1)
        raise SystemExit(f"Ray did not come up with {count} node(s)")

    def ranks(self) -> int:
        """Processes of ranks that live in this Ray."""
        found = 0
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and b"ray::RankHost" in (entry / "cmdline").read_bytes():
                    found += any(os.readlink(fd).startswith(str(self.drill.rays)) for fd in (entry / "fd").iterdir())
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


class Drill:
    """Runs and compares them; `row` prints a line of the table."""

    def __init__(self, folder: Path, rays: Path, machines: Machines, steps: int) -> None:
        self.folder, self.rays, self.machines, self.steps, self.wrong = folder, rays, machines, steps, 0
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        clean["RAY_raylet_start_wait_time_s"] = "180"  # for a busy machine
        secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}  # as a user gives it everywhere
        self.env = {**clean, **secret, "PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "1", "TMPDIR": str(rays)}
        shutil.copy(HERE / "scripts" / "recorded_rollouts.py", folder)
        probe = [sys.executable, "-c", "import aiohttp_cors, ray.dashboard.modules.job.cli"]
        self.has_jobs = subprocess.run(probe, capture_output=True).returncode == 0

    def keys(self, name: str, *more: str) -> list[str]:
        given = {
            **SMALL,
            "trainer.total_training_steps": self.steps,
            "trainer.default_local_dir": self.folder / "runs",
            "trainer.experiment_name": name,
            "actor_rollout_ref.model.external_lib": self.folder / "recorded_rollouts.py",
        }
        return [*(f"{key}={value}" for key, value in given.items()), *more]

    def trains(self, name: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "posttrain.trainer.main_ppo", *self.keys(name, *more)]

    def ran(self, name: str, commands: Sequence[tuple[int, list[str]]], **variables: str) -> None:
        """Give these commands, each on its machine, and print how the run compares with that of one process."""
        began, started = time.monotonic(), []
        for place, (number, command) in enumerate(commands):
            log = (self.folder / f"{name}_{place}.log").open("w")
            env = {**self.env, **variables}
            if "RAY_HEAD_ADDRESS" in variables and place > 0:
                env["RAY_HEAD_ADDRESS"] = f"{HEAD}:6379"
            given = self.machines.on(number, command)
            started.append(subprocess.Popen(given, env=env, cwd=self.folder, stdout=log, stderr=log))
        try:
            statuses = [run.wait() for run in started]
        finally:
            for run in started:
                run.kill()
        seconds = time.monotonic() - began
        if any(statuses):
            self.row(name, f"exit statuses {statuses}; see {self.folder}/{name}_*.log", False)
            for place in range(len(commands)):
                print((self.folder / f"{name}_{place}.log").read_text()[-3000:], file=sys.stderr)
            return
        metrics, weights = self.apart(name)
        ended = ", ".join(map(str, statuses))
        fine = max(metrics, weights) < NEAR
        found = " | ".join([ended, f"{seconds:.0f}", *self.logs(name), f"{metrics:.1e}", f"{weights:.1e}"])
        self.row(name, found, fine)

    def logs(self, name: str) -> list[str]:
        """(generating workers whose output the run has collected, machines that have computed rewards)."""
        logs = self.folder / "runs" / "drill" / name / "logs"
        workers, spread = logs / "workers.log", re.compile(r"Reward workers: \d+ on (\d+) machines")
        collected = workers.read_text().count(ANNOUNCED) if workers.exists() else 0
        rewards = spread.search((logs / "run.log").read_text())
        return [str(collected), rewards[1] if rewards else "1"]

    def apart(self, name: str) -> tuple[float, float]:
        """The largest difference of a metric, and of a weight or moment, from the run of one process."""
        (one, here), (other, there) = ((self.metrics(run), self.weights(run)) for run in ("one", name))
        assert len(one) == len(other) == self.steps and here.keys() == there.keys(), name
        metrics = max(
            abs(b[key] - a[key]) / max(1.0, abs(a[key])) for a, b in zip(one, other, strict=True) for key in a
        )
        return metrics, max(float((here[key] - there[key]).abs().max()) for key in here)

    def metrics(self, name: str) -> list[dict[str, float]]:
        lines = (self.folder / "runs" / "drill" / name / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        plain = [{k: v for k, v in step.items() if isinstance(v, int | float)} for step in steps if "step" in step]
        return [
            {k: v for k, v in step.items() if k.startswith(("actor/", "critic/", "reward", "response"))}
            for step in plain
        ]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        manager = CheckpointManager(self.folder / "runs" / "drill" / name / "checkpoints")
        newest, found = manager.newest(), {}
        assert newest is not None
        for role in (part.name for part in newest.iterdir() if (part / ".metadata").exists()):
            kinds = manager.describe(newest, role).items()
            into = {key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in kinds}
            manager.load_tensors(newest, role, into)
            found |= {f"{role}.{key}": weight.double() for key, weight in into.items()}
        return found

    def row(self, what: str, found: str, fine: bool) -> None:
        print(f"| {what} | {found} |{'' if fine else '  <- WRONG'}", flush=True)
        self.wrong += not fine


def in_a_running_ray(drill: Drill, only: Sequence[str]) -> None:
    if not {"existing", "elsewhere", "submitted", "killed"} & set(only):
        return
    nodes = Nodes(drill)
    named = {"RAY_ADDRESS": nodes.address}
    both = {"colocated": ["trainer.nnodes=2"], "separate": [SEPARATE]}
    try:
        for layout, keys in both.items():
            for way, machine in (("existing", 0), ("elsewhere", 1)):
                if way in only:
                    name = f"{way}-{layout}"
                    drill.ran(name, [(machine, drill.trains(name, *keys))], **named)
            if "submitted" in only and drill.has_jobs:
                name = f"submitted-{layout}"
                job = [
                    sys.executable,
                    "-m",
                    "ray.scripts.scripts",
                    "job",
                    "submit",
                    "--address",
                    "http://127.0.0.1:8265",
                ]
                drill.ran(name, [(0, [*job, "--", *drill.trains(name, *keys)])])
        if "submitted" in only and not drill.has_jobs:
            drill.row("submitted", "not run: pip install 'posttrain[cluster]'", False)
        if "killed" in only:
            killed(drill, nodes)
    finally:
        nodes.close()


def killed(drill: Drill, nodes: Nodes) -> None:
    """`kill -9` at step 2: what is left of the run, and when it is gone."""
    line = drill.trains("killed", "trainer.nnodes=2", "actor_rollout_ref.rollout.name=native")
    line = [key.replace(f"total_training_steps={drill.steps}", "total_training_steps=1000") for key in line]
    env = {**drill.env, "RAY_ADDRESS": nodes.address}
    with subprocess.Popen(drill.machines.on(0, line), env=env, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        next((said for said in run.stdout if said.startswith("step 2/")), None)
        at_work, began = nodes.ranks(), time.monotonic()
        run.kill()
    while nodes.ranks() and time.monotonic() - began < ALLOWED_S:
        time.sleep(0.1)
    gone, free = time.monotonic() - began, "0"
    while time.monotonic() - began < ALLOWED_S and free != "2.0":
        free = nodes.ask("ray.available_resources().get('CPU', 0)")
    stays = all(process.poll() is None for process in nodes.started)
    found = f"workers before: {at_work}; gone after {gone:.1f} s; free cores after: {free}; the Ray stays: {stays}"
    drill.row("killed", found, at_work == 2 and gone < ALLOWED_S and free == "2.0" and stays)


def on_every_machine(drill: Drill, only: Sequence[str]) -> None:
    count = len(drill.machines.names)
    for layout, keys in {"colocated": [], "separate": [SEPARATE]}.items():
        if "ranks" in only:
            name = f"ranks-{layout}"
            lines = [
                (n, drill.trains(name, f"trainer.nnodes={count}", f"trainer.node_rank={n}", *keys))
                for n in range(count)
            ]
            drill.ran(name, lines, RAY_HEAD_ADDRESS="auto")
        if "torchrun" in only:
            name = f"torchrun-{layout}"
            run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", f"--nnodes={count}"]
            main = ["-m", "posttrain.trainer.main_ppo", *drill.keys(name, *keys)]
            drill.ran(name, [(n, [*run, f"--node_rank={n}", f"--master_addr={HEAD}", *main]) for n in range(count)])


WAYS = ("existing", "elsewhere", "submitted", "killed", "ranks", "torchrun")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="keep logs and runs in this folder")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # machines and nodes are taken down
    need("ray", get=f"{sys.executable} -m pip install 'ray>=2.50'")
    made: Any = tempfile.TemporaryDirectory()
    with made as folder, tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as rays, ExitStack() as stack:
        kept, temporary = Path(args.folder or folder), Path(rays, "t")
        for path in (kept, temporary):
            path.mkdir(parents=True, exist_ok=True)
        drill = Drill(kept, temporary, stack.enter_context(Machines(3, temporary)), args.steps)
        subprocess.run(drill.trains("one"), env=drill.env, cwd=kept, check=True, stdout=2)
        print("| way and layout | exit statuses | seconds | logs | reward machines | metrics apart | weights apart |")
        print("|---|---|---|---|---|---|---|")
        in_a_running_ray(drill, args.only)
        on_every_machine(drill, args.only)
    return int(drill.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

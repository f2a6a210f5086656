#!/usr/bin/env python3
"""Takes machines away from small runs, and compares what comes of them with undisturbed runs.

    python scripts/drill_lost_machines.py OUT [--runs 4] [--seed 1] [--layouts machines,fewer] [--disturbances 6]
    python scripts/drill_recovery.py OUT --table        # the table of all runs recorded in OUT

The machines are network namespaces of this Linux with a Ray between them, as in `drill_cluster.py`: a head that drives,
and two that train. Besides SIGKILL and SIGSTOP to ranks, a machine loses all its processes, or its cable. In the layout
`machines` it comes back, and weights, optimizer and metrics must be bitwise those of the undisturbed run. In `fewer` it
does not: the run continues with the other (trainer.min_nnodes), in float64 and within 1e-9. Needs Linux, root and `ip`.
OUT must have a short path: Ray's sockets are below it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drill_cluster import NEAR, Machines, Nodes
from drill_recovery import LAYOUTS, ROLLOUT, Disturbance, Drill, Record, pages_of, print_table
from drill_sudden_death import metrics_of, tensors_of

TWO = {"trainer.nnodes": 2, "trainer.n_workers": 1, "actor_rollout_ref.actor.use_kl_loss": True}
LAYOUTS |= {
    "machines": {**TWO, "trainer.placement_timeout_s": 120},
    "fewer": {
        **TWO,
        "trainer.min_nnodes": 1,
        "trainer.placement_timeout_s": 10,
        "actor_rollout_ref.model.dtype": "float64",
        f"{ROLLOUT}.n": 3,
    },
}
# Ray's own limits for a machine that does not answer, lower than its default of half a minute.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Take machines away from runs; compare.")
    parser.add_argument("out", type=Path, help="a folder with a short path; what is there is added to")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--layouts", default="machines,fewer")
    parser.add_argument("--disturbances", type=int, default=6, help="of a run, at most")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    layouts = options.layouts.split(",")
    with ExitStack() as stack:
        drill = MachineDrill(options.out.resolve(), options.steps, options.disturbances, stack)
        for number in range(options.runs):
            record = drill.run(layouts[number % len(layouts)], options.seed + number)
            print(json.dumps(asdict(record)), flush=True)
    print_table(drill.records())
    sys.exit(any(record["problems"] for record in drill.records()))


class MachineDrill(Drill):
    """A drill whose runs are driven from the head of a Ray over two other machines."""

    def __init__(self, out: Path, steps: int, disturbances: int, stack: ExitStack) -> None:
        super().__init__(out, steps, disturbances)
        temporary = out / "t"
        temporary.mkdir(exist_ok=True)
        self.machines = stack.enter_context(Machines(3, temporary))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env = {**clean, **HEALTH, "RAY_raylet_start_wait_time_s": "180", "TMPDIR": str(temporary)}
        self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "drill" * 8}
        facts: Any = SimpleNamespace(
            machines=self.machines, rays=temporary, folder=out, env=self.env, has_jobs=False, steps=steps
        )
        self.nodes = Nodes(facts)
        stack.callback(self.close)

    def close(self) -> None:
        """Everything on the machines ends."""
        for number in range(len(self.machines.names)):
            self.end_processes(number)

    def start(self, layout: str, root: Path, name: str) -> subprocess.Popen[bytes]:
        given = [f"{key}={value}" for key, value in self.settings(layout, root, name).items()]
        log = (self.out / f"{name}.log").open("ab")
        command = self.machines.on(0, [sys.executable, "-m", "posttrain.trainer.main_ppo", *given])
        env = {**self.env, "RAY_ADDRESS": self.nodes.address}
        return subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def workers_of(self, process: subprocess.Popen[bytes], role: str) -> list[int]:
        return [pid for number in (1, 2) for pid in self.pids(number, "ray::RankHost")] if role == "rank" else []

    def pids(self, number: int, kind: str = "") -> list[int]:
        """Processes of a machine."""
        listed = subprocess.run(["ip", "netns", "pids", self.machines.names[number]], capture_output=True, text=True)
        found = []
        for pid in map(int, listed.stdout.split()):
            with suppress(OSError):
                if kind in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                    found.append(pid)
        return found

    def end_processes(self, number: int) -> None:
        for pid in self.pids(number):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def run(self, layout: str, seed: int) -> Record:
        record = super().run(layout, seed)
        if layout == "fewer":
            self.bring_back(2)
        return record

    def disturb(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        rng: random.Random,
        record: Record,
        seen: set[int],
    ) -> None:
        """A signal to a rank, or a machine that is lost; in the layout `fewer` it is lost once."""
        kinds = ["node", "cable"] if record.layout == "machines" else ["node"]
        left = [one for one in record.disturbances if one.role == "machine"]
        if rng.random() < 0.5 or (record.layout == "fewer" and left):
            super().disturb(process, folder, rng, record, seen)
            return
        if not self.wait_for_a_moment(process, folder, rng, seen, loading=False):
            return
        kind = rng.choice(kinds)
        one, before, sent = Disturbance("machine", kind), len(pages_of(folder)), time.monotonic()
        record.disturbances.append(one)
        if kind == "cable":
            subprocess.run(["ip", "-n", self.machines.names[0], "link", "set", "port3", "down"], check=True)
        else:
            self.end_processes(2)
        self.note(process, folder, one, before, sent, seen)
        if record.layout == "machines":
            self.bring_back(2)

    def bring_back(self, number: int) -> None:
        """The machine is started again, with its cable and its Ray."""
        self.end_processes(number)
        subprocess.run(["ip", "-n", self.machines.names[0], "link", "set", f"port{number + 1}", "up"], check=True)
        self.nodes._start(number, [f"--address={self.nodes.address}", "--num-cpus=1"])

    def compare(self, ours: Path, theirs: Path, record: Record) -> None:
        if record.layout != "fewer":
            super().compare(ours, theirs, record)
        elif record.status == 0:
            left, right = tensors_of(ours), tensors_of(theirs)
            furthest = max(float((left[name].double() - right[name].double()).abs().max()) for name in right)
            if left.keys() != right.keys() or furthest > NEAR:
                record.problems.append(f"tensors are {furthest:.1e} apart")
            if len(metrics_of(ours)) != len(metrics_of(theirs)):
                record.problems.append("metrics.jsonl has other steps")
            record.apart = furthest

    def look_for_leftovers(self, record: Record, seen: set[int]) -> None:
        end = time.monotonic() + 30
        while (left := self.workers_of(None, "rank")) and time.monotonic() < end:  # pyright: ignore
            time.sleep(0.5)
        if left:
            record.problems.append(f"left: ranks {left}")


if __name__ == "__main__":
    main()

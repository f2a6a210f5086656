#!/usr/bin/env python3
"""Programs per second in the sandbox, next to a bare Python process for each: `python scripts/bench_sandbox.py`.

CPU ms is what a program costs all processes together: this one, the warm ones and the job. It depends less on what else
the machine does than the rate does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from posttrain.config.rollout import SandboxConfig
from posttrain.sandbox import Sandbox

PROGRAM = "print(sum(range(1000)))"
TESTED = "def add(a, b):\n    return a + b\n"
TESTS = [{"code": f"assert add({i}, 1) == {i + 1}"} for i in range(3)]


def bare() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True).stdout == b"499500\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the sandbox.")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per line of the table (default 5)")
    options = parser.parse_args()
    print("| work | workers | per second | CPU ms each |\n|---|---|---|---|")
    with Sandbox() as box, Sandbox(SandboxConfig(mode="unsafe")) as unsafe:
        start = time.perf_counter()
        box.start()
        first = time.perf_counter() - start
        for label, work, programs in (
            ("bare `python -c`", bare, 1),
            ("sandbox, a script", lambda: check(box), 1),
            ("sandbox, a script with ten inputs", lambda: inputs(box), 10),
            ("sandbox, a program and three asserts", lambda: tested(box), 1),
            ("mode `unsafe`, a script", lambda: check(unsafe), 1),
        ):
            for workers in (1, 2):
                rate, cpu = measure(work, workers, options.seconds)
                print(f"| {label} | {workers} | {programs * rate:.0f} | {1000 * cpu / programs:.1f} |", flush=True)
    print(f"\nThe first job of a process waits {first:.2f} s for its warm Python.")


def check(box: Sandbox) -> None:
    assert box.run(PROGRAM).stdout == "499500\n"


def inputs(box: Sandbox) -> None:
    letters = "abcdefghij"
    assert "".join(result.stdout.strip() for result in box.run_each("print(input())", list(letters))) == letters


def tested(box: Sandbox) -> None:
    assert [outcome["passed"] for outcome in box.test(TESTED, TESTS).outcomes] == [True] * 3


def measure(work: Callable[[], None], workers: int, seconds: float) -> tuple[float, float]:
    """Calls per second of that many threads, and CPU seconds of one call."""
    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(lambda _: work(), range(workers)))  # each has its process warm
        start, used = time.perf_counter(), cpu_seconds(os.getpid())

        def loop(_: int) -> int:
            count = 0
            while time.perf_counter() - start < seconds:
                work()
                count += 1
            return count

        count = sum(threads.map(loop, range(workers)))
        took = time.perf_counter() - start
        return count / took, (cpu_seconds(os.getpid()) - used) / count


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, of those it started, and of those of them that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [
        child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(child)) for child in children)


if __name__ == "__main__":
    main()

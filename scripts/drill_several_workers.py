#!/usr/bin/env python3
"""Ends `./train.sh trainer.n_workers=2` in four ways and sees what is left of it: nothing may be, within 5 seconds.

    python scripts/drill_several_workers.py [--checkout FOLDER] [--allowed 5] [--apart] [--one-step-off]

The run ends by itself, by Ctrl-C, by `kill -9`, and because one of its workers was killed. With `--apart` one worker
trains and another generates (`actor_rollout_ref.rollout.n_workers=1`), and it is the latter that is killed; with
`--one-step-off` both do so at once. With `--checkout` it is that of a fresh clone, whose `train.sh` makes its
environment first; otherwise of this one. Left could be processes (known by a temporary folder of the run's own, which
they inherit), files in shared memory, and Ray's session folder. Takes minutes; needs Ray.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
ENDS = {"by itself": None, "Ctrl-C": signal.SIGINT, "kill -9": signal.SIGKILL, "a worker killed": "worker"}
TOGETHER, APART = ["trainer.n_workers=2"], ["actor_rollout_ref.rollout.n_workers=1"]
AT_ONCE = [*APART, "trainer.one_step_off=True"]


def processes_with(folder: str) -> list[str]:
    """Processes that have this folder in their environment or command, or a file open in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            files = [os.readlink(fd) for fd in (entry / "fd").iterdir()]
        except OSError:
            continue
        if folder.encode() in told or any(file.startswith(folder + "/") for file in files):
            found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()[:60]!r}")
    return found


def ended(
    train: Path, layout: list[str], how: signal.Signals | str | None, temporary: str, work: str
) -> tuple[int, float]:
    """(exit status, seconds until nothing was left; infinity if something stayed for a minute)."""
    shared = set(os.listdir("/dev/shm"))
    steps = 5 if how is None else 1000
    command = [str(train), *layout, f"trainer.total_training_steps={steps}", "trainer.export_hf=none"]
    env = {**os.environ, "TMPDIR": temporary}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=work, env=env, start_new_session=True, **pipes) as run:
        assert run.stdout is not None
        worker = 0
        for line in run.stdout:
            if line.startswith("Rollout: process "):
                worker = int(line.split()[2])
            if how is not None and line.startswith("step 2/"):
                ranks = sum("RankHost" in words for words in processes_with(temporary))
                print(f"    at step 2: {len(processes_with(temporary))} processes, {ranks} of them ranks", flush=True)
                end(run.pid, how, worker or rank_of(temporary))
                said = [text for text in run.stdout.read().splitlines() if "worker" in text.lower()]
                print(*(f"    {text[:110]}" for text in said[:2]), sep="\n", flush=True)
                break
    started = time.monotonic()
    while left := [*processes_with(temporary), *Path(temporary).glob("posttrain-*")]:
        if time.monotonic() - started > 60:
            print("    left:", *left, sep="\n      ")
            return run.returncode, float("inf")
        time.sleep(0.05)
    stayed = [name for name in set(os.listdir("/dev/shm")) - shared if temporary in name or name.startswith("plasma")]
    return run.returncode, float("inf") if stayed else time.monotonic() - started


def end(run: int, how: signal.Signals | str, worker: int) -> None:
    if how == "worker":
        os.kill(worker, signal.SIGKILL)
    elif how == signal.SIGINT:
        os.killpg(run, signal.SIGINT)
    else:
        os.kill(run, signal.SIGKILL)


def rank_of(folder: str) -> int:
    """The process of some rank."""
    return next(int(words.split()[0]) for words in processes_with(folder) if "RankHost" in words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=HERE)
    parser.add_argument("--apart", action="store_true", help="one worker trains, another generates")
    parser.add_argument("--one-step-off", action="store_true", help="and both at once")
    parser.add_argument("--allowed", type=float, default=5.0)
    args = parser.parse_args()
    layout = AT_ONCE if args.one_step_off else APART if args.apart else TOGETHER
    failed = 0
    for name, how in ENDS.items():
        temporary, work = tempfile.mkdtemp(prefix="d", dir="/tmp"), tempfile.mkdtemp()
        print(f"{name}:", flush=True)
        try:
            status, seconds = ended(args.checkout.resolve() / "train.sh", layout, how, temporary, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            shutil.rmtree(temporary, ignore_errors=True)
        print(f"    exit status {status}, nothing left after {seconds:.1f} s", flush=True)
        failed += seconds > args.allowed
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

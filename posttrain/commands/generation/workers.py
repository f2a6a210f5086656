"""One file answered by several processes of this machine, each with a device (or a share of the cores) of its own.

A sample's seed is made of the run's seed, its prompt's row and its number, and does not depend on the worker:
the file is the same for every number of workers. Worker `k` of `n` answers the rows k, k + n, k + 2n, ... into parts of
its own; when all have ended, the result is made of them. Killed and started again, each continues where it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain import cores
from posttrain.errors import UserError

POLL_S = 0.1


@dataclass(frozen=True)
class Share:
    """The rows of worker `worker` of `workers`."""

    worker: int
    workers: int

    @classmethod
    def read(cls, text: str) -> Share:
        """`0/4`, the argument of the first of four."""
        worker, _, workers = text.partition("/")
        return cls(int(worker), int(workers))

    def has(self, row: int) -> bool:
        return row % self.workers == self.worker

    def target(self, out: Path) -> Path:
        """Where its parts lie: beside the result, under the worker's own name."""
        return out.with_name(f"{out.name}.worker_{self.worker}_of_{self.workers}")


def shares(workers: int) -> list[Share]:
    return [Share(worker, workers) for worker in range(workers)]


def run_workers(args: Sequence[str], workers: int, *, on_gpu: bool) -> None:
    """Start `posttrain generate ARGS` once per share and wait; UserError if one fails, after the others were ended."""
    places = _worker_environments(workers, on_gpu=on_gpu)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "posttrain", "generate", *args, "--workers=1", f"--share={share.worker}/{workers}"],
            # By the environment: CUDA and OpenMP read it once, when they are loaded.
            env={**os.environ, **place},
        )
        for share, place in zip(shares(workers), places, strict=True)
    ]
    failed: list[int] = []
    try:
        while not failed and any(process.poll() is None for process in running):
            time.sleep(POLL_S)
            # before the others are ended, which gives them a status that is not theirs
            failed = [number for number, process in enumerate(running) if process.poll() not in (None, 0)]
    finally:
        # All are ended before any is waited for: the slowest end costs its time once, not in turn.
        for process in running:
            if process.poll() is None:
                process.terminate()  # it keeps what it has finished
        for process in running:
            process.wait()
    if failed:
        raise UserError(
            f"worker {failed[0]} of {workers} ended with status {running[failed[0]].returncode}; what it said stands "
            "above. The same command continues with what is finished."
        )


def _worker_environments(workers: int, *, on_gpu: bool) -> list[dict[str, str]]:
    """The environment of each worker: one GPU, or its share of the cores."""
    if not on_gpu:
        return [{"OMP_NUM_THREADS": str(max(1, cores.usable() // workers))}] * workers
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    if workers > len(devices):
        raise UserError(f"--workers {workers}: this machine has {len(devices)} GPUs; give at most as many workers.")
    return [{"CUDA_VISIBLE_DEVICES": device} for device in devices[:workers]]

"""A run that is killed takes its Ray along: no process, no shared memory, no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
WAIT_S = 30.0  # about one second where nothing else runs

PROGRAM = """
import tempfile, time, torch
from posttrain.controller.ray_group import RayWorkers
workers = RayWorkers(2, torch.device("cpu"))
print(workers.cluster.folder, flush=True)
time.sleep(600)
"""


def processes_of(folder: str) -> list[int]:
    """Processes that were started with this folder, or have a file open in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            files = [os.readlink(fd) for fd in (entry / "fd").iterdir()]
            if folder.encode() in (entry / "cmdline").read_bytes() or any(f.startswith(folder + "/") for f in files):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_killed_run_leaves_no_process_no_shared_memory_and_no_folder(tmp_path):
    shared = set(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as run:
        assert run.stdout is not None
        folder = run.stdout.readline().strip()
        try:
            assert Path(folder).is_dir() and len(processes_of(folder)) > 4  # Ray's own, two ranks, the watcher
        finally:
            run.send_signal(signal.SIGKILL)
    until = time.monotonic() + WAIT_S
    while (Path(folder).exists() or processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(folder).exists() and not processes_of(folder)
    assert set(os.listdir("/dev/shm")) <= shared

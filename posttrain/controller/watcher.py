"""A program beside a run: when its input closes it ends what Ray has started, and removes Ray's folder.

    python -I -S watcher.py MARK FOLDER

It is run by its path and imports nothing of posttrain, so that it starts at once and needs nothing when all else is
gone. MARK is NAME=VALUE in the environment of Ray's processes.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator

QUIET = 3  # times that nothing is found before it is believed
EVERY_S = 0.05


def is_rays(process: str, mark: bytes, folder: str) -> bool:
    with open(f"{process}/environ", "rb") as file:
        if mark in file.read().split(b"\0"):
            return True
    # A process that gave itself a title has written over its environment; its log lies in the folder. (So does one of
    # the run's own process, which must not be taken for one of Ray's.)
    with open(f"{process}/cmdline", "rb") as file:
        if not file.read().startswith(b"ray::"):
            return False
    return any(os.readlink(f"{process}/fd/{fd}").startswith(folder + "/") for fd in os.listdir(f"{process}/fd"))


def found(mark: bytes, folder: str) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if is_rays(f"/proc/{name}", mark, folder):
                    yield int(name)
            except OSError:  # the process is gone, or belongs to another user
                pass


def main(mark: bytes, folder: str) -> None:
    sys.stdin.buffer.read()
    quiet = 0
    while quiet < QUIET:
        left = list(found(mark, folder))
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if left else quiet + 1
        time.sleep(EVERY_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1].encode(), sys.argv[2])

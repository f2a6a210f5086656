"""A node of Ray on this machine that others can reach: the head of a run over several machines, or one that joins."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from posttrain import cores
from posttrain.controller.ray_processes import CLOSE_S, Watched
from posttrain.errors import UserError

START_S = 60.0


class NoNode(UserError):
    """A node of Ray did not come up."""


class RayNode:
    """`ray start` with these options, for as long as this process lives; `close` ends it at once."""

    def __init__(self, options: Sequence[str], variables: Mapping[str, str]) -> None:
        self._watched = Watched()
        self.folder, self.environment = self._watched.folder, self._watched.environment
        self._log = Path(self.folder, "ray_start.log")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        if not any(option.startswith("--num-cpus") for option in options):
            command.append(f"--num-cpus={cores.usable()}")
        with self._watched.environment(variables), self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--temp-dir={self.folder}", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._come_up()
        except BaseException:
            self.close()
            raise

    def _come_up(self) -> None:
        until = time.monotonic() + START_S
        while not Path(self.folder, "ray_current_cluster").exists():  # written when all of the node runs
            if self.ended() or time.monotonic() > until:
                why = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
                raise NoNode(f"`ray start` gave no node on this machine. Its last words:\n{why}")
            time.sleep(0.1)

    def ended(self) -> bool:
        """Whether the node has gone, as it does some time after its head."""
        return self._process.poll() is not None

    def ranks(self) -> int:
        """Processes of a run's ranks on this node."""
        return sum(1 for _ in self._ranks())

    def _ranks(self) -> Iterator[str]:
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                if Path("/proc", name, "cmdline").read_bytes().startswith(b"ray::RankHost"):
                    files = [os.readlink(fd) for fd in Path("/proc", name, "fd").iterdir()]
                    if any(file.startswith(self.folder + "/") for file in files):
                        yield name
            except OSError:  # it is gone, or somebody else's
                continue

    def close(self) -> None:
        """The watcher ends the node; `ray start` itself may have lost its mark."""
        self._watched.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)

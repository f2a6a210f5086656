"""The processes of `posttrain serve --accept-weights` whose engine is held by several: one for each device.

The server is rank 0. It starts the others as the same command with the variable POSTTRAIN_SERVE_PART, so that each
loads the model and makes its part of the engine; they make the calls that it forwards (`rollout/server/ranks.py`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from posttrain import cores
from posttrain.engine.ranks import join_ranks, team_of
from posttrain.errors import UserError
from posttrain.kernels.tensor_parallel import Team
from posttrain.rollout.server.ranks import Follower
from posttrain.tracking.console import print_text

VARIABLE = "POSTTRAIN_SERVE_PART"


@dataclass(frozen=True)
class Part:
    """Which process this is, among how many that hold the engine together."""

    rank: int = 0
    ranks: int = 1
    address: str = ""
    cache: dict[str, Any] = field(default_factory=dict)
    """What the first has planned for the cache: all must have as many blocks of it."""

    def device(self, device: torch.device) -> torch.device:
        """This process's own, of the kind of `device`."""
        if self.ranks == 1 or device.type != "cuda":
            return device
        if (there := torch.cuda.device_count()) < self.ranks:
            raise UserError(f"tensor_model_parallel_size={self.ranks}: this machine has {there} GPUs; set it to fewer")
        return torch.device("cuda", self.rank)

    def join(self, device: torch.device) -> Team | None:
        """Meets the other processes."""
        if self.ranks == 1:
            return None
        if device.type == "cpu":
            torch.set_num_threads(max(1, cores.usable() // self.ranks))
        join_ranks(self.rank, self.ranks, self.address, device)
        return team_of(self.ranks, device)


ALONE = Part()


class Losses:
    """Is called, in any thread, when a process of the engine is lost: ends this process until `tell` is replaced."""

    def __init__(self) -> None:
        self.tell: Callable[[str], None] = leave

    def __call__(self, problem: str) -> None:
        self.tell(problem)


def leave(problem: str = "", status: int = 2) -> None:
    """Ends this process at once: its engine may wait for a process that is gone, and threads that wait are joined at an
    ordinary exit."""
    if problem:
        print_text(f"{problem}\n  to do:  look at the output above, and start the server again", sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start_ranks(args: Sequence[str], part: Part, lost: Callable[[str], None]) -> list[Follower]:
    """All processes but this one; `args` are those of the command."""
    followers = []
    for rank in range(1, part.ranks):
        mine, theirs = Pipe()
        own = json.dumps({"fd": theirs.fileno(), "part": asdict(part) | {"rank": rank}})
        process = subprocess.Popen(
            [sys.executable, "-m", "posttrain", "serve", *args],
            env={**os.environ, VARIABLE: own},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the first, which ends the others
        )
        theirs.close()
        followers.append(Follower(rank, mine, lost, process))
    return followers


def part_of_this_process() -> tuple[Part, Connection] | None:
    """Of a process that `start_ranks` has started: its part, and its connection to the first."""
    words = os.environ.pop(VARIABLE, None)
    if words is None:
        return None
    given = json.loads(words)
    return Part(**given["part"]), Connection(given["fd"])

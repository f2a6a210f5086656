"""Ranks of a test as forks of this process, which has imported everything: they meet by gloo and leave together."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from posttrain.engine.ranks import join_ranks, leave_ranks


def run_ranks(ranks: int, work: Callable[..., None], *arguments: Any) -> bool:
    """`work(rank, ranks, *arguments)` in as many processes; whether all came to its end. Their errors are printed."""
    port = _free_port()
    children = [_forked(rank, ranks, port, work, arguments) for rank in range(ranks)]
    return not any([os.waitpid(child, 0)[1] for child in children])


def _forked(rank: int, ranks: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        join_ranks(rank, ranks, f"127.0.0.1:{port}", torch.device("cpu"), timeout_s=120)
        work(rank, ranks, *arguments)
        if ranks > 1:  # nobody leaves while another still connects to a group that was made last
            torch.distributed.barrier()
        leave_ranks()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

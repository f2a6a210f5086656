"""Ranks without Ray: processes that this one starts and calls by pipes. They may share a GPU, and meet by gloo."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import patience

from posttrain.controller.group import Future, WorkerGroup
from posttrain.controller.pool import Workers
from posttrain.controller.rank_host import Failure, RankHost, pack, unpack


def serve(rank: int, ranks: int, device: str, address: str, calls: Connection) -> None:
    """The process of a rank: makes the calls that come, one at a time."""
    host = RankHost(rank, ranks, device, 1, os.getcwd(), sys.path)
    import torch

    from posttrain.engine.ranks import join_ranks

    join_ranks(rank, ranks, address, torch.device(device), timeout_s=60, backend="gloo")
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            method, arguments = calls.recv()
            calls.send(getattr(host, method)(*arguments))


class Rank:
    """A rank's process; its answers come in the order of the calls."""

    def __init__(self, *arguments: Any) -> None:
        spawned = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawned.Pipe()
        self.process = spawned.Process(target=serve, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.sent = 0
        self.answers: list[Any] = []

    def send(self, method: str, *arguments: Any) -> int:
        self.pipe.send((method, arguments))
        self.sent += 1
        return self.sent - 1

    def answered(self, number: int) -> bool:
        while len(self.answers) <= number and self.pipe.poll():
            self.answers.append(self.pipe.recv())
        return len(self.answers) > number

    def answer(self, number: int) -> Any:
        while len(self.answers) <= number:
            assert self.pipe.poll(patience.PROGRAM_S), f"process {self.process.pid} does not answer"
            self.answers.append(self.pipe.recv())
        value, self.answers[number] = unpack(self.answers[number]), None
        if isinstance(value, Failure):
            raise value.as_raised()
        return value


class PipeFuture(Future):
    def __init__(self, calls: list[tuple[Rank, int]], join: Callable[[list[Any]], Any]) -> None:
        self.calls, self.join = calls, join

    def done(self) -> bool:
        return all(rank.answered(number) for rank, number in self.calls)

    def result(self) -> Any:
        return self.join([rank.answer(number) for rank, number in self.calls])


class PipeGroup(WorkerGroup):
    overlaps = True

    def __init__(self, role: str, worker: type, config: Any, ranks: list[Rank]) -> None:
        self.role, self.worker_class, self.config, self.ranks = role, worker, config, ranks
        self.world_size = len(ranks)

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> PipeFuture:
        process = self.ranks[rank]
        return PipeFuture(
            [(process, process.send("call", self.role, name, pack(arguments)))], lambda results: results[0]
        )

    def _joined(self, parts: list[Any], join: Callable[[list[Any]], Any]) -> PipeFuture:
        def joined(results: list[Any]) -> Any:
            left = iter(results)
            return join([part.join([next(left) for _ in part.calls]) for part in parts])

        return PipeFuture([call for part in parts for call in part.calls], joined)

    def wait_any(self, futures: Sequence[Any]) -> None:
        while futures and not any(future.done() for future in futures):
            time.sleep(0.001)


class PipeWorkers(Workers):
    """Ranks in processes of this machine, all of them on one device."""

    def __init__(self, ranks: int, device: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.world_size = ranks
        self.ranks = [Rank(rank, ranks, device, address) for rank in range(ranks)]

    def create(self, role: str, worker: type, *arguments: Any, **named: Any) -> WorkerGroup:
        parcel = pack((worker, arguments, named))
        for rank, number in [(rank, rank.send("build", role, *parcel)) for rank in self.ranks]:
            rank.answer(number)
        config = next((value for value in arguments if hasattr(value, "trainer")), None)
        return PipeGroup(role, worker, config, self.ranks)

    def words(self) -> str:
        return f"{self.world_size} processes that share a device"

    def close(self) -> None:
        for rank in self.ranks:
            rank.pipe.close()
            rank.process.join(5)

"""A server's engine that several processes hold together: the first forwards each call to the others and makes it, too.

Processes that hold one engine must get the same calls in the same order. Only the first has a connection to the run;
it has a `Follower` for each other process, where `follow` makes the calls. Both sides belong to one command on one
machine, so messages are pickles over a pair of sockets. After each call the first compares what all have computed.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from signal import Signals
from typing import Any, NoReturn

import torch

from posttrain.errors import UserError
from posttrain.rollout.base import Output, Request, RolloutEngine, Stage, WrappedEngine, digest
from posttrain.rollout.server.wire import read_bucket, write_bucket
from posttrain.rollout.weight_buckets import split_into_buckets

GRACE_S = 10.0
"""How long the other processes may take to end a call that one of them cannot end."""


class RankError(UserError):
    """A process of a server's engine died, failed, or computed something else than the others: the engine is lost."""


@dataclass(frozen=True)
class Reply:
    """What a call came to: a checksum of its result, or its error."""

    digest: int = 0
    error: str = ""


class Follower:
    """Another process of the engine, as the first one sees it. `lost` is called, in any thread, with what happened to
    it where no call can say so: the first process may wait for it in the middle of a step."""

    def __init__(
        self,
        rank: int,
        connection: Connection,
        lost: Callable[[str], None],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.rank, self.connection, self.process, self._lost = rank, connection, process, lost
        self.problem: str | None = None
        self._replies: queue.Queue[Reply | None] = queue.Queue()
        self._ending = False
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        threading.Thread(target=self._read, daemon=True, name=f"rank-{rank}").start()

    @property
    def name(self) -> str:
        number = f" (process {self.process.pid})" if self.process else ""
        return f"rank {self.rank}{number} of this server's engine"

    def send(self, name: str, given: tuple[Any, ...], body: bytes | None = None) -> None:
        """A call, for `follow`. `body` is a bucket of weights: its first argument."""
        try:
            self.connection.send((name, given, body is not None))
            if body is not None:
                self.connection.send_bytes(body)
        except OSError:
            raise RankError(self.end()) from None

    def reply(self, timeout_s: float | None = None) -> Reply:
        """To the oldest call without one. RankError if the process died; queue.Empty if it takes too long."""
        found = self._replies.get(timeout=timeout_s)
        if found is None:
            raise RankError(self.end())
        return found

    def _read(self) -> None:
        try:
            while True:
                found = self.connection.recv()
                self._replies.put(found)
                if found.error and not self._is_read_within(GRACE_S):
                    self._report(f"{self.name} failed, and the others wait for it: {found.error}")
        except (EOFError, OSError):
            self._report(self.end())
            self._replies.put(None)

    def _is_read_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._replies.empty():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def _report(self, problem: str) -> None:
        if not self._ending:
            self.problem = self.problem or problem
            self._lost(problem)

    def end(self) -> str:
        """How it ended."""
        status: int | None = None
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                status = self.process.wait(GRACE_S)
        how = "its connection was lost" if status is None else f"with status {status}"
        if status is not None and status < 0:
            how = f"killed by {Signals(-status).name}"
        return f"{self.name} died: {how}"

    def has_ended(self) -> bool:
        """Whether it is gone; a little later than its last message."""
        end = time.monotonic() + 1.0
        while self.problem is None and time.monotonic() < end:
            time.sleep(0.02)
        return self.problem is not None

    def close(self) -> None:
        """Its process ends by itself when its connection is closed."""
        self._ending = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # `close` would not reach a thread that reads
        if self.process is not None:
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class MirroredEngine(WrappedEngine):
    """This process's part of an engine, whose calls the `followers` make as well."""

    def __init__(self, inner: RolloutEngine, followers: Sequence[Follower], lost: Callable[[str], None]) -> None:
        super().__init__(inner)
        self.followers, self._lost = followers, lost
        self.problem: str | None = None

    @property
    def ranks(self) -> int:  # pyright: ignore
        return 1 + len(self.followers)

    # -- calls that change something, or in which the processes wait for each other ---------------------------------
    def submit(self, request: Request) -> None:
        self._all("submit", request)

    def step(self) -> list[Output]:
        return self._all("step")

    def abort(self, ids: Iterable[Hashable]) -> list[Output]:
        return self._all("abort", list(ids))

    def release(self, ids: Iterable[Hashable]) -> None:
        self._all("release", list(ids))

    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        return self._all("score", token_ids, temperature)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Each process compares the checksums of what reached it before it loads it."""
        for bucket in split_into_buckets(weights):
            self._all("load_weights", bucket, version, body=write_bucket(bucket))

    def let_go(self) -> None:
        self._all("let_go")

    def sleep(self) -> None:
        self._all("sleep")

    def wake(self, *stages: Stage) -> None:
        self._all("wake", *stages)

    def close(self) -> None:
        """Ends the other processes."""
        if self.problem is None:
            self._all("close")
        for follower in self.followers:
            follower.close()

    def _all(self, name: str, *given: Any, body: bytes | None = None) -> Any:
        if (problem := self.problem or next((one.problem for one in self.followers if one.problem), None)) is not None:
            raise RankError(problem)
        for follower in self.followers:
            follower.send(name, given if body is None else given[1:], body)
        found, error = None, None
        try:
            found = make_call(self.inner, name, given)
        except Exception as raised:
            error = raised
        for follower in self.followers:
            try:
                reply = follower.reply(GRACE_S if error else None)
            except queue.Empty:
                raise self._out_of_step(f"{follower.name} is still in `{name}`, which failed here: {error}") from error
            if reply.error and error is None:
                raise self._out_of_step(f"{follower.name} failed in `{name}`: {reply.error}")
            if error is not None and not reply.error:
                raise self._out_of_step(f"`{name}` failed here and not in {follower.name}: {error}") from error
            if error is None and reply.digest != digest_of(found):
                raise self._out_of_step(
                    f"{follower.name} has another result of `{name}` than the first: a device computes wrongly, or the "
                    "processes do not run the same program"
                )
        if error is not None:
            raise error
        return found

    def _out_of_step(self, problem: str) -> RankError:
        self.problem = problem
        self._lost(problem)
        return RankError(problem)


def make_call(engine: Any, name: str, given: tuple[Any, ...]) -> Any:
    """One call of `MirroredEngine`, in any of the processes."""
    if name == "load_weights":
        bucket, version = given
        return engine.load_weights(bucket.tensors.items(), version)
    if name == "score":
        return engine.score(given[0], temperature=given[1])
    if name == "close":
        return engine.close() if hasattr(engine, "close") else None
    return getattr(engine, name)(*given)


def digest_of(found: Any) -> int:
    """Of a call's result: outputs, tensors, or nothing."""
    if not isinstance(found, list) or not found:
        return 0
    if isinstance(found[0], Output):
        return digest(found)
    return zlib.crc32(b"".join(part.float().cpu().numpy().tobytes() for part in found))


def follow(connection: Connection, build: Callable[[], RolloutEngine]) -> NoReturn:
    """In another process than the first: builds this process's part of the engine, and makes the calls of the first
    until that closes the connection. The process ends then at once, also in the middle of a call: without the first
    no call can be ended."""
    calls: queue.Queue[tuple[str, tuple[Any, ...], bytes | None]] = queue.Queue()

    def read() -> None:
        try:
            while True:
                name, given, has_body = connection.recv()
                calls.put((name, given, connection.recv_bytes() if has_body else None))
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, daemon=True, name="calls").start()
    engine: Any = None
    try:
        engine = build()
        connection.send(Reply())
    except Exception as error:
        connection.send(Reply(error=_said(error)))
    while True:
        name, given, body = calls.get()
        try:
            if body is not None:
                bucket = read_bucket(body)
                bucket.check()
                given = (bucket, *given)
            connection.send(Reply(digest_of(make_call(engine, name, given))))
        except Exception as error:
            connection.send(Reply(error=_said(error)))


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"

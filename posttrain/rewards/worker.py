"""A reward worker: `python -m posttrain.rewards.worker FD PARENT`; imports the reward once, then scores for RewardPool.

In:  the RewardSpec, then chunks of tasks [(task id, [pickled Fields, ...]), ...]
Out: ("ready", spec) or ("failed", what, todo); ("print", line); ("wait", seconds);
     ("done", task id, [(score, parts, error), ...], seconds)
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from posttrain.rewards.failures import describe_exception
from posttrain.rewards.loading import load_scores
from posttrain.rewards.outcomes import Outcome, ScoreItems, failure
from posttrain.rewards.types import RewardError

PRINT_LINES, PRINT_CHARS = 20, 2000
"""How much one sample may print before the rest is cut."""
_SLOW_IMPORT_S = 60.0


def main() -> None:
    """Serve one parent until it hangs up."""
    _die_with_parent(int(sys.argv[2]))
    channel = _Channel(Connection(int(sys.argv[1])))
    spec = channel.conn.recv()
    out = _Lines(channel)
    sys.stdout = sys.stderr = out
    if spec.code:
        from posttrain.rewards.scorers import code

        code.configure(**spec.code)
    try:
        score, spec = load_scores(spec)
    except RewardError as error:
        channel.send(("failed", error.what, error.todo))
        return
    except BaseException as error:
        channel.send(("failed", f"the reward could not be loaded: {describe_exception(error)}", ""))
        return
    _announce_slow_imports(channel)
    channel.send(("ready", spec))
    while True:
        for task, payloads in channel.conn.recv():
            out.new_sample()
            start = time.perf_counter()
            outcomes = score_task(score, payloads)
            out.flush_line()
            channel.send(("done", task, outcomes, time.perf_counter() - start))


def score_task(score: ScoreItems, payloads: Sequence[bytes]) -> list[Outcome]:
    """One outcome per payload; whatever happens is turned into an outcome."""
    try:
        items = [pickle.loads(payload) for payload in payloads]
        _seed("\n".join(str(item[1]) for item in items))
        return score(items)
    except BaseException as error:
        return [failure(describe_exception(error))] * len(payloads)


def _seed(text: str) -> None:
    """Seed the usual generators by the sample: a score does not depend on which worker computed it, or after what."""
    seed = zlib.crc32(text.encode("utf-8", "surrogatepass"))
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens (elsewhere EOF has to do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(0)


def _announce_slow_imports(channel: _Channel) -> None:
    from posttrain.rewards.scorers import math as math_scorer

    math_scorer.before_slow_import = lambda: channel.send(("wait", _SLOW_IMPORT_S))


class _Channel:
    """The connection, safe to use from the user's threads too."""

    def __init__(self, conn: Connection[Any, Any]) -> None:
        self.conn, self._lock = conn, threading.Lock()

    def send(self, message: tuple[Any, ...]) -> None:
        with self._lock:
            self.conn.send(message)


class _Lines(io.TextIOBase):
    """Stands for stdout and stderr: sends whole lines to the parent, and per sample no more than a screen."""

    def __init__(self, channel: _Channel) -> None:
        self._channel, self._pid, self._rest = channel, os.getpid(), ""
        self.new_sample()

    def new_sample(self) -> None:
        self._lines, self._chars, self._rest = 0, 0, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if os.getpid() != self._pid:  # a forked child must not speak on its parent's connection
            return os.write(2, text.encode())
        if self._lines <= PRINT_LINES:
            *lines, self._rest = (self._rest + text[: PRINT_CHARS * 2]).split("\n")
            for line in lines:
                self._send(line)
            if len(self._rest) > PRINT_CHARS:
                self.flush_line()
        return len(text)

    def flush_line(self) -> None:
        if self._rest:
            self._send(self._rest)
            self._rest = ""

    def _send(self, line: str) -> None:
        if self._lines > PRINT_LINES:
            return
        self._lines, self._chars = self._lines + 1, self._chars + len(line)
        if self._lines > PRINT_LINES or self._chars > PRINT_CHARS:
            self._lines, line = PRINT_LINES + 1, "... cut"
        self._channel.send(("print", line))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent hung up
        main()
    # Threads that the user's function left behind must not keep the process alive.
    os._exit(0)

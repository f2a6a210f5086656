"""Rollout servers: in another process, as a user starts one, and in a thread of this one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from posttrain.rollout.base import RolloutEngine
from posttrain.rollout.server.host import EngineHost, make_app

KEY = "key-of-the-tests"
ROOT = Path(__file__).parents[2]


# Prints its number first: the process that a test starts may only stand for it.
SERVE = (
    "import os, sys; from posttrain.cli import main; print(os.getpid(), file=sys.stderr, flush=True); sys.exit(main())"
)


class Served:
    """A server and its address."""

    def __init__(self, number: int, url: str) -> None:
        self.number, self.url = number, url

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.number, signal.SIGKILL)


@contextmanager
def served(
    python: str, model: Any, *options: str, before: str = "", after: list[str] | None = None
) -> Iterator[Served]:
    """A server of this model in another process, which runs the code `before` first and is gone afterwards; what it
    says at its end goes to `after`."""
    words = [python, "-c", before + SERVE, "serve", str(model), "--accept-weights", "--port", "0", "--device", "cpu"]
    words += options
    environment = {**os.environ, "POSTTRAIN_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    number, said = int(process.stderr.readline()), []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"(http://[0-9.:]+) generates for a run", line):
                yield Served(number, found[1])
                break
        else:
            raise AssertionError("".join(said))
    finally:
        Served(number, "").kill()
        process.wait()
        rest = process.stderr.read()
        if after is not None:
            after.append(rest)
        process.stderr.close()


@contextmanager
def hosted(engine: RolloutEngine, description: dict[str, Any], key: str = KEY) -> Iterator[str]:
    """The address of a server over this engine, in a thread of this process."""
    loop, began, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[str] = []

    async def main() -> None:
        runner = web.AppRunner(make_app(EngineHost(engine, description), key), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        began.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    assert began.wait(30)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()

"""The way to SGLang's engine: one thread that alone calls it, and an eye on the processes that it has started.

SGLang sets signals, environment variables, log handlers and the way processes start for the whole process that makes
it, and ends all children of that process with its own. Here it finds a thread of its own, what it has set is set back,
and only its own processes end with it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from posttrain.rollout.sglang.inside import run_scheduler

PATIENCE = 1.0  # seconds between two checks that SGLang's processes are still alive


class Link:
    """An SGLang engine made with `arguments`; `do` calls a function in its thread."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.hand = ThreadPoolExecutor(1, "sglang")
        self.processes: list[Any] = []
        self.ended = False
        self._listen()
        with _all_set_back():
            self.engine = self.hand.submit(self._made, arguments).result()
        atexit.register(self.close)

    def _listen(self) -> None:
        """SGLang tells a failure of its processes by a signal, which would end this one without a word."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, lambda number, frame: setattr(self, "ended", True))

    def _made(self, arguments: dict[str, Any]) -> Any:
        import psutil
        from sglang.srt.entrypoints.engine import Engine  # pyright: ignore

        class OwnEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

        before = {child.pid for child in psutil.Process().children(recursive=True)}
        try:
            engine = OwnEngine(**arguments)
        except BaseException:
            _end(_children_since(before))
            raise
        atexit.unregister(engine.shutdown)  # it would end every child of this process
        self.processes = _children_since(before)
        return engine

    def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the function gives in SGLang's thread; its errors come here."""
        asked = self.hand.submit(function, *args, **kwargs)
        while not wait([asked], timeout=PATIENCE).done:
            if self.ended or any(not _is_there(process) for process in self.processes):
                raise RuntimeError("SGLang's own process has ended; what it said is above")
        return asked.result()

    def run(self, coroutine: Any) -> Any:
        """The same of a coroutine in SGLang's event loop, which moves only meanwhile."""
        return self.do(lambda: self.engine.loop.run_until_complete(coroutine))

    def close(self) -> None:
        """Its processes end, and its memory is free."""
        atexit.unregister(self.close)
        watchdog = getattr(getattr(self.engine, "tokenizer_manager", None), "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()  # it would take this end for a failure
        _end(self.processes)
        self.processes = []
        self.hand.shutdown(wait=False)


def _children_since(before: set[int]) -> list[Any]:
    import psutil

    return [child for child in psutil.Process().children(recursive=True) if child.pid not in before]


def _end(processes: list[Any]) -> None:
    for process in processes:
        if _is_there(process):
            process.kill()
            process.wait(10)


def _is_there(process: Any) -> bool:
    return process.is_running() and process.status() != "zombie"


@contextmanager
def _all_set_back() -> Iterator[None]:
    """Around the making of SGLang's engine: what it sets for this whole process is as it was."""
    root, variables = logging.getLogger(), dict(os.environ)
    handlers, level = root.handlers[:], root.level
    starting, policy = multiprocessing.get_start_method(allow_none=True), asyncio.get_event_loop_policy()
    try:
        yield
    finally:
        root.handlers[:], root.level = handlers, level
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        multiprocessing.set_start_method(starting, force=True)
        asyncio.set_event_loop_policy(policy)

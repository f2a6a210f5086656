"""Threads: `Every` repeats a call, `Background` writes files while the next step is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Every:
    """Calls `act` every `seconds`, in a thread of its own that never keeps the process alive."""

    def __init__(self, seconds: float, act: Callable[[], object]) -> None:
        self._seconds, self._act = seconds, act
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="posttrain-every", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # The wait is the pause: closing ends it at once instead of after the rest of the period.
        while not self._closed.wait(self._seconds):
            self._act()

    def close(self) -> None:
        """Once this returns, `act` is not running and will not be called again."""
        self._closed.set()
        # `act` itself may close it; a thread that joins itself would wait for ever.
        if self._thread is not threading.current_thread():
            self._thread.join()


class Background:
    """Runs work in a thread, one piece at a time and in order, so that at most one step's samples wait in memory.

    An error is raised by the next call of `run` or `wait`: a little later, but never lost.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self, work: Callable[[], object]) -> None:
        """Start `work` when the piece before it is done."""
        self.wait()

        def piece() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        # Not a daemon: a process that ends normally waits until the files are written.
        self._thread = threading.Thread(target=piece, name=self.name)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way; raises what the last piece raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

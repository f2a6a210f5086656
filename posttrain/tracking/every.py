"""Every: something done again and again beside the main thread, until it is closed."""

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
        while not self._closed.wait(self._seconds):
            self._act()

    def close(self) -> None:
        """`act` is not running and will not be called again once this returns."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

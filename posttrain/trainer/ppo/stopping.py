"""Ctrl-C and SIGTERM: the first one finishes the step, saves and leaves; a second Ctrl-C leaves at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class GracefulStop:
    """Inside `with`, `requested` holds the signal that asked the run to stop, if any."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            self.say("Leaving at once. The same command continues from the newest checkpoint.")
            raise KeyboardInterrupt
        self.requested = signal.Signals(number)
        self.say(f"{self.requested.name}: finishing this step, then saving. Press Ctrl-C again to leave at once.")

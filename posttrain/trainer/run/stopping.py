"""Ctrl-C and SIGTERM: the first one finishes the step, saves and leaves; a second Ctrl-C leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from posttrain import interrupts
from posttrain.tracking.console import active


class GracefulStop:
    """Inside `with`, `requested` holds the signal that asked the run to stop, if any."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}
        self._left = False

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore
        if self._left:
            interrupts.left()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The first signal only sets a flag: the step is finished and saved. An exception raised here could arrive
        # inside a collective or a half-written file.
        if self._left:
            interrupts.once_more()
        elif self.requested is not None and number == signal.SIGINT:
            self._left = True
            interrupts.leaving()
            self._tell("Leaving at once. The same command continues from the newest checkpoint.")
            raise KeyboardInterrupt
        else:
            self.requested = signal.Signals(number)
            self._tell(f"{self.requested.name}: finishing this step, then saving. Press Ctrl-C again to leave at once.")

    def _tell(self, text: str) -> None:
        if (console := active()) is not None:
            console.alert(text)
        try:
            self.say(text)
        except RuntimeError:  # the signal came while the console was being written, which cannot be done twice at once
            os.write(2 if console is None else console.err.fileno(), f"{text}\n".encode())

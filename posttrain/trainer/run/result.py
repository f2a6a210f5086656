"""How a run ends: its result, the error of one that stopped itself, and the signals that ask it to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from posttrain import interrupts
from posttrain.errors import UserError
from posttrain.tracking.console import active


class TrainingStopped(UserError):
    """The run ended before its last step; the text says why."""


@dataclass
class RunResult:
    """What a run gave: its directory, how it ended, and the metrics of every step."""

    path: Path
    status: str
    steps: int
    metrics: list[dict[str, Any]] = field(default_factory=list)
    validation: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    stopped_by: int | None = None
    restarts: int = 0  # how often its workers were started again
    replaced: int = 0  # rollout workers that were replaced while the others continued

    def __str__(self) -> str:
        return f"{self.status} at step {self.steps}{self._reached()}: {self.path}"

    def _reached(self) -> str:
        """The last validation's means, else the last reward or loss."""
        found = {name: value for name, value in (self.validation[-1][1] if self.validation else {}).items()}
        shown = {name: value for name, value in found.items() if "/mean@" in name} or found
        if not shown and self.metrics:
            shown = {name: self.metrics[-1][name] for name in ("reward_mean", "train/loss") if name in self.metrics[-1]}
        return "".join(f", {name} {value:.3f}" for name, value in list(shown.items())[:3])

    @property
    def exit_status(self) -> int:
        """0, or what a shell expects of a program that a signal ended."""
        return 0 if self.stopped_by is None or self.status == "finished" else 128 + self.stopped_by


_WHILE_STOPPING = "came_while_stopping"  # of an error


def came_while_stopping(error: BaseException) -> bool:
    """Whether a signal had asked the run to stop when this error came."""
    return getattr(error, _WHILE_STOPPING, False)


class GracefulStop:
    """Inside `with`, `requested` holds the signal that asked the run to stop, if any.

    The first Ctrl-C or SIGTERM lets the step finish and save; a second Ctrl-C ends the run at once.
    """

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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.requested is not None:
            setattr(error, _WHILE_STOPPING, True)
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

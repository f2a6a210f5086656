"""What a run gives its caller, and the error of one that stopped itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import UserError


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

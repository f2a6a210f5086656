"""The contract between the supervised loop and what it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from posttrain.controller.group import WorkerGroup

Metrics = dict[str, float]
ROLE = "model"
"""Of the workers, and the folder of a checkpoint that holds their weights and optimizer state."""


class Task(ABC):
    """Data, a model and a loss. `rows` is the number of training rows, `curve` the metric that is drawn at the end."""

    group: WorkerGroup
    """The workers that hold the model, its optimizer and its loss; here are the rows."""
    tokenizer: Any
    rows: int
    curve: str
    config: Any
    adapters: dict[str, Any] | None
    """What a checkpoint says of the adapters and their base; None where all weights are trained."""

    @abstractmethod
    def train_step(self, rows: list[int]) -> Metrics:
        """One optimizer step on these rows; gives `loss`, the engine's metrics, `tokens` and the task's own."""

    @abstractmethod
    def validate(self) -> Metrics | None:
        """Metrics of the held-out rows by their logged names; None where there are none."""

    @abstractmethod
    def pieces(self, metrics: Mapping[str, float]) -> list[tuple[int, str | None]]:
        """A step's line in (importance, text); what does not fit one row is left out, least important first."""

    @abstractmethod
    def validation_line(self, metrics: Mapping[str, float]) -> str:
        """A validation's metrics on one line."""

    @abstractmethod
    def goodness(self, validation: Mapping[str, float]) -> float:
        """By which the best checkpoint is chosen, largest best."""

"""The contract between the supervised loop and what it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from posttrain.controller.group import WorkerGroup
from posttrain.controller.pool import LocalWorkers, Workers

Metrics = dict[str, float]
ROLE = "model"
"""Of the workers, and the folder of a checkpoint that holds their weights and optimizer state."""


class Task(ABC):
    """Data, a model and a loss. `rows` is the number of training rows, `curve` the metric that is drawn at the end."""

    worker: type
    """Holds the model, its optimizer and its loss; here are the rows."""
    curve: str

    def __init__(
        self,
        config: Any,
        *,
        tokenizer: Any,
        train: Any,
        val: Any | None,
        device: torch.device,
        total_steps: int,
        workers: Workers | None = None,
    ) -> None:
        self.config, self.tokenizer, self.train, self.val, self.rows = config, tokenizer, train, val, len(train)
        made = (workers or LocalWorkers()).create(ROLE, self.worker, config, tokenizer, device, total_steps=total_steps)
        self.group: WorkerGroup = made
        self.group.init_model()
        self.adapters: dict[str, Any] | None = self.group.lora_state()
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

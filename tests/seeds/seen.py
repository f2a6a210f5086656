"""A small run with all there is to look at: console, log, metrics, samples, checkpoint and the trainer itself."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))
from runs import metrics_of, parity_reward, settings  # noqa: F401 (the tests take them from here)

from posttrain.protocol import DataProto
from posttrain.trainer.ppo import runner
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT_3 = [
    {"prompt": "计算 15 + 27 = ?", "ground_truth": "42", "data_source": "math_reasoning"},
    {"prompt": "What is 6 x 7?", "ground_truth": "42", "data_source": "math_reasoning"},
    {"prompt": "One half of 84?", "ground_truth": "42", "data_source": "math_reasoning"},
    {"prompt": "20 + 20 = ?", "ground_truth": "40", "data_source": "math_reasoning"},
]


class Watched(RayPPOTrainer):
    """The trainer, which also keeps each step's batch, what it did in which order, and log-probs before updates."""

    made: ClassVar[list[Watched]] = []

    def __init__(self, *args: Any, **named: Any) -> None:
        Watched.made.append(self)
        self.calls: list[str] = []
        self.batches: list[DataProto] = []
        self.log_probs_before_update: list[torch.Tensor] = []
        super().__init__(*args, **named)

    def _load_checkpoint(self) -> None:
        before = self.step
        super()._load_checkpoint()
        if self.step != before:
            self.calls.append(f"resume at {self.step}")

    def _generate(self, batch: DataProto) -> DataProto:
        self.calls.append(f"generate after {self.step}")
        return super()._generate(batch)

    def _update(self, batch: DataProto, step: int) -> dict[str, float]:
        self.batches.append(batch)
        self.log_probs_before_update.append(self.actor_rollout_wg.compute_log_prob(batch).batch["old_log_probs"])
        return super()._update(batch, step)


@dataclass
class Seen:
    """What a run left behind. `status` is the exit status where a command was run."""

    trainer: Watched
    console: str
    status: int | None = None
    _samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.trainer.run.path

    @property
    def log(self) -> str:
        return (self.path / "logs" / "run.log").read_text()

    @property
    def config(self) -> dict[str, Any]:
        return yaml.safe_load((self.path / "config.yaml").read_text())

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl, that of a validation at step 0 included."""
        return metrics_of(self.path, times=True)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["step"] > 0]

    @property
    def updates(self) -> int:
        """Optimizer steps that the actor has made in all."""
        return self.trainer.actor_rollout_wg.worker.engine.optimizer.steps_done

    def samples(self, step: int = 1) -> list[dict[str, Any]]:
        if step not in self._samples:
            self._samples[step] = pq.read_table(self.path / "samples" / f"step_{step}.parquet").to_pylist()
        return self._samples[step]


def groups(samples: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Samples by uid."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in samples:
        found.setdefault(row["uid"], []).append(row)
    return found


def relative_to_group(scores: list[float], *, divide: bool = True) -> list[float]:
    """GRPO's advantages of one group, by the textbook: sample deviation, epsilon 1e-6."""
    mean = math.fsum(scores) / len(scores)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
    return [(score - mean) / (deviation + 1e-6) if divide else score - mean for score in scores]


def see(call: Callable[[], Any]) -> Seen:
    """Run `call`, which trains once, and look at it; an exit status that it gives is kept."""
    Watched.made.clear()
    console = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(console):
        patch.setattr(runner, "RayPPOTrainer", Watched)
        given = call()
    assert len(Watched.made) == 1, console.getvalue()
    return Seen(Watched.made.pop(), console.getvalue(), given if isinstance(given, int) else None)


@contextlib.contextmanager
def chdir(folder: Path, **variables: str) -> Iterator[None]:
    """Inside, `folder` is the working folder and the environment has these variables."""
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)

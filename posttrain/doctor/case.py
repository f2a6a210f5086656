"""Case: the run that is examined, and what several checks share: tokenizer, rows, sizes, the model's shape."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.config.resolved import Resolved
from posttrain.config.schema import lookup
from posttrain.config.trees import PPO, Tree
from posttrain.doctor.report import Report
from posttrain.planning.budgets import planner_for
from posttrain.planning.memory_plan import Device, Planner, find_device
from posttrain.rewards.pool import pool_size

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Run:
    """A run's length: training steps, optimizer steps, and the most checkpoints on disk at a time."""

    steps: int
    updates: int
    saves: int


@dataclass
class Case:
    """`config` is a copy, because checks adjust sizes to the data. Later checks read what earlier ones filled in."""

    resolved: Resolved
    tree: Tree
    report: Report
    config: Any = None
    # By split, filled by the check of the data: rows as in the files, tokenized rows (missing if they cannot be read),
    # and how many rows of the whole file training would use.
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    datasets: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    turns: Any = None  # the ConversationLoop with the run's tools and agents, filled by their check
    schemas: list[dict[str, Any]] = field(default_factory=list)  # of the run's tools; every prompt contains them
    reward_s: float = 0.0  # seconds of one call of the reward, filled by its check
    run: Run | None = None  # filled by the check of the batch

    def __post_init__(self) -> None:
        self.config = copy.deepcopy(self.resolved.config)

    @property
    def is_rl(self) -> bool:
        return self.tree is PPO

    @property
    def is_pairs(self) -> bool:
        """Whether a reward model is trained."""
        return self.tree.main == "reward_model_trainer"

    @property
    def model(self) -> Any:
        return lookup(self.config, self.tree.model)

    @property
    def optim(self) -> tuple[str, Any]:
        """(key, settings) of the optimizer."""
        key = "actor_rollout_ref.actor.optim" if self.is_rl else "optim"
        return key, lookup(self.config, key)

    @cached_property
    def tokenizer(self) -> Any:
        """Raises ModelError if it cannot be loaded."""
        from posttrain.models.loading import load_tokenizer

        return load_tokenizer(self.model)

    @cached_property
    def model_config(self) -> Any:
        """The model's config.json as transformers reads it."""
        from posttrain.planning.meta_models import _model_settings

        return _model_settings(self.model, self.model.path)

    @cached_property
    def device(self) -> Device:
        return find_device(self.config)

    @cached_property
    def planner(self) -> Planner:
        return planner_for(self.config)

    @cached_property
    def parameters(self) -> int:
        """Numbers in the trained model's weights, adapters included."""
        role = "actor" if self.is_rl else "model"
        return self.planner.count(self.config, self.device, role, _parameter_count)

    @property
    def responses(self) -> int:
        """Responses of a training step; a batch that was not set is no larger than the data."""
        data = self.config.data
        return min(data.train_batch_size, self.counts["train"]) * self.config.actor_rollout_ref.rollout.n

    @property
    def scoring_s(self) -> float:
        """Seconds in which the run's reward workers score the responses of a step."""
        return self.reward_s * self.responses / pool_size(self.config.reward.num_workers)

    @property
    def model_folder(self) -> Path | None:
        """The folder of the weights, if it is a local one."""
        folder = Path(str(self.model.path)).expanduser()
        return folder if folder.is_dir() else None

    def where(self, *keys: str) -> str:
        return ", and ".join(dict.fromkeys(f"{key} ({self.resolved.where(key)})" for key in keys))


def _parameter_count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())

"""A user's desk before a run: a model folder, data, a reward and a command line; all right until spoilt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    words = solution_str.replace("}", " ").replace("{", " ").split()
    return 1.0 if words and words[-1] == str(ground_truth) else 0.0
"""


def sums(count: int, first: int = 1) -> list[dict]:
    """`count` sums with their answers, no two alike; other sums for another `first`."""
    return [
        {
            "prompt": f"{first + i} + {2 * i + 1} = ?",
            "ground_truth": str(first + 3 * i + 1),
            "data_source": "math_reasoning",
        }
        for i in range(count)
    ]


@dataclass
class Desk:
    """What lies on it is written by `lay`, which gives the arguments of the command."""

    folder: Path
    base_model: Path
    program: str = "train"
    train: list[dict] = field(default_factory=lambda: sums(24))
    val: list[dict] = field(default_factory=lambda: sums(8, first=300))
    reward: str | None = REWARD
    settings: dict[str, object] = field(default_factory=dict)
    template: str | None = None
    spoil: list[Callable[[Desk], None]] = field(default_factory=list)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def lay(self) -> list[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(self.base_model, self.model)
        if self.template is not None:
            self.edit("tokenizer_config.json", chat_template=self.template)
            (self.model / "chat_template.jinja").unlink(missing_ok=True)
        for name, rows in (("train", self.train), ("val", self.val)):
            (self.folder / f"{name}.json").write_text(json.dumps(rows))
        if self.reward is not None:
            (self.folder / "my_reward.py").write_text(self.reward)
        values = {**self._usual(), **self.settings}
        for change in self.spoil:
            change(self)
        return [f"{key}={value}" for key, value in values.items() if value is not None]

    def edit(self, name: str, **values: object) -> None:
        """Values laid over a JSON file of the model folder; None takes one away."""
        path = self.model / name
        content = {**json.loads(path.read_text()), **values}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    def _usual(self) -> dict[str, object]:
        values: dict[str, object] = {
            "data.train_files": self.folder / "train.json",
            "data.val_files": self.folder / "val.json",
            "data.train_batch_size": 8,
            "trainer.default_local_dir": self.folder / "outputs",
            "trainer.total_epochs": 2,
        }
        if self.program != "train":
            return {**values, "model.path": self.model, "data.max_length": 96, "trainer.experiment_name": "first"}
        values |= {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.model.path": self.model,
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "data.max_prompt_length": 64,
            "data.max_response_length": 16,
            "trainer.experiment_name": "first",
            "reward.num_workers": 1,
        }
        return values | (
            {"custom_reward_function.path": self.folder / "my_reward.py"} if self.reward is not None else {}
        )

"""Sizes of a step: prompts, responses and optimizer steps, fitted to the data, and as a sentence for the user."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from posttrain.config.root import PPOConfig
from posttrain.errors import UserError


class SizeError(UserError):
    """The sizes asked for do not fit the data."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of one run. `updates_per_step` are optimizer steps of the actor on one batch."""

    prompts: int
    responses: int
    mini_batch_prompts: int
    updates_per_step: int
    total_steps: int
    critic_warmup: int = 0  # steps at the start in which the actor is not updated

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the actor in the whole run."""
        return self.updates_per_step * max(0, self.total_steps - self.critic_warmup)

    def words(self) -> str:
        n = self.responses // self.prompts
        return (
            f"{self.total_steps} steps; each generates {self.prompts} prompts x {n} = {self.responses} responses and "
            f"makes {self.updates_per_step} optimizer step{'s' * (self.updates_per_step != 1)} on mini-batches of "
            f"{self.mini_batch_prompts} prompts ({self.mini_batch_prompts * n} responses)." + self._warmup_words()
        )

    def _warmup_words(self) -> str:
        if not self.critic_warmup:
            return ""
        if self.critic_warmup >= self.total_steps:
            return f" The warm-up of the critic covers all {self.total_steps} steps: the actor never changes."
        first = "The first step trains" if self.critic_warmup == 1 else f"The first {self.critic_warmup} steps train"
        return f" {first} the critic only."


def fit_sizes(config: PPOConfig, explicit: set[str], rows: int, *, critic: bool = False) -> tuple[Sizes, list[str]]:
    """The sizes for `rows` training prompts; defaults that are too large are lowered in `config`, with a note.

    Only a run with a critic has a warm-up of it.
    """
    notes = []
    if config.data.train_batch_size > rows:
        if "data.train_batch_size" in explicit:
            raise SizeError(
                f"data.train_batch_size={config.data.train_batch_size}, but the training data has {rows} prompts; "
                f"set it to {rows} or less"
            )
        notes.append(
            f"data.train_batch_size was not set; its default {config.data.train_batch_size} is lowered to the {rows} "
            "prompts that there are."
        )
        config.data.train_batch_size = rows
    actor = config.actor_rollout_ref.actor
    if actor.ppo_mini_batch_size > config.data.train_batch_size:
        notes.append(f"ppo_mini_batch_size {actor.ppo_mini_batch_size} is lowered to the batch of {rows_text(config)}.")
        actor.ppo_mini_batch_size = config.data.train_batch_size
    prompts = config.data.train_batch_size
    per_epoch = rows // prompts
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * per_epoch
    updates = math.ceil(prompts / actor.ppo_mini_batch_size) * actor.ppo_epochs
    responses = prompts * config.actor_rollout_ref.rollout.n
    warmup = config.trainer.critic_warmup if critic else 0
    return Sizes(prompts, responses, actor.ppo_mini_batch_size, updates, total_steps, warmup), notes


def check_group_size(config: PPOConfig, explicit: set[str]) -> None:
    """A user's own estimator that compares a group needs one; the built-in ones are checked with the configuration."""
    if config.actor_rollout_ref.rollout.n == 1:
        where = "was set to 1" if "actor_rollout_ref.rollout.n" in explicit else "is 1 by default"
        raise SizeError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares the responses to one prompt, but "
            f"actor_rollout_ref.rollout.n {where}; set actor_rollout_ref.rollout.n=5 (5 to 8 is usual)"
        )


def rows_text(config: PPOConfig) -> str:
    return f"{config.data.train_batch_size} prompts"


def count_steps(config: Any, rows: int) -> tuple[int, int]:
    """Of a supervised run: (rows per step, steps); the last batch of an epoch holds the rows that are left."""
    batch = min(config.data.train_batch_size, rows)
    return batch, config.trainer.total_training_steps or config.trainer.total_epochs * -(-rows // batch)


def critic_updates(config: PPOConfig, sizes: Sizes) -> int:
    """Optimizer steps of the critic in the whole run."""
    mini = config.critic.ppo_mini_batch_size or sizes.mini_batch_prompts
    epochs = config.critic.ppo_epochs or config.actor_rollout_ref.actor.ppo_epochs
    return math.ceil(sizes.prompts / mini) * epochs * sizes.total_steps

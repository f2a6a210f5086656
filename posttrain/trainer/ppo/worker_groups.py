"""The worker groups of a run: actor with rollout and reference, colocated or disaggregated; a critic and a reward
model where they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from posttrain.config.root import PPOConfig
from posttrain.controller.group import WorkerGroup
from posttrain.controller.pool import ROLLOUT, Workers
from posttrain.errors import UserError
from posttrain.kernels.quantized import FP8
from posttrain.tracking.progress import say, waiting
from posttrain.workers.fsdp_workers import (
    ActorRefWorker,
    ActorRolloutRefWorker,
    CriticWorker,
    RewardModelWorker,
    RolloutWorker,
)
from posttrain.workers.groups import (
    ActorRolloutGroup,
    ColocatedGroup,
    CriticGroup,
    DisaggregatedGroup,
    PolicyGroup,
    RewardModelGroup,
    RolloutGroup,
)
from posttrain.workers.roles import engine_ranks


class WorkerClasses:
    """The classes that a trainer makes its workers of. A subclass of it may name its own, derived from these."""

    actor_class: type[ActorRolloutRefWorker] = ActorRolloutRefWorker
    # With `rollout_class`, in place of `actor_class` where rollout is disaggregated.
    policy_class: type[ActorRefWorker] = ActorRefWorker
    rollout_class: type[RolloutWorker] = RolloutWorker
    critic_class: type[CriticWorker] = CriticWorker
    reward_model_class: type[RewardModelWorker] = RewardModelWorker


class TrainingGroups:
    """A run's worker groups by role. `load_models` loads what they need, and tells the user what only the workers know.

    Rollout is disaggregated where `workers` has processes for it alone, and colocated otherwise."""

    actor_rollout: ActorRolloutGroup
    rollout: RolloutGroup  # the workers that generate, colocated or not
    critic: CriticGroup | None = None
    reward_model: RewardModelGroup | None = None
    notes: list[str]  # of the policy; the user has seen them

    def __init__(
        self,
        workers: Workers,
        classes: type[WorkerClasses],
        config: PPOConfig,
        tokenizer: Any,
        device: torch.device,
        *,
        total_updates: int,
        reference: bool,
        critic_updates: int | None,
    ) -> None:
        """`critic_updates` is None where the run has no critic."""
        self._workers, self._classes, self._config = workers, classes, config
        self._tokenizer, self._device = tokenizer, device
        self._total_updates, self._reference, self._critic_updates = total_updates, reference, critic_updates

    def load_models(self) -> None:
        """Create the workers role by role, each with its model."""
        roles = ", reference" * self._reference + ", critic" * (self._critic_updates is not None)
        roles += ", reward model" * self._config.reward_model.enable
        say(f"Creating workers on {self._device}: actor, rollout{roles} ({self._workers.words()})")
        # The actor first: the critic's check needs the policy's vocabulary.
        self._load_actor()
        if self._critic_updates is not None:
            self.critic = self._load_critic(self._critic_updates)
        if self._config.reward_model.enable:
            made = self._workers.create("reward_model", self._classes.reward_model_class, *self._of_policy())
            self.reward_model = RewardModelGroup(made)
            self.reward_model.init_model()

    def training(self) -> Iterator[WorkerGroup]:
        """Those that work while others generate."""
        for role in (self.actor_rollout, self.critic, self.reward_model):
            if role is not None:
                yield role.group

    def _load_actor(self) -> None:
        separate = self._workers.rollout_size
        with waiting("loading the model"):
            actor, self.rollout = self._disaggregated() if separate else self._colocated()
            self.actor_rollout = actor
            actor.init_model()
        say(f"Rollout engine: {actor.rollout_engine()}")
        if (size := engine_ranks(self._config)) > 1:
            say(_engines_words(self.rollout.world_size, size, "rollout " * bool(separate)))
        if engine := actor.train_engine():
            say(f"Train engine: {engine}")
        self.notes = actor.notes()
        for note in self.notes:
            say(f"note: {note}")

    def _colocated(self) -> tuple[ColocatedGroup, RolloutGroup]:
        for sentence in self._workers.places(self._config.actor_rollout_ref.rollout.colocated_workers):
            say(sentence)
        colocated = ColocatedGroup(self._policy(self._classes.actor_class))
        return colocated, colocated.rollout

    def _disaggregated(self) -> tuple[DisaggregatedGroup, RolloutGroup]:
        classes = self._classes
        if classes.actor_class is not ActorRolloutRefWorker:
            raise UserError(
                f"actor_rollout_ref.rollout.n_workers={self._workers.rollout_size} has others generate than train, "
                f"but {classes.__name__} names one class for both (actor_class = {classes.actor_class.__name__}): "
                "give it policy_class and rollout_class, derived from ActorRefWorker and RolloutWorker, or set "
                "n_workers=0"
            )
        for sentence in self._workers.places():
            say(sentence)
        training = PolicyGroup(self._policy(classes.policy_class))
        rollout = RolloutGroup(self._workers.create(ROLLOUT, classes.rollout_class, *self._of_policy()))
        rounding = FP8 if self._config.actor_rollout_ref.rollout.quantization == "fp8" else None
        return DisaggregatedGroup(training, rollout, rounding), rollout

    def _policy(self, worker: type) -> WorkerGroup:
        return self._workers.create(
            "actor", worker, *self._of_policy(), total_updates=self._total_updates, reference=self._reference
        )

    def _of_policy(self) -> tuple[PPOConfig, Any, torch.device]:
        return self._config, self._tokenizer, self._device

    def _load_critic(self, updates: int) -> CriticGroup:
        tokens = min(len(self._tokenizer), self.actor_rollout.vocabulary())
        made = self._workers.create(
            "critic", self._classes.critic_class, self._config, self._device, total_updates=updates, tokens=tokens
        )
        critic = CriticGroup(made)
        critic.init_model()
        for note in critic.notes():
            say(f"note: {note}")
        return critic


def _engines_words(workers: int, size: int, kind: str) -> str:
    held = "; ".join(", ".join(map(str, range(first, first + size))) for first in range(0, workers, size))
    return f"Engines: {workers // size}, each held by {size} {kind}workers: {held}."

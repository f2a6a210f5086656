"""The workers of one process: actor, rollout and reference together, the critic, and the reward model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.config.root import PPOConfig
from posttrain.controller.dispatch import Calls, largest, register, to_all, to_first
from posttrain.engine.base import Passes, TrainEngine
from posttrain.models.adapter_targets import stacked_note
from posttrain.protocol import DataProto
from posttrain.workers.critic.dp_critic import DataParallelPPOCritic, critic_schedule, prepare_values
from posttrain.workers.engine_worker import EngineWorker
from posttrain.workers.fields import batch_of
from posttrain.workers.lora_state import lora_state
from posttrain.workers.measures import Measures
from posttrain.workers.plan import UpdatePlan, join_updates, planned
from posttrain.workers.policy import PolicyWorker
from posttrain.workers.reference import ReferenceWorker
from posttrain.workers.reward_model.worker import RewardModelWorker
from posttrain.workers.roles import check_vocabulary, critic_engine, rollout_model
from posttrain.workers.rollout import RolloutWorker
from posttrain.workers.spread import by_passes, in_row_order

__all__ = [
    "ActorRefWorker",
    "ActorRolloutRefWorker",
    "AsyncActorRolloutRefWorker",
    "CriticWorker",
    "PolicyWorker",
    "ReferenceWorker",
    "RewardModelWorker",
    "RolloutWorker",
]

SHARED_PROOF_FREQ = 10


def planned_critic_updates(group: Any, arguments: tuple[DataProto]) -> Calls:
    """As the actor's."""
    config = group.config  # a plan may travel, and the group should not travel with it
    return planned(group, arguments[0], critic_schedule(config), lambda mini: prepare_values(config, mini))


class ActorRefWorker(PolicyWorker, ReferenceWorker):
    """Policy and reference in one process; with adapters the policy's base is the reference."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        device: torch.device,
        *,
        total_updates: int = 1,
        reference: bool = False,
    ) -> None:
        PolicyWorker.__init__(self, config, tokenizer, device, total_updates=total_updates)
        self.with_reference = reference

    @register(to_all)
    def init_model(self) -> None:
        """Load weights and build the optimizer and, without adapters, the reference."""
        PolicyWorker.init_model(self)
        if self.with_reference and self.adapters is None:
            ReferenceWorker.init_model(self)

    @contextmanager
    def _frozen(self) -> Iterator[TrainEngine]:
        if self.reference is None:
            with self.engine.on_device(), self.engine.base_only():
                yield self.engine
        else:
            with super()._frozen() as engine:
                yield engine


class ActorRolloutRefWorker(ActorRefWorker, RolloutWorker):
    """The three in one process: the rollout reads the policy's own weights where it has them whole."""

    @register(to_all)
    def init_model(self) -> None:
        """As the policy and its reference, and the rollout's engine."""
        ActorRefWorker.init_model(self)
        live = self.engine.live_model()
        self.rollout_is_apart = live is None
        with self.engine.on_device():  # the engine is tried when it is made
            self._build_rollout(live if live is not None else rollout_model(self.config, self.device))
        if self.rollout_is_apart and self.adapters is not None:
            self.sync_weights(0)  # its own model is the base alone; the run may begin with an adapter
            self.rollout.sleep()
        self.rollout.let_go()

    def _wake(self) -> None:
        self.engine.onload()
        super()._wake()

    def _sleep(self) -> None:
        super()._sleep()
        self.engine.offload()
        self.rollout.let_go()

    @register(to_all, largest)
    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the new weights to the rollout engine, and prove that it computes with them.

        An engine that reads the trainer's own tensors is given nothing: it is tried at first and then now and again.
        Its cache sleeps until the next requests: what a sync needs does not lie in memory beside it.
        """
        shared = self.rollout.shares_weights and not self.rollout_is_apart
        try:
            with self.engine.on_device():
                self.rollout.wake("weights")
                self.rollout.load_weights(() if shared else self.engine.export_weights(), version)
                if shared and version > 1 and version % SHARED_PROOF_FREQ:
                    return {}
                return self.probe.compare(self.engine, self.rollout)
        finally:
            self.rollout.let_go()

    @register(to_first)
    def notes(self) -> list[str]:
        return [*PolicyWorker.notes(self), *self.rollout_notes(self.engine.facts().vocabulary)]


AsyncActorRolloutRefWorker = ActorRolloutRefWorker
"""verl's name for the one whose requests are under way while others are scored; here there is no other: `submit` queues
them, `advance` hands responses over as they end, and what is sampled follows from each request's seed alone."""


class CriticWorker(EngineWorker):
    """Predicts and learns the value of each response token; the policy knows `tokens` different ones."""

    def __init__(self, config: PPOConfig, device: torch.device, *, total_updates: int = 1, tokens: int = 0) -> None:
        self.config, self.device, self.total_updates, self.tokens = config, device, total_updates, tokens

    @register(to_all)
    def init_model(self) -> None:
        torch.manual_seed(self.config.trainer.seed)  # as the actor's
        self.engine = critic_engine(self.config, self.device, self.total_updates)
        facts = self.engine.facts()
        check_vocabulary(facts.vocabulary, self.tokens, self.config.critic.model.path)
        self.critic = DataParallelPPOCritic(self.config, self.engine)
        model = self.config.actor_rollout_ref.model
        self.adapters = lora_state(facts, model, path=self.config.critic.model.path)

    @register(to_first)
    def notes(self) -> list[str]:
        """As the actor's."""
        note = stacked_note(self.engine.facts().stacked, self.config.critic.model, "critic.model.target_modules")
        return [note] if note else []

    @register(by_passes, in_row_order)
    def compute_values(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        with self.engine.on_device():
            return batch_of(values=self.critic.compute_values(data, passes))

    @register(planned_critic_updates, join_updates)
    def update_critic(self, plan: UpdatePlan) -> list[Measures]:
        with self.engine.on_device(optimizer=True):
            return self.critic.execute(plan)

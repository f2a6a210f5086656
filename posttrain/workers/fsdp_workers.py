"""The workers of one process: actor, rollout and reference together, the critic, and the reward model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from posttrain.config.root import PPOConfig
from posttrain.controller.group import Calls, WorkerGroup, largest, register, to_all, to_first
from posttrain.engine.base import Passes, TrainEngine
from posttrain.engine.ranks import from_rank_0, this_rank
from posttrain.protocol import DataProto
from posttrain.workers.actor.dp_actor import DataParallelPPOActor
from posttrain.workers.critic.dp_critic import DataParallelPPOCritic, critic_schedule, prepare_values
from posttrain.workers.measures import Measures
from posttrain.workers.policy import PolicyCalls, PolicyWorker, ReferenceCalls, ReferenceWorker
from posttrain.workers.reward_model import RewardModelWorker
from posttrain.workers.roles import (
    EngineWorker,
    check_vocabulary,
    critic_engine,
    expert_notes,
    lora_state,
    rollout_model,
)
from posttrain.workers.rollout import RolloutCalls, RolloutWorker
from posttrain.workers.update_plan import (
    UpdatePlan,
    batch_of,
    by_passes,
    in_row_order,
    in_store,
    join_updates,
    plan_updates,
)

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

# Syncs between two proofs where the rollout reads the trainer's own tensors. Nothing is copied there, so only code that
# moves tensors can break it; each proof costs two forward passes.
SHARED_PROOF_FREQ = 10


def plan_critic_updates(group: WorkerGroup, batch: DataProto) -> Calls:
    """As the actor's."""
    config: PPOConfig = group.config
    schedule = critic_schedule(config.critic, config.actor_rollout_ref.actor, config.trainer.seed)
    # A plan may travel to its rank: it holds two values, not the group.
    mode, longest = config.critic.loss_agg_mode, config.data.max_response_length
    return plan_updates(group, batch, schedule, partial(prepare_values, loss_agg_mode=mode, longest=longest))


class ActorRefWorker(PolicyCalls, ReferenceCalls):
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
        self.config, self.tokenizer, self.device = config, tokenizer, device
        self.policy = PolicyWorker(config, tokenizer, device, total_updates=total_updates)
        self.reference = ReferenceWorker(config, device, self.policy)
        self.with_reference = reference

    @property
    def engine(self) -> TrainEngine:
        """That trains the policy."""
        return self.policy.engine

    @property
    def actor(self) -> DataParallelPPOActor:
        """The policy's update."""
        return self.policy.actor

    @register(to_all)
    def init_model(self) -> None:
        """Load weights and build the optimizer and, without adapters, the reference."""
        # With adapters no reference is loaded: the base without them is the reference, computed with the adapters off.
        self.policy.init_model()
        if self.with_reference and self.policy.adapters is None:
            self.reference.init_model()

    @register(to_first)
    def notes(self) -> list[str]:
        """Sentences for the user that only the loaded model or the first update could tell."""
        return self.policy.notes()


class ActorRolloutRefWorker(ActorRefWorker, RolloutCalls):
    """The three in one process: the rollout reads the policy's own weights where it has them whole."""

    def __init__(self, config: PPOConfig, tokenizer: Any, device: torch.device, **named: Any) -> None:
        super().__init__(config, tokenizer, device, **named)
        self.rollout = RolloutWorker(config, tokenizer, device, self.policy)
        colocated = config.actor_rollout_ref.rollout.colocated_workers
        self.generates = not colocated or this_rank() < colocated

    @register(to_all)
    def init_model(self) -> None:
        """As the policy and its reference, and the rollout's engine."""
        super().init_model()
        self.rollout.join_team()
        live = self.engine.live_model()
        self.rollout_has_copy = live is None
        if self.generates:
            with self.engine.on_device():  # the rollout engine tries the model when it is built
                self.rollout.build(live if live is not None else rollout_model(self.config, self.device))
        # Weights are gathered by all ranks: those without an engine must know what the engines take.
        self.sends_adapters = bool(from_rank_0(self.generates and self.rollout.engine.takes_adapters, self.device))
        if self.rollout_has_copy and self.policy.adapters is not None:
            self.sync_weights(0)  # the copy is the base alone; the run may begin with an adapter
            if self.generates:
                self.rollout.engine.sleep()
        if self.generates:
            self.rollout.engine.let_go()

    @register(to_all, largest)
    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the new weights to the rollout engine, and prove that it computes with them.

        An engine that reads the trainer's own tensors is given nothing: it is tried at first and then now and again.
        Its cache sleeps until the next requests: what a sync needs does not lie in memory beside it.
        """
        if not self.generates:
            return self._help_to_sync()
        engine, rollout = self.engine, self.rollout.engine
        shared = rollout.shares_weights and not self.rollout_has_copy
        try:
            with engine.on_device():
                # Weights without the cache: the trainer's gathered layers and the KV cache never lie side by side.
                rollout.wake("weights")
                weights = engine.export_adapters() if self.sends_adapters else engine.export_weights()
                rollout.load_weights(() if shared else weights, version)
                if shared and version > 1 and version % SHARED_PROOF_FREQ:
                    return {}
                return self.policy.probe.compare(engine, rollout)
        finally:
            rollout.let_go()

    def _help_to_sync(self) -> dict[str, float]:
        """A rank without an engine: gather the weights and score the probe with the ranks that have one."""
        engine = self.engine
        with engine.on_device():
            for _ in engine.export_adapters() if self.sends_adapters else engine.export_weights():
                pass
            # Compared with itself: weights that are not finite end all ranks in the same collectives.
            return self.policy.probe.compare(engine, None)

    @register(to_first)
    def notes(self) -> list[str]:
        """Those of the policy, and on generation."""
        return [*self.policy.notes(), *self.rollout.rollout_notes(self.policy.vocabulary())]


# verl's name for the one whose requests are under way while others are scored; here there is no other: `submit`
# queues them, `advance` hands responses over as they end, and what is sampled follows from each request's seed alone.
AsyncActorRolloutRefWorker = ActorRolloutRefWorker


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
        return expert_notes(self.engine.facts(), self.config.critic.model, "critic.model")

    @register(by_passes, in_row_order)
    def compute_values(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        with self.engine.on_device():
            found = batch_of(values=self.critic.compute_values(data, passes))
        return in_store(found, data, self.engine.facts())

    @register(plan_critic_updates, join_updates)
    def update_critic(self, plan: UpdatePlan) -> list[Measures]:
        with self.engine.on_device(optimizer=True):
            return self.critic.execute(plan)

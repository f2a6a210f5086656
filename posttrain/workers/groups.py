"""Worker groups as the loop calls them, by role and with types: `group.update_actor(batch)` is checked by pyright.

A class lists the methods of its role's workers; types, dispatch and documentation are those of the workers' own
methods. A method of a worker class of the user's own is called in the same way, without types.

Policy and rollout may share their workers (`ColocatedGroup`) or have workers of their own (`DisaggregatedGroup`); the
loop calls both in the same way. Calls for the reference go to its own workers, where it has any. `WeightCarrier` moves
weights from the workers that train to those that generate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from posttrain.controller.group import FirstRanks, Future, OneRank, RoleGroup, WorkerGroup
from posttrain.controller.incidents import WorkerDied
from posttrain.rollout.weight_buckets import SyncError
from posttrain.workers.fsdp_workers import (
    ActorRefWorker,
    ActorRolloutRefWorker,
    CriticWorker,
    RewardModelWorker,
    RolloutWorker,
)
from posttrain.workers.policy import PolicyCalls, ReferenceCalls, ReferenceWorker, compare_scores
from posttrain.workers.rollout import RolloutCalls
from posttrain.workers.weight_transport import TRANSPORTS, Route, route_for


class PolicyGroup(RoleGroup, PolicyCalls, ReferenceCalls):
    """Policy and reference, without rollout."""

    init_model = ActorRefWorker.init_model
    notes = ActorRefWorker.notes


class RolloutGroup(RoleGroup, RolloutCalls):
    """The workers that generate, whatever else they do."""

    init_model = RolloutWorker.init_model


class CriticGroup(RoleGroup):
    """The value model."""

    init_model = CriticWorker.init_model
    notes = CriticWorker.notes
    lora_state = CriticWorker.lora_state
    save = CriticWorker.save
    begin_save = CriticWorker.begin_save
    load = CriticWorker.load
    compute_values = CriticWorker.compute_values
    update_critic = CriticWorker.update_critic


class ReferenceGroup(RoleGroup):
    """The reference on workers of its own."""

    init_model = ReferenceWorker.init_model
    compute_ref_log_prob = ReferenceWorker.compute_ref_log_prob


class RewardModelGroup(RoleGroup):
    """The reward model."""

    init_model = RewardModelWorker.init_model
    notes = RewardModelWorker.notes
    check_prompt = RewardModelWorker.check_prompt
    compute_rm_score = RewardModelWorker.compute_rm_score


class ColocatedGroup(RoleGroup, PolicyCalls, ReferenceCalls, RolloutCalls):
    """Policy and reference on all workers, rollout on all or on the first of them. `reference` has workers of its
    own."""

    def __init__(self, group: WorkerGroup, reference: ReferenceGroup | None = None) -> None:
        super().__init__(group)
        self.reference = reference
        colocated = group.config.actor_rollout_ref.rollout.colocated_workers
        self.rollout = RolloutGroup(FirstRanks(group, colocated) if colocated else group)

    def group_of(self, name: str) -> WorkerGroup:
        """A method of the rollout is called where there is an engine."""
        if self.reference is not None and hasattr(ReferenceCalls, name):
            return self.reference.group
        return self.rollout.group if hasattr(RolloutCalls, name) else self.group

    init_model = ActorRolloutRefWorker.init_model
    sync_weights = ActorRolloutRefWorker.sync_weights
    notes = ActorRolloutRefWorker.notes


class WeightCarrier:
    """Moves weights from rank 0 of the training workers to every rollout worker, in buckets: while one is sent and
    loaded, the next is gathered. The driver passes on what a bucket consists of; its memory takes a `Route`."""

    def __init__(self, training: PolicyGroup, rollout: RolloutGroup) -> None:
        self.training, self.rollout = training, rollout
        self.route: Route | None = None

    def carry(self, version: int) -> list[int]:
        """All weights, as they are now; gives the checksum of all that reached each worker."""
        try:
            if self.route is None:
                self.route = self._join()
            return self._carry(version)
        except BaseException as error:
            if isinstance(error, WorkerDied) and self.training.world_size > 1 and self._broadcasts():
                # Rank 0 broke off between two collectives in which the others wait for it: all must start again.
                error.worker = ""
            self.forget_route()  # a broadcast that broke off cannot be continued
            raise

    def _broadcasts(self) -> bool:
        return self.route is not None and TRANSPORTS.find(self.route.transport).meets

    def forget_route(self) -> None:
        """The workers join again at the next sync; needed when one of them was replaced."""
        self.route = None

    def _join(self) -> Route:
        config = self.training.group.config
        receivers = self.rollout.receiver_place()
        rollout, limit = config.actor_rollout_ref.rollout, config.trainer.stopped_worker_timeout_s
        found = route_for(rollout.weight_sync, self.training.sender_place(), receivers, limit, rollout.name)
        route = self.training.host_sync(found)
        # All join at once: a process group is complete when the last of them has come.
        joining = [self.training.join_as_sender.on(0, route)]
        joining += [self.rollout.join_as_receiver.on(rank, route, 1 + rank) for rank in range(len(receivers))]
        self._settle(joining)
        return route

    def _settle(self, calls: Sequence[Future[Any]]) -> None:
        """Wait for calls of both groups. The first error of any is raised, though the others may wait for that worker
        until their time is over."""
        waiting = list(calls)
        while waiting:
            self.rollout.group.wait_any(waiting)
            for call in [call for call in waiting if call.done()]:
                call.result()
                waiting.remove(call)

    def _carry(self, version: int) -> list[int]:
        taking: list[Future[list[int]]] = []
        last, adapters = False, self.rollout.takes_adapters.once()
        while not last:
            ranks, first = range(self.training.world_size), not taking
            parts = [self.training.next_bucket.on(rank, first, adapters) for rank in ranks]
            was_last = self.training.was_last_bucket.on(0)
            # Ranks other than 0 only help to gather, and give nothing but errors. The bucket before must have been
            # taken: a sender has two buffers.
            self._settle([*parts[1:], was_last, *taking])
            taking, last = [self.rollout.take_bucket.hand_over(parts[0], version)], was_last.result()
        self._settle(taking)
        self.training.finish_sync()
        return taking[0].result()


class DisaggregatedGroup(RoleGroup, PolicyCalls, ReferenceCalls, RolloutCalls):
    """Policy and reference on the workers of `training`, rollout on others; `reference` has workers of its own."""

    def __init__(
        self,
        training: PolicyGroup,
        rollout: RolloutGroup,
        rounding: torch.dtype | None = None,
        reference: ReferenceGroup | None = None,
    ) -> None:
        """`rounding` is the type of the engine's products, where that is not the model's own."""
        super().__init__(training.group)
        self.reference = reference
        self.rounding = rounding
        self.training, self.rollout = training, rollout
        self.carrier = WeightCarrier(training, rollout)

    def group_of(self, name: str) -> WorkerGroup:
        """A method of the workers that have it."""
        if self.reference is not None and hasattr(ReferenceCalls, name):
            return self.reference.group
        try:
            self.training.group.marked(name)
        except AttributeError:
            return self.rollout.group
        return self.training.group

    def init_model(self) -> None:
        """Load the models of both, side by side, and have the rollout take the policy's weights, with proof."""
        # Both begin before either is waited for: loading a large model takes minutes.
        for loading in (self.training.init_model.later(), self.rollout.init_model.later()):
            loading.result()
        self.sync_weights(0)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the new weights over, and prove that all rollout workers have the same ones and compute with them."""
        return self._sync(self.carrier, version)

    def admit(self, number: int, version: int) -> None:
        """Have a rollout worker that was replaced load its model and take the policy's weights, with proof. The others
        may be generating: nothing is sent to them."""
        self.rollout.init_model.on(number).result()
        self._sync(WeightCarrier(self.training, RolloutGroup(OneRank(self.rollout.group, number))), version)
        self.carrier.forget_route()

    def _sync(self, carrier: WeightCarrier, version: int) -> dict[str, float]:
        sums = carrier.carry(version)
        if len(set(sums)) > 1:
            raise SyncError(f"rollout workers were given different weights: checksums {', '.join(map(str, sums))}")
        scores = carrier.rollout.rollout_scores.later()  # scored while the trainer scores the same rows
        ours, facts = self.training.probe_scores(), self.training.engine_facts.once()
        dtype = self.rounding or facts.rounding or facts.dtype
        found = [compare_scores(ours, theirs, dtype, self.training.lost_weights) for theirs in scores.result()]
        return {"sync/checksum": float(sums[0]), "sync/probe_max": max(part["sync/probe_max"] for part in found)}

    def notes(self) -> list[str]:
        return [*self.training.notes(), *self.rollout.rollout_notes(self.training.vocabulary())]


ActorRolloutGroup = ColocatedGroup | DisaggregatedGroup

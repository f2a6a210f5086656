"""Policy and rollout on workers of their own, called as the worker is that holds both: `actor_rollout_wg` either way.

Weights go from the workers that train to those that generate in `WeightCarrier`, which alone knows how they travel.
"""

from __future__ import annotations

from typing import Any

from posttrain.controller.futures import Future
from posttrain.controller.group import WorkerGroup
from posttrain.workers.buckets import SyncError
from posttrain.workers.probe import compare_scores


class WeightCarrier:
    """Through the store that the workers share: rank 0 of those that train puts a bucket there, once, and every worker
    that generates reads it, while the next is gathered. So no more than two buckets lie there."""

    def __init__(self, training: WorkerGroup, rollout: WorkerGroup) -> None:
        self.training, self.rollout = training, rollout

    def carry(self, version: int) -> list[int]:
        """All weights, as they are now; gives the checksum of all that reached each worker."""
        taking: Future | None = None
        last, first = False, True
        while not last:
            parts = [self.training.on(rank).next_bucket(first) for rank in range(self.training.world_size)]
            was_last = self.training.on(0).was_last_bucket()
            for part in parts[1:]:
                part.result()  # they have nothing to give but errors
            if taking is not None:
                taking.result()
            taking = self.rollout.hand_over(parts[0], "take_bucket", (version,))
            last, first = was_last.result(), False
        assert taking is not None
        return taking.result()


class ActorRolloutApart:
    """The group `actor_rollout_wg` where `rollout` generates and `training` does all else."""

    def __init__(self, training: WorkerGroup, rollout: WorkerGroup) -> None:
        self.training, self.rollout = training, rollout
        self.carrier = WeightCarrier(training, rollout)
        self.world_size, self.config, self.overlaps = training.world_size, training.config, True

    def init_model(self) -> None:
        """Load the models of both, side by side, and have the rollout take the policy's weights, with proof."""
        for loading in (self.training.later.init_model(), self.rollout.later.init_model()):
            loading.result()
        self.sync_weights(0)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the new weights over, and prove that all who generate have the same ones and compute with them."""
        sums = self.carrier.carry(version)
        if len(set(sums)) > 1:
            raise SyncError(f"rollout workers were given different weights: checksums {', '.join(map(str, sums))}")
        scores = self.rollout.later.rollout_scores()
        ours, dtype = self.training.probe_scores(), self.training.once("engine_facts").dtype
        found = [compare_scores(ours, theirs, dtype, self.training.lost_weights) for theirs in scores.result()]
        return {"sync/checksum": float(sums[0]), "sync/probe_max": max(part["sync/probe_max"] for part in found)}

    def notes(self) -> list[str]:
        return [*self.training.notes(), *self.rollout.rollout_notes(self.training.vocabulary())]

    def __getattr__(self, name: str) -> Any:
        """A method of the workers that have it."""
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self.training, name)
        except AttributeError:
            return getattr(self.rollout, name)

"""The reference: a frozen policy that the trained one is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from posttrain.config.root import PPOConfig
from posttrain.controller.dispatch import delegate, register, to_all, to_first
from posttrain.engine.base import Passes, TrainEngine
from posttrain.engine.facts import EngineFacts
from posttrain.protocol import DataProto
from posttrain.workers.policy import PolicyWorker
from posttrain.workers.roles import reference_engine
from posttrain.workers.row_dispatch import batch_of, by_passes, in_row_order


class ReferenceWorker:
    """Log-probs of the policy as it was at the start: of a frozen copy, or, without one, of the base of a `policy`
    in the same process, whose adapters are switched off for it."""

    engine: TrainEngine | None = None

    def __init__(self, config: PPOConfig, device: torch.device, policy: PolicyWorker | None = None) -> None:
        self.config, self.device, self.policy = config, device, policy

    @register(to_all)
    def init_model(self) -> None:
        """Load the frozen copy."""
        self.engine = reference_engine(self.config, self.device)

    @register(to_first)
    def engine_facts(self) -> EngineFacts:
        """About the role's model."""
        assert self.engine is not None
        return self.engine.facts()

    @contextmanager
    def _frozen(self) -> Iterator[TrainEngine]:
        """The engine that holds the reference, its weights where they are computed with."""
        if self.engine is not None:
            with self.engine.on_device():
                yield self.engine
            return
        assert self.policy is not None
        with self.policy.engine.on_device(), self.policy.engine.base_only():
            yield self.policy.engine

    @register(by_passes, in_row_order)
    def compute_ref_log_prob(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        """`ref_log_prob`: of the frozen copy, or of the base with its adapters off."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        with self._frozen() as engine:
            out = engine.log_probs(data, temperature=temperature, passes=passes)
        return batch_of(ref_log_prob=out.get("log_probs"))


class ReferenceCalls:
    """The reference's methods, of a worker that has it as `reference` and of that worker's group."""

    compute_ref_log_prob = delegate(ReferenceWorker.compute_ref_log_prob, to="reference")

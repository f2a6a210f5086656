"""The reference: a frozen policy that the trained one is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from posttrain.config.root import PPOConfig
from posttrain.controller.dispatch import register, to_all, to_first
from posttrain.engine.base import Passes, TrainEngine
from posttrain.engine.facts import EngineFacts
from posttrain.protocol import DataProto
from posttrain.workers.fields import batch_of
from posttrain.workers.roles import reference_engine
from posttrain.workers.spread import by_passes, in_row_order


class ReferenceWorker:
    """Log-probs of the policy as it was at the start."""

    reference: TrainEngine | None = None

    def __init__(self, config: PPOConfig, device: torch.device) -> None:
        self.config, self.device = config, device

    @register(to_all)
    def init_model(self) -> None:
        self.reference = reference_engine(self.config, self.device)

    @register(to_first)
    def engine_facts(self) -> EngineFacts:
        """About the role's model."""
        assert self.reference is not None
        return self.reference.facts()

    @contextmanager
    def _frozen(self) -> Iterator[TrainEngine]:
        """The engine that holds the reference, its weights where they are computed with."""
        assert self.reference is not None
        with self.reference.on_device():
            yield self.reference

    @register(by_passes, in_row_order)
    def compute_ref_log_prob(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        """`ref_log_prob`: of the frozen copy, or of the base with its adapters off."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        with self._frozen() as engine:
            out = engine.log_probs(data, temperature=temperature, passes=passes)
        return batch_of(ref_log_prob=out.get("log_probs"))

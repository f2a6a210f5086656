"""Sections of the workers' settings under verl's names."""

from __future__ import annotations

from typing import Any

from posttrain.config import actor, critic, rollout
from verl._config import BaseConfig
from verl._missing import not_given

__all__ = ["ActorConfig", "CriticConfig", "RolloutConfig"]
__getattr__ = not_given(__name__)


class ActorConfig(BaseConfig):
    """The section `actor_rollout_ref.actor`. `global_batch_info` are the counts of the whole mini-batch, to be passed
    on to `agg_loss`; empty outside of training."""

    _section = actor.ActorConfig
    _counts: dict[str, Any] | None = None
    _counts_read = False

    @property
    def global_batch_info(self) -> dict[str, Any]:
        self.__dict__["_counts_read"] = True
        return dict(self._counts or {})


class CriticConfig(BaseConfig):
    """The section `critic`."""

    _section = critic.CriticConfig


class RolloutConfig(BaseConfig):
    """The section `actor_rollout_ref.rollout`."""

    _section = rollout.RolloutConfig

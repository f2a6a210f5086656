"""Sections of the workers' settings under verl's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.config import rollout, root
from verl._added import added_to
from verl._config import BaseConfig
from verl._missing import not_given

__all__ = ["ActorConfig", "CriticConfig", "FSDPActorConfig", "McoreActorConfig", "PolicyLossConfig", "RolloutConfig"]
__getattr__ = not_given(__name__)


class ActorConfig(BaseConfig):
    """The section `actor_rollout_ref.actor`. `global_batch_info` are the counts of the whole mini-batch, to be passed
    on to `agg_loss`; empty outside of training."""

    _section = root.ActorConfig
    _counts: dict[str, Any] | None = None
    _counts_read = False

    @property
    def global_batch_info(self) -> dict[str, Any]:
        self.__dict__["_counts_read"] = True
        return dict(self._counts or {})


FSDPActorConfig = McoreActorConfig = ActorConfig  # `strategy` is a setting of one class


class PolicyLossConfig(BaseConfig):
    """The section `actor_rollout_ref.actor.policy_loss`."""

    _section = root.PolicyLossConfig


def actor_view(section: Any, counts: dict[str, Any]) -> ActorConfig:
    """The actor's settings as a policy loss sees them: with those that the command added."""
    actors, losses = (added_to(f"actor_rollout_ref.actor.{part}") for part in ("", "policy_loss."))
    own = PolicyLossConfig.of(section["policy_loss"] if isinstance(section, Mapping) else section.policy_loss, **losses)
    return ActorConfig.of(section, **actors, policy_loss=own, _counts=counts)


class CriticConfig(BaseConfig):
    """The section `critic`."""

    _section = root.CriticConfig


class RolloutConfig(BaseConfig):
    """The section `actor_rollout_ref.rollout`."""

    _section = rollout.RolloutConfig

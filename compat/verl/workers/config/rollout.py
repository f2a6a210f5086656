"""Settings of the rollout, by verl's classes and with their checks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from posttrain.config import rollout
from posttrain.conversations.settings import AgentSettings, TurnSettings
from verl._config import BaseConfig


class SamplingConfig(BaseConfig):
    """How validation samples."""

    _defaults = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "do_sample": True, "n": 1}  # noqa: RUF012
    _mutable_fields = frozenset()


class TraceConfig(BaseConfig):
    """Where calls of agent loops are sent (`verl.utils.rollout_trace`)."""

    _defaults = {  # noqa: RUF012
        "project_name": None,
        "experiment_name": None,
        "backend": None,
        "token2text": False,
        "max_samples_per_step_per_worker": None,
    }
    _mutable_fields = frozenset()

    def _check(self, given: Mapping[str, Any]) -> None:
        if (self.max_samples_per_step_per_worker or 0) < 0:
            raise ValueError("`max_samples_per_step_per_worker` must be a non-negative integer or null.")


class MultiTurnConfig(BaseConfig):
    """The section `actor_rollout_ref.rollout.multi_turn`."""

    _section = TurnSettings


class AgentLoopConfig(BaseConfig):
    """The section `actor_rollout_ref.rollout.agent`."""

    _section = AgentSettings


class RolloutConfig(BaseConfig):
    """The section `actor_rollout_ref.rollout`."""

    _section = rollout.RolloutConfig

    def _check(self, given: Mapping[str, Any]) -> None:
        mode = self.get("mode", "async")
        if mode == "sync":
            raise ValueError("Rollout mode 'sync' has been removed. Please set `actor_rollout_ref.rollout.mode=async`.")
        if mode != "async":
            warnings.warn(f"Unknown rollout mode '{mode}'; only 'async' is known.", DeprecationWarning, stacklevel=3)
        splits = self.get("tensor_model_parallel_size", 1) * self.get("data_parallel_size", 1)
        assert self.get("expert_parallel_size", 1) in (None, 1, splits), (
            "expert_parallel_size must be equal to tensor_model_parallel_size * data_parallel_size"
        )
        if self.get("pipeline_model_parallel_size", 1) > 1 and self.get("name") in ("vllm", "sglang"):
            raise NotImplementedError(f"rollout.name={self.name}: pipeline_model_parallel_size > 1 is not implemented")

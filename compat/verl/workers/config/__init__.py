"""Sections of the workers' settings under verl's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.algorithms.aggregation import AGGREGATION_MODES
from posttrain.config import root
from verl._added import added_to
from verl._config import BaseConfig
from verl.workers.config.critic import CriticConfig, FSDPCriticConfig, McoreCriticConfig
from verl.workers.config.engine import EngineConfig, EngineRouterReplayConfig, FSDPEngineConfig, McoreEngineConfig
from verl.workers.config.model import HFModelConfig, MtpConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig, McoreOptimizerConfig, OptimizerConfig, build_optimizer
from verl.workers.config.rollout import AgentLoopConfig, MultiTurnConfig, RolloutConfig, SamplingConfig, TraceConfig

__all__ = [
    "ActorConfig",
    "AgentLoopConfig",
    "CriticConfig",
    "EngineConfig",
    "EngineRouterReplayConfig",
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "HFModelConfig",
    "McoreActorConfig",
    "McoreCriticConfig",
    "McoreEngineConfig",
    "McoreOptimizerConfig",
    "MtpConfig",
    "MultiTurnConfig",
    "OptimizerConfig",
    "PolicyLossConfig",
    "RolloutConfig",
    "SamplingConfig",
    "TraceConfig",
    "build_optimizer",
]


class ActorConfig(BaseConfig):
    """The section `actor_rollout_ref.actor`. `global_batch_info` are the counts of the whole mini-batch, to be passed
    on to `agg_loss`; empty outside of training."""

    _section = root.ActorConfig
    _counts: dict[str, Any] | None = None
    _counts_read = False

    def _check(self, given: Mapping[str, Any]) -> None:
        if self.loss_agg_mode not in AGGREGATION_MODES:
            raise ValueError(
                f"Invalid loss_agg_mode: {self.loss_agg_mode}; it is one of {', '.join(AGGREGATION_MODES)}"
            )
        # Only where the caller describes a whole actor: these two are what makes verl's complete.
        if "strategy" in given and "rollout_n" in given and not given.get("use_dynamic_bsz", False):
            _check_micro_batches(given.get("ppo_micro_batch_size"), given.get("ppo_micro_batch_size_per_gpu"))

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Mapping[str, Any] | None = None) -> None:
        """Raise where these sizes do not fit the run."""
        splits, rows = self.get("ulysses_sequence_parallel_size", 1), self.get("ppo_micro_batch_size")
        if not self.get("use_dynamic_bsz", False):
            if train_batch_size < self.ppo_mini_batch_size:
                raise ValueError(
                    f"train_batch_size ({train_batch_size}) must be >= actor.ppo_mini_batch_size "
                    f"({self.ppo_mini_batch_size})"
                )
            if rows is not None and self.ppo_mini_batch_size % rows:
                raise ValueError(
                    f"ppo_mini_batch_size ({self.ppo_mini_batch_size}) must be divisible by ppo_micro_batch_size "
                    f"({rows})"
                )
            if rows is not None and rows * splits < n_gpus:
                raise ValueError(
                    f"ppo_micro_batch_size ({rows}) * ulysses_sequence_parallel_size ({splits}) must be >= n_gpus "
                    f"({n_gpus})"
                )
        if splits > 1 and model_config and not model_config.get("use_remove_padding", False):
            raise ValueError(
                "When using sequence parallelism for actor/ref policy, you must enable `use_remove_padding`."
            )

    @property
    def global_batch_info(self) -> dict[str, Any]:
        self.__dict__["_counts_read"] = True
        return dict(self._counts or {})


def _check_micro_batches(rows: int | None, rows_per_gpu: int | None) -> None:
    """One of the two has to be set."""
    if rows is not None and rows_per_gpu is not None:
        raise ValueError(
            "[actor] You have set both 'actor.ppo_micro_batch_size' AND 'actor.ppo_micro_batch_size_per_gpu'. Please "
            "remove 'actor.ppo_micro_batch_size', which is deprecated."
        )
    assert rows is not None or rows_per_gpu is not None, (
        "[actor] Please set at least one of 'actor.ppo_micro_batch_size' or 'actor.ppo_micro_batch_size_per_gpu' if "
        "use_dynamic_bsz is not enabled."
    )


FSDPActorConfig = McoreActorConfig = ActorConfig  # `strategy` is a setting of one class


class PolicyLossConfig(BaseConfig):
    """The section `actor_rollout_ref.actor.policy_loss`."""

    _section = root.PolicyLossConfig


def actor_view(section: Any, counts: dict[str, Any]) -> ActorConfig:
    """The actor's settings as a policy loss sees them: with those that the command added."""
    actors, losses = (added_to(f"actor_rollout_ref.actor.{part}") for part in ("", "policy_loss."))
    own = PolicyLossConfig.of(section["policy_loss"] if isinstance(section, Mapping) else section.policy_loss, **losses)
    return ActorConfig.of(section, **actors, policy_loss=own, _counts=counts)

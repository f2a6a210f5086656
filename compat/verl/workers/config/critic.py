"""Settings of the critic, by verl's classes and with their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.config import root
from verl._config import BaseConfig
from verl.utils.profiler.profile import ProfilerConfig
from verl.workers.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.workers.config.optimizer import OptimizerConfig

_MUTABLE = frozenset(
    {"ppo_micro_batch_size_per_gpu", "ppo_mini_batch_size", "ppo_micro_batch_size", "engine", "model", "optim"}
)


class CriticConfig(BaseConfig):
    """The section `critic`. What only verl has is read by verl's code alone."""

    _section = root.CriticConfig
    _defaults: Any = {  # noqa: RUF012
        "ppo_micro_batch_size_per_gpu": None,
        "ppo_micro_batch_size": None,
        "rollout_n": 1,
        "ppo_mini_batch_size": 1,
        "use_dynamic_bsz": False,
        "ppo_max_token_len_per_gpu": 32768,
        "forward_max_token_len_per_gpu": 32768,
        "ppo_infer_micro_batch_size_per_gpu": None,
        "ppo_infer_max_token_len_per_gpu": 32768,
        "data_loader_seed": 42,
        "shuffle": True,
        "loss_scale_factor": None,
        "engine": BaseConfig(),
        "optim": OptimizerConfig(),
        "profiler": ProfilerConfig(),
    }
    _mutable_fields = _MUTABLE

    def _check(self, given: Mapping[str, Any]) -> None:
        if self.get("strategy") is None:
            raise ValueError("[critic] strategy is missing: give fsdp, fsdp2 or megatron")
        if self.use_dynamic_bsz:
            return
        rows, rows_per_gpu = self.ppo_micro_batch_size, self.ppo_micro_batch_size_per_gpu
        names = "'critic.micro_batch_size' {} 'critic.micro_batch_size_per_gpu'"
        if rows is None and rows_per_gpu is None:
            raise ValueError(f"[critic] Please set at least one of {names.format('or')}.")
        if rows is not None and rows_per_gpu is not None:
            raise ValueError(f"[critic] You have set both {names.format('AND')}; remove the first, it is deprecated.")
        if rows is not None and self.ppo_mini_batch_size % rows:
            raise ValueError(
                f"[critic] ppo_mini_batch_size ({self.ppo_mini_batch_size}) must be divisible by ppo_micro_batch_size "
                f"({rows})"
            )

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """Raise where these sizes do not fit the run."""
        if self.use_dynamic_bsz:
            return
        if train_batch_size < self.ppo_mini_batch_size:
            raise ValueError(
                f"train_batch_size ({train_batch_size}) must be >= critic.ppo_mini_batch_size "
                f"({self.ppo_mini_batch_size})"
            )
        splits, rows = self.get("ulysses_sequence_parallel_size", n_gpus), self.ppo_micro_batch_size
        if rows is not None and rows * splits < n_gpus:
            raise ValueError(
                f"critic.ppo_micro_batch_size ({rows}) * ulysses_sequence_parallel_size ({splits}) must be >= n_gpus "
                f"({n_gpus})"
            )


class FSDPCriticConfig(CriticConfig):
    """A critic on FSDP."""

    _defaults: Any = {  # noqa: RUF012
        **CriticConfig._defaults,
        "strategy": "fsdp",
        "fsdp": FSDPEngineConfig(),
        "forward_micro_batch_size": 1,
        "forward_micro_batch_size_per_gpu": 1,
        "ulysses_sequence_parallel_size": 1,
        "grad_clip": 1.0,
    }
    _mutable_fields = _MUTABLE | {"forward_micro_batch_size", "forward_micro_batch_size_per_gpu"}

    def _check(self, given: Mapping[str, Any]) -> None:
        super()._check(given)
        model = self.get("model")
        if (
            self.ulysses_sequence_parallel_size > 1
            and isinstance(model, Mapping)
            and not model.get("use_remove_padding", True)
        ):
            raise ValueError("When using sequence parallelism for critic, you must enable `use_remove_padding`.")
        self.engine = self.fsdp
        self.engine.__dict__["strategy"] = self.strategy


class McoreCriticConfig(CriticConfig):
    """A critic on Megatron-Core."""

    _defaults: Any = {  # noqa: RUF012
        **CriticConfig._defaults,
        "strategy": "megatron",
        "nccl_timeout": 600,
        "load_weight": True,
        "megatron": McoreEngineConfig(sequence_parallel=False),
    }

    def _check(self, given: Mapping[str, Any]) -> None:
        super()._check(given)
        self.engine = self.megatron

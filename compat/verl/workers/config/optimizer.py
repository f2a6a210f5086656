"""Settings of the optimizer, and the optimizer that they describe."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from verl._config import BaseConfig

_BASE = {
    "lr": 1e-3,
    "lr_warmup_steps_ratio": 0.0,
    "total_training_steps": -1,
    "weight_decay": 0.01,
    "lr_warmup_steps": -1,
    "betas": (0.9, 0.999),
    "clip_grad": 1.0,
    "grad_clip": None,
}
_SCHEDULES = ("constant", "cosine")
_DTYPES = ("fp32", "float32", "32", "bf16", "bfloat16")


class OptimizerConfig(BaseConfig):
    """What every engine's optimizer has."""

    _defaults = _BASE

    def _check(self, given: Mapping[str, Any]) -> None:
        if self.grad_clip is not None:
            warnings.warn("`grad_clip` is deprecated, use `clip_grad` instead.", DeprecationWarning, stacklevel=3)
            self.clip_grad = self.grad_clip


class FSDPOptimizerConfig(OptimizerConfig):
    """An optimizer of torch, or of a module that has one by that name."""

    _defaults = {  # noqa: RUF012
        **_BASE,
        "optimizer": "AdamW",
        "optimizer_impl": "torch.optim",
        "min_lr_ratio": None,
        "warmup_style": None,
        "lr_scheduler_type": "constant",
        "num_cycles": 0.5,
        "override_optimizer_config": None,
        "zero_indexed_step": True,
    }

    def _check(self, given: Mapping[str, Any]) -> None:
        if self.warmup_style is not None:
            warnings.warn(
                "`warmup_style` is deprecated, use `lr_scheduler_type` instead.", DeprecationWarning, stacklevel=3
            )
            self.lr_scheduler_type = self.warmup_style
        assert self.lr_scheduler_type in _SCHEDULES, f"lr_scheduler_type is one of {', '.join(_SCHEDULES)}"
        super()._check(given)


class McoreOptimizerConfig(OptimizerConfig):
    """Megatron's optimizer."""

    _defaults = {  # noqa: RUF012
        **_BASE,
        "optimizer": "adam",
        "lr_warmup_init": 0.0,
        "lr_decay_steps": None,
        "lr_decay_style": "linear",
        "min_lr": 0.0,
        "weight_decay_incr_style": "constant",
        "lr_wsd_decay_style": "exponential",
        "lr_wsd_decay_steps": None,
        "use_checkpoint_opt_param_scheduler": False,
        "use_precision_aware_optimizer": False,
        "main_grads_dtype": "fp32",
        "exp_avg_dtype": "fp32",
        "exp_avg_sq_dtype": "fp32",
        "override_optimizer_config": None,
    }

    def _check(self, given: Mapping[str, Any]) -> None:
        for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            assert str(self[name]) in _DTYPES, f"`{name}` must be one of {', '.join(_DTYPES)}, got {self[name]!r}"
        super()._check(given)


def build_optimizer(parameters: Iterable[Any], config: FSDPOptimizerConfig) -> Any:
    """The optimizer over these parameters: the class `optimizer` of the module `optimizer_impl`."""
    try:
        module = importlib.import_module(config.optimizer_impl)
    except ImportError as error:
        raise ImportError(f"Failed to import module '{config.optimizer_impl}': {error}") from error
    if not hasattr(module, config.optimizer):
        raise AttributeError(f"Optimizer '{config.optimizer}' not found in module '{config.optimizer_impl}'.")
    settings = {"lr": config.lr, "weight_decay": config.weight_decay}
    if "adam" in config.optimizer.lower():
        settings["betas"] = config.betas
    return getattr(module, config.optimizer)(parameters, **settings, **(config.override_optimizer_config or {}))

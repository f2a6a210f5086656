"""posttrain: RL post-training of language models. `posttrain.train(...)` does what the `posttrain` command does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain import lazy, moved
from posttrain.version import __version__

lazy.dialect_package = "posttrain.other_systems"
lazy.check_modules = (
    "posttrain.data.own_dataset",
    "posttrain.data.rows",
    "posttrain.engine.megatron.entry",  # it registers its engine
    "posttrain.engine.settings",
    "posttrain.rollout.engine_kwargs",
    "posttrain.conversations.settings",
    "posttrain.models.model_files",
)

__all__ = ["DataProto", "__version__", "train"]

if TYPE_CHECKING:
    from posttrain.protocol import DataProto
    from posttrain.trainer.run.result import RunResult

moved.install()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # what is imported only when it is asked for can be found, too


def __getattr__(name: str) -> Any:
    """Heavy parts are imported when they are first asked for, so that `import posttrain` is instant."""
    if name == "DataProto":
        from posttrain.protocol import DataProto

        return DataProto
    raise AttributeError(f"module 'posttrain' has no attribute {name!r}")


def train(
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    reward_weights: Sequence[float] | None = None,
    data: Sequence[dict[str, Any]] | None = None,
    val_data: Sequence[dict[str, Any]] | None = None,
) -> RunResult:
    """Do what the command does, and give the run's directory and metrics.

    `reward` is a function, or a list of them whose scores are summed with `reward_weights` (1 each if there are none).
    Functions written for TRL's trainers run as they are.

    Example: `posttrain.train(["algorithm.adv_estimator=grpo"], reward=my_reward, data=[{"prompt": "1 + 1 = ?", ...}])`.
    """
    from posttrain.config import load_config
    from posttrain.errors import UserError
    from posttrain.trainer.constants_ppo import apply_environment

    apply_environment()
    provided = [
        key
        for key, value in (
            ("data.train_files", data),
            ("data.val_files", val_data),
            ("custom_reward_function.path", reward),
        )
        if value is not None
    ]
    given = _summed(reward, reward_weights)
    resolved = load_config(overrides or {}, environment=True, provided=provided)
    if resolved.dry_run:
        raise UserError("trainer.dry_run is for the commands; from Python: posttrain.doctor.command.examine([...])")
    from posttrain.tracking.progress import waiting

    with waiting():
        from posttrain.trainer.ppo.runner import run_training

    return run_training(resolved, reward=given, data=data, val_data=val_data)


def _summed(reward: Any, weights: Sequence[float] | None) -> Any:
    """One function as it is, several as a list with weights."""
    from posttrain.errors import UserError
    from posttrain.rewards.types import RewardList

    if weights is not None and reward is None:
        raise UserError("reward_weights are given without reward: give the functions that they weigh.")
    if isinstance(reward, list | tuple) or weights is not None:
        return RewardList(tuple(reward) if isinstance(reward, list | tuple) else (reward,), weights)
    return reward

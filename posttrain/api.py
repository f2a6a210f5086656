"""`posttrain.train(...)`: a run from a script or a notebook, with Python objects for reward and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.trainer.run.result import RunResult


def train(
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    reward: Callable[..., Any] | None = None,
    data: Sequence[dict[str, Any]] | None = None,
    val_data: Sequence[dict[str, Any]] | None = None,
) -> RunResult:
    """Do what the command does, and give the run's directory and metrics.

    Example: `posttrain.train(["algorithm.adv_estimator=grpo"], reward=my_reward, data=[{"prompt": "1 + 1 = ?", ...}])`.
    """
    from posttrain.config import load_config
    from posttrain.errors import UserError
    from posttrain.trainer.constants_ppo import apply_environment
    from posttrain.trainer.registered import registered_names

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
    resolved = load_config(overrides or {}, environment=True, provided=provided, known_names=registered_names())
    if resolved.dry_run:
        raise UserError("trainer.dry_run is for the commands; from Python: posttrain.doctor.command.examine([...])")
    from posttrain.tracking.waiting import waiting

    with waiting():
        from posttrain.trainer.ppo.runner import run_training

    return run_training(resolved, reward=reward, data=data, val_data=val_data)

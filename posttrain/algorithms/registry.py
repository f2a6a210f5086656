"""Algorithms by name: two plain dicts, the decorators that fill them and the functions that read them.

    @register_adv_est("my_estimator", compares_group=True)
    def compute_my_advantage(token_level_rewards, response_mask, **kwargs): ...

    @register_policy_loss("my_loss")
    def compute_my_policy_loss(old_log_prob, log_prob, advantages, response_mask, **kwargs): ...

What the trainer must know about a function it reads from attributes that the decorators set.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any, Protocol, TypeVar, cast

from posttrain.algorithms.common import AlgorithmError, unknown_name


class AdvantageEstimator(StrEnum):
    """The estimators that come with the package."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_PASSK = "grpo_passk"
    RLOO = "rloo"
    REMAX = "remax"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    OPO = "opo"
    GPG = "gpg"
    GDPO = "gdpo"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"


class AdvantageFunction(Protocol):
    """Gives (advantages, returns), both (rows, response length)."""

    compares_group: bool
    """Compares the responses of one prompt, so `rollout.n` must be above 1."""
    needs_critic: bool
    """Reads `values`, so a critic is trained."""
    needs_greedy_baseline: bool
    """Reads `reward_baselines`, so one greedy response per prompt is generated and scored."""
    needs_sum_pi_squared: bool
    """Reads `sum_pi_squared` and `old_log_probs`, so both are computed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class PolicyLossFunction(Protocol):
    """Gives (per-token losses, metrics)."""

    prepare: Callable[..., dict[str, Any]] | None
    """Run once over the whole mini-batch of all ranks; what it gives is passed to the loss by name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


ADV_ESTIMATORS: dict[str, AdvantageFunction] = {}
POLICY_LOSSES: dict[str, PolicyLossFunction] = {}

F = TypeVar("F", bound=Callable[..., Any])


def register_adv_est(
    name_or_enum: str | Enum,
    *,
    compares_group: bool = False,
    needs_critic: bool = False,
    needs_greedy_baseline: bool = False,
    needs_sum_pi_squared: bool = False,
) -> Callable[[F], F]:
    """Decorator: makes a function selectable by `algorithm.adv_estimator=NAME`."""
    facts = {"compares_group": compares_group, "needs_critic": needs_critic}
    facts |= {"needs_greedy_baseline": needs_greedy_baseline, "needs_sum_pi_squared": needs_sum_pi_squared}
    return _register(ADV_ESTIMATORS, "advantage estimator", name_or_enum, facts)


def register_policy_loss(name: str | Enum, *, prepare: Callable[..., dict[str, Any]] | None = None) -> Callable[[F], F]:
    """Decorator: makes a function selectable by `actor_rollout_ref.actor.policy_loss.loss_mode=NAME`."""
    return _register(POLICY_LOSSES, "policy loss", name, {"prepare": prepare})


def get_adv_estimator(name_or_enum: str | Enum) -> AdvantageFunction:
    """The estimator of this name, or an error that lists the known ones."""
    return _find(ADV_ESTIMATORS, "advantage estimator", "algorithm.adv_estimator", name_or_enum)


def get_policy_loss(name: str | Enum) -> PolicyLossFunction:
    """The policy loss of this name, or an error that lists the known ones."""
    return _find(POLICY_LOSSES, "policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode", name)


def group_estimators() -> list[str]:
    """Names of the estimators that compare the responses of one prompt."""
    return [name for name, function in ADV_ESTIMATORS.items() if function.compares_group]


def critic_estimators() -> list[str]:
    """Names of the estimators that need a critic."""
    return [name for name, function in ADV_ESTIMATORS.items() if function.needs_critic]


def name_of(name: str | Enum) -> str:
    """The plain name behind a name or an enum member."""
    return str(name.value if isinstance(name, Enum) else name)


def _register(registry: dict[str, Any], what: str, name: str | Enum, facts: dict[str, Any]) -> Callable[[F], F]:
    if callable(name):
        raise AlgorithmError(f'The decorator for a new {what} needs a name in quotes, as in @...("my_name").')
    key = name_of(name)

    def decorate(function: F) -> F:
        taken = registry.get(key)
        if taken is not None and not _same(taken, function):
            raise AlgorithmError(
                f"The {what} `{key}` is already registered by {_origin(taken)}, so {_origin(function)} cannot take "
                "that name. Register it under another one."
            )
        for fact, value in facts.items():
            setattr(function, fact, value)
        registry[key] = cast(Any, function)
        return function

    return decorate


def _find(registry: dict[str, Any], what: str, setting: str, name: str | Enum) -> Any:
    function = registry.get(name_of(name))
    if function is None:
        hint = f"It is set by `{setting}`; one of your own is found when its file is loaded by "
        raise unknown_name(what, name_of(name), registry, hint + "`actor_rollout_ref.model.external_lib`.")
    return function


def _same(old: Any, new: Any) -> bool:
    """The same definition run again: a notebook cell, or one file imported under two names."""
    if old is new:
        return True
    name_old, name_new = (getattr(f, "__qualname__", repr(f)) for f in (old, new))
    if name_old != name_new or "<lambda>" in name_new:
        return False
    file_old, file_new = (getattr(getattr(f, "__code__", None), "co_filename", f) for f in (old, new))
    return getattr(old, "__module__", None) == getattr(new, "__module__", None) or file_old == file_new


def _origin(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"

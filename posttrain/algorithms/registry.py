"""Algorithms by name. The file of an algorithm declares everything that is true of it; the rest is derived from that.

    @dataclass
    class ToprSettings:
        topr_bound: float = setting(2.0, range=POSITIVE)
        \"\"\"Largest ratio of a token with a negative advantage.\"\"\"

    @register_policy_loss("topr", settings=ToprSettings, reads=(), metrics=PPO_KL)
    def compute_policy_loss_topr(old_log_prob, log_prob, advantages, response_mask, topr_bound, **kwargs): ...

From this follow the key `actor_rollout_ref.actor.policy_loss.topr_bound` with its check, the note that `clip_ratio` has
no effect, the page of `posttrain explain topr`, the YAML tree and the docs. Neither list nor table names `topr`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeVar, cast

from posttrain.algorithms.common import AlgorithmError, read_setting
from posttrain.registry import Registry, name_of
from posttrain.settings import range_of

ESTIMATOR_KEY, LOSS_KEY = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"
_EXTERNAL = "one of your own is found when its file is loaded by `actor_rollout_ref.model.external_lib`."

F = TypeVar("F", bound=Callable[..., Any])
D = TypeVar("D", bound="Declaration")
S = TypeVar("S")


class Preset(NamedTuple):
    """`algorithm=NAME`: what it is in a sentence, and the values that it sets by their full keys."""

    sentence: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Declaration:
    """An algorithm with what its file says about it. It is called like its function."""

    name: str
    function: Callable[..., Any]
    settings: type | None = None
    """Settings of its own: a dataclass whose fields have a default, a range or choices, and one sentence."""
    reads: tuple[str, ...] | None = None
    """Settings that it shares with others and reads; the others have no effect. None: it does not say."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Its metrics, each with what it is and what to make of it."""
    presets: Mapping[str, Preset] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def is_built_in(self) -> bool:
        return self.function.__module__.startswith("posttrain.")

    @property
    def page(self) -> str:
        """What `posttrain explain` says: the docstring of its file, or else of the function."""
        module = sys.modules.get(self.function.__module__)
        return (getattr(module, "__doc__", None) or self.function.__doc__ or "").strip()


@dataclass(frozen=True)
class EstimatorDeclaration(Declaration):
    """An advantage estimator: its function gives (advantages, returns), both (rows, response length)."""

    compares_group: bool = False
    """Compares the responses of one prompt, so `rollout.n` must be above 1."""
    needs_critic: bool = False
    """Reads `values`, so a critic is trained."""
    needs_greedy_baseline: bool = False
    """Reads `reward_baselines`, so one greedy response per prompt is generated and scored."""
    needs_sum_pi_squared: bool = False
    """Reads `sum_pi_squared` and `old_log_probs`, so both are computed."""
    reads_reward_parts: bool = False
    """Learns from the parts of the reward instead of its sum, so KL in the reward would be lost."""
    kl_belongs_in_loss: bool = False
    """Its paper puts KL into the loss; KL in the reward is remarked on."""


@dataclass(frozen=True)
class LossDeclaration(Declaration):
    """A policy loss: its function gives (per-token losses, metrics)."""

    prepare: Callable[..., dict[str, Any]] | None = None
    """Run once over the whole mini-batch of all ranks; what it gives is passed to the loss by name."""
    loss_agg_mode: str | None = None
    """The aggregation of its paper, which it gets where `loss_agg_mode` is not set."""
    clips_ratio: bool = False
    """Clips the ratio to 1 - low ... 1 + high, so the lower side must not be above 1."""


ADV_ESTIMATORS: Registry[EstimatorDeclaration] = Registry(
    "advantage estimator",
    package="posttrain.algorithms.advantages",
    error=AlgorithmError,
    hint=f"It is set by `{ESTIMATOR_KEY}`; {_EXTERNAL}",
)
POLICY_LOSSES: Registry[LossDeclaration] = Registry(
    "policy loss",
    package="posttrain.algorithms.losses",
    error=AlgorithmError,
    hint=f"It is set by `{LOSS_KEY}`; {_EXTERNAL}",
)


def register_adv_est(name_or_enum: str | Enum, **facts: Any) -> Callable[[F], F]:
    """Decorator: makes a function selectable by `algorithm.adv_estimator=NAME`. `facts` are fields of
    `EstimatorDeclaration`."""
    return _register(ADV_ESTIMATORS, EstimatorDeclaration, name_or_enum, facts)


def register_policy_loss(name: str | Enum, **facts: Any) -> Callable[[F], F]:
    """Decorator: makes a function selectable by `actor_rollout_ref.actor.policy_loss.loss_mode=NAME`. `facts` are
    fields of `LossDeclaration`."""
    return _register(POLICY_LOSSES, LossDeclaration, name, facts)


def get_adv_estimator(name_or_enum: str | Enum) -> EstimatorDeclaration:
    """The estimator of this name, or an error that lists the known ones."""
    return ADV_ESTIMATORS.find(name_or_enum)


def get_policy_loss(name: str | Enum) -> LossDeclaration:
    """The policy loss of this name, or an error that lists the known ones."""
    return POLICY_LOSSES.find(name)


def group_estimators() -> list[str]:
    """Names of the estimators that compare the responses of one prompt."""
    return [name for name, estimator in ADV_ESTIMATORS.items() if estimator.compares_group]


def critic_estimators() -> list[str]:
    """Names of the estimators that need a critic."""
    return [name for name, estimator in ADV_ESTIMATORS.items() if estimator.needs_critic]


def own_settings(kind: type[S], config: Any, section: str = "") -> S:
    """An algorithm's own settings, from a section of any kind (`section` is its name); null or absent is the default.

    A run's settings are checked before it starts. This check is for calls of an algorithm from Python.
    """
    fields = {one.name: one for one in dataclasses.fields(cast(Any, kind))}
    values = {name: value for name in fields if (value := read_setting(config, name, None)) is not None}
    for name, value in values.items():
        limits = range_of(fields[name])
        if limits is not None and not limits.allows(value):
            raise AlgorithmError(f"{section}{name} is {value:g}; it must be {limits.words}.")
    return kind(**values)


def _register(
    registry: Registry[D], kind: Callable[..., D], name: str | Enum, facts: Mapping[str, Any]
) -> Callable[[F], F]:
    registry.check_name(name)

    def decorate(function: F) -> F:
        registry.add(name, kind(name_of(name), function, **facts))
        return function

    return decorate

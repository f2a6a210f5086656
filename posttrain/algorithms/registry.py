"""Algorithms by name. An algorithm's file declares everything about it; the rest is derived from that.

    @dataclass
    class ToprSettings:
        topr_bound: float = setting(2.0, range=POSITIVE)
        \"\"\"Largest ratio of a token with a negative advantage.\"\"\"

    @register_policy_loss("topr", settings=ToprSettings, reads=(), metrics=PPO_KL)
    def compute_policy_loss_topr(old_log_prob, log_prob, advantages, response_mask, topr_bound, **kwargs): ...

From this follow the key `actor_rollout_ref.actor.policy_loss.topr_bound` with its check, the note that `clip_ratio` has
no effect, the page of `posttrain explain topr`, the YAML tree and the docs. No other list or table names `topr`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeVar, cast

from posttrain.algorithms.common import AlgorithmError, read_setting
from posttrain.registry import Registry, name_of
from posttrain.settings import range_of

ESTIMATOR_KEY, LOSS_KEY = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"
_EXTERNAL = "one of your own is found when its file is loaded by `actor_rollout_ref.model.external_lib`."

F = TypeVar("F", bound=Callable[..., Any])
D = TypeVar("D", bound="Declaration")
S = TypeVar("S")


class Preset(NamedTuple):
    """`algorithm=NAME`: a sentence about it, and the values that it sets, by their full keys."""

    sentence: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Declaration:
    """An algorithm with what its file declares about it. Calling it calls its function."""

    name: str
    function: Callable[..., Any]
    # Its own settings: a dataclass whose fields have a default, a range or choices, and one sentence.
    settings: type | None = None
    # Shared settings that it reads; all others have no effect on it. None: not declared.
    reads: tuple[str, ...] | None = None
    # Its metrics, each with an explanation.
    metrics: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def is_built_in(self) -> bool:
        return self.function.__module__.startswith("posttrain.")

    @property
    def page(self) -> str:
        """What `posttrain explain` prints: the docstring of its file, or else of the function."""
        # A user's function may come from a file without a docstring.
        module = sys.modules.get(self.function.__module__)
        return (getattr(module, "__doc__", None) or self.function.__doc__ or "").strip()


@dataclass(frozen=True)
class EstimatorDeclaration(Declaration):
    """An advantage estimator: its function returns (advantages, returns), both (rows, response length)."""

    # Compares the responses to one prompt, so `rollout.n` must be above 1.
    compares_group: bool = False
    # Reads `values`, so a critic is trained.
    needs_critic: bool = False
    # Reads `reward_baselines`, so one greedy response per prompt is generated and scored.
    needs_greedy_baseline: bool = False
    # Reads `sum_pi_squared` and `old_log_probs`, so both are computed.
    needs_sum_pi_squared: bool = False
    # Learns from the parts of the reward instead of its sum, so KL in the reward would be lost.
    reads_reward_parts: bool = False
    # Given the scored batch and the section `algorithm`, returns the uids of prompts that the next step repeats, with
    # new responses. None: every step takes new prompts.
    prompts_to_repeat: Callable[[Any, Any], list[Any]] | None = None
    # Its paper puts KL into the loss, so a run with KL in the reward gets a note.
    kl_belongs_in_loss: bool = False
    # Reads only the sum of a response's rewards (and whether it has tokens), and gives all its tokens one advantage. It
    # is then given rewards and mask of one column, and with several workers no tokens reach the driver for it.
    per_response: bool = False
    # How a sample of several rows (a conversation with branches) enters it: `sample` gives one advantage to all tokens
    # of all its rows, `turns` reads its turns one after the other as one response. None: such samples are rejected.
    several_rows: Literal["sample", "turns"] | None = None


@dataclass(frozen=True)
class LossDeclaration(Declaration):
    """A policy loss: its function returns (per-token losses, metrics)."""

    # Run once over the whole mini-batch of all ranks; its results are passed to the loss by name.
    prepare: Callable[..., dict[str, Any]] | None = None
    # The aggregation of its paper, used if `loss_agg_mode` is not set.
    loss_agg_mode: str | None = None
    # Where its paper takes the old log-probs from, used if `old_log_probs` is not set.
    old_log_probs: str | None = None
    # Has the ratio to the old policy in it. Where that is the rollout's (`old_log_probs=rollout`), a loss with a ratio
    # needs no importance weights, and one without is multiplied by them.
    has_ratio: bool = True
    # Clips the ratio to 1 - low ... 1 + high, so `low` must not be above 1.
    clips_ratio: bool = False


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
    """Decorator: register `algorithm.adv_estimator=NAME`. `facts` are fields of `EstimatorDeclaration`."""
    return _register(ADV_ESTIMATORS, EstimatorDeclaration, name_or_enum, facts)


def register_policy_loss(name: str | Enum, **facts: Any) -> Callable[[F], F]:
    """Decorator: register a function as `actor_rollout_ref.actor.policy_loss.loss_mode=NAME`.

    `facts` are fields of `LossDeclaration`.
    """
    return _register(POLICY_LOSSES, LossDeclaration, name, facts)


def get_adv_estimator(name_or_enum: str | Enum) -> EstimatorDeclaration:
    """Return the estimator of this name; an error lists the known ones."""
    return ADV_ESTIMATORS.find(name_or_enum)


def get_policy_loss(name: str | Enum) -> LossDeclaration:
    """Return the policy loss of this name; an error lists the known ones."""
    return POLICY_LOSSES.find(name)


def group_estimators() -> list[str]:
    """Return the names of estimators that compare the responses to one prompt."""
    return [name for name, estimator in ADV_ESTIMATORS.items() if estimator.compares_group]


def critic_estimators() -> list[str]:
    """Return the names of estimators that need a critic."""
    return [name for name, estimator in ADV_ESTIMATORS.items() if estimator.needs_critic]


def own_settings(kind: type[S], config: Any, section: str = "") -> S:
    """Return an algorithm's own settings from any kind of section (`section` is its name), with defaults.

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
    # Without a name (`@register_adv_est`) it would get the function itself.
    registry.check_name(name)

    def decorate(function: F) -> F:
        registry.add(name, kind(name_of(name), function, **facts))
        return function

    return decorate

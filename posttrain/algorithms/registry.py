"""Algorithms by name: how they are declared, found and called. An algorithm's file declares everything about it; the
rest is derived from that.

    @dataclass
    class ToprSettings:
        topr_bound: float = setting(2.0, range=POSITIVE)
        \"\"\"Largest ratio of a token with a negative advantage.\"\"\"

    @register_policy_loss("topr", settings=ToprSettings, reads=(), metrics=PPO_KL)
    def compute_policy_loss_topr(old_log_prob, log_prob, advantages, response_mask, topr_bound, **kwargs): ...

From this follow the key `actor_rollout_ref.actor.policy_loss.topr_bound` with its check, the note that `clip_ratio` has
no effect, the page of `posttrain explain topr`, the YAML tree and the docs. No other list or table names `topr`.

A call, of a built-in algorithm or of a user's, passes what its signature requests, and checks what it returns.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeVar, cast

from posttrain.algorithms.common import AlgorithmError, file_of, keep_masked, read_setting
from posttrain.lazy import torch
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


def loss_settings(kind: type[S], config: Any) -> S:
    """Return a loss's own settings, from the actor's section."""
    return own_settings(kind, read_setting(config, "policy_loss", None), "actor_rollout_ref.actor.policy_loss.")


def _register(
    registry: Registry[D], kind: Callable[..., D], name: str | Enum, facts: Mapping[str, Any]
) -> Callable[[F], F]:
    # Without a name (`@register_adv_est`) it would get the function itself.
    registry.check_name(name)

    def decorate(function: F) -> F:
        if (settings := facts.get("settings")) is not None:
            _check_declared(settings, f"the {registry.kind} `{name_of(name)}`", _ARGUMENTS[registry.kind])
        registry.add(name, kind(name_of(name), function, **facts))
        return function

    return decorate


# What calls pass by name besides settings.
_ARGUMENTS = {
    POLICY_LOSSES.kind: (
        *("old_log_prob", "log_prob", "advantages", "response_mask", "config", "rollout_is_weights", "loss_agg_mode"),
        "counts",
    ),
    ADV_ESTIMATORS.kind: ("token_level_rewards", "response_mask", "index", "config", "data"),
}


def _check_declared(settings: Any, whose: str, arguments: tuple[str, ...]) -> None:
    if not (isinstance(settings, type) and dataclasses.is_dataclass(settings)):
        shown = settings.__name__ if isinstance(settings, type) else repr(settings)
        raise AlgorithmError(f"settings={shown} of {whose} is no dataclass: give a class with @dataclass above it.")
    place = f"of {settings.__qualname__} in {file_of(settings)} ({whose})"
    for name, value in vars(settings).items():
        is_value = not (name.startswith("_") or callable(value) or hasattr(value, "__get__"))
        if is_value and not any(name in vars(base).get("__annotations__", ()) for base in settings.__mro__):
            raise AlgorithmError(
                f"The setting `{name}` {place} has no type: write it as `{name}: TYPE = setting({value!r})`."
            )
    for one in dataclasses.fields(settings):
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            raise AlgorithmError(
                f"The setting `{one.name}` {place} has no default: write it as `{one.name}: TYPE = setting(DEFAULT)`."
            )
        if one.name in arguments:
            raise AlgorithmError(
                f"The setting `{one.name}` {place} has the name of an argument that the function gets anyway: choose "
                "another one."
            )


@dataclass
class PolicyLoss:
    """The result of a policy loss: `loss` is (rows, length), or one number if `is_scalar`; metrics carry no gradient.

    `is_share` means that the number is this part's share of the whole mini-batch's loss.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor | float]
    is_scalar: bool
    is_share: bool = False


def scalar_loss_note(name: str) -> str:
    """Return the note that a run prints once if its policy loss returns one number."""
    return (
        f"The policy loss `{name}` returns one number instead of a loss per token. Each part of a mini-batch is "
        "weighted by its share of the tokens: exact for a mean over tokens, while any other scalar depends on how the "
        "mini-batch is split. loss_agg_mode has no effect on it."
    )


def compute_advantage(
    name: str | Enum,
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    config: Any = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns) by the named estimator. `more` holds further fields of the batch, such as `values`.

    A parameter named like a setting of `config` (the section `algorithm`) receives that setting.
    """
    estimator, name = get_adv_estimator(name), name_of(name)
    function = estimator.function
    if token_level_rewards.shape != response_mask.shape:
        raise AlgorithmError(
            f"`token_level_rewards` has shape {tuple(token_level_rewards.shape)} and `response_mask` "
            f"{tuple(response_mask.shape)}: both span the response alone, (rows, response length)."
        )
    # Estimators take different fields of the batch: each gets those that its signature names.
    offered = {"token_level_rewards": token_level_rewards, "response_mask": response_mask, **more}
    offered |= {"index": index, "config": config}
    arguments = _accepted(function, offered)
    own = {} if estimator.settings is None else vars(own_settings(estimator.settings, config, "algorithm."))
    # So that a user's estimator can simply name a setting as a parameter.
    for parameter in _parameters(function).keys() - offered.keys():
        value = read_setting(config, parameter, own.get(parameter))
        if value is not None:
            arguments[parameter] = value
    result = _call(function, "advantage estimator", name, arguments)
    shape = token_level_rewards.shape
    if not (isinstance(result, tuple) and len(result) == 2 and all(_has_shape(part, shape) for part in result)):
        raise AlgorithmError(
            f"The advantage estimator `{name}` must return (advantages, returns), two tensors of shape {tuple(shape)}, "
            f"but gave {_describe(result)}."
        )
    return result


def prepare_policy_loss(name: str | Enum, mini_batch: Any, config: Any = None) -> dict[str, Any]:
    """Return what the named loss needs of the whole mini-batch: the result of its `prepare`, or an empty dict.

    `config` (the section `actor_rollout_ref.actor`) is passed if `prepare` has a parameter of that name.
    """
    prepare = get_policy_loss(name).prepare
    if prepare is None:
        return {}
    further = {"config": config} if "config" in _parameters(prepare) else {}
    prepared = _call(prepare, "prepare() of the policy loss", name_of(name), further, mini_batch)
    if not isinstance(prepared, Mapping):
        raise AlgorithmError(
            f"prepare() of the policy loss `{name_of(name)}` must return a dict of arguments, but gave "
            f"{_describe(prepared)}."
        )
    return dict(prepared)


def call_policy_loss(
    name: str | Enum,
    *,
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    prepared: Mapping[str, Any] | None = None,
    counts: Mapping[str, Any] | None = None,
) -> PolicyLoss:
    """Compute the named loss on one part of a mini-batch.

    `prepared` is the result of the loss's `prepare` for the whole mini-batch, `counts` are those that `agg_loss` needs;
    a loss that takes them by name returns its share as one number. A parameter named like one of the loss's own
    settings receives that setting.
    """
    loss, name = get_policy_loss(name), name_of(name)
    function = loss.function
    arguments = {"old_log_prob": old_log_prob, "log_prob": log_prob, "advantages": advantages}
    arguments |= {"response_mask": response_mask, "config": config, "rollout_is_weights": rollout_is_weights}
    arguments |= {"loss_agg_mode": read_setting(config, "loss_agg_mode", "token-mean"), **(prepared or {})}
    parameters = _parameters(function)
    if loss.settings is not None:
        own = vars(loss_settings(loss.settings, config))
        arguments |= {name: value for name, value in own.items() if name in parameters}
    # Such a loss can divide by the counts of the whole mini-batch itself.
    takes_counts = "counts" in parameters
    if takes_counts:
        arguments["counts"] = dict(counts or {})
    accepted = _accepted(function, arguments)
    # Silently ignoring the weights would train with an uncorrected mismatch.
    if rollout_is_weights is not None and "rollout_is_weights" not in accepted:
        raise AlgorithmError(
            f"algorithm.rollout_correction (rollout_is or rollout_rs) is on, but the policy loss `{name}` takes no "
            "`rollout_is_weights`. Multiply them into its token losses, or set both to null."
        )
    result = _call(function, "policy loss", name, accepted)
    losses, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    shapes = ((), log_prob.shape)
    if not isinstance(losses, torch.Tensor) or losses.shape not in shapes or not isinstance(metrics, Mapping):
        raise AlgorithmError(
            f"The policy loss `{name}` must return (loss, metrics): losses per token of shape {tuple(log_prob.shape)} "
            f"or one number, and a dict, but gave {_describe(result)}."
        )
    if losses.ndim > 0:
        losses = keep_masked(losses, response_mask)
    elif not response_mask.any():
        # A mean over no token is 0/0: this part has nothing to say, and must not spoil the others.
        return PolicyLoss(keep_masked(log_prob, response_mask).sum(), {}, is_scalar=True)
    checked = {key: _metric(name, key, value, response_mask) for key, value in metrics.items()}
    return PolicyLoss(losses, checked, is_scalar=losses.ndim == 0, is_share=takes_counts and losses.ndim == 0)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    # Only arguments that the function can take by name.
    parameters = _parameters(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}


def _call(function: Callable[..., Any], what: str, name: str, arguments: dict[str, Any], *places: Any) -> Any:
    # An exception in a user's function names its file and line. Out-of-memory errors stay as they are.
    # Our own functions raise their own errors; a traceback is more useful for a bug of ours.
    if getattr(function, "__module__", "").startswith("posttrain."):
        return function(*places, **arguments)
    try:
        return function(*places, **arguments)
    except (AlgorithmError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        missing = error.name if isinstance(error, NameError) else None
        advice = f" Is `import {missing}` missing at the top of that file?" if missing else ""
        raise AlgorithmError(
            f"The {what} `{name}` failed in {_place(function, error)}: {type(error).__name__}: {error}.{advice}"
        ) from error


def _place(function: Callable[..., Any], error: Exception) -> str:
    # The line in the function's own file where it failed; its first line if the call itself failed.
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return repr(function)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename] or [code.co_firstlineno]
    return f"{code.co_filename}, line {lines[-1]}"


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_describe(part) for part in value)})"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _metric(loss: str, key: str, value: Any, mask: torch.Tensor) -> torch.Tensor | float:
    if _has_shape(value, mask.shape):
        return keep_masked(value.detach(), mask)
    if _has_shape(value, torch.Size()):
        return value.detach()  # not float(): that would wait for the device
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise AlgorithmError(
            f"The metric `{key}` of the policy loss `{loss}` must be a number or a tensor of shape "
            f"{tuple(mask.shape)}, but is {_describe(value)}."
        ) from None

"""The three ways to write a reward function, told apart by parameter names, and how each is called.

source: `fn(data_source, solution_str, ground_truth, extra_info)`   pair: `fn(response, ground_truth)`
list:   `fn(completions, ground_truths)`, called once with all responses of a prompt
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.rewards.types import RewardError

Fields = tuple[str, str, Any, Any, "int | None", "str | None"]
"""data_source, solution_str, ground_truth, extra_info and number of tokens of one response; and what the model wrote of
it, if that is not all."""

FORMS = (
    "(data_source, solution_str, ground_truth, extra_info), (response, ground_truth) or (completions, ground_truths)"
)

_GIVEN = {
    "source": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "pair": ("response", "ground_truth"),
    "list": ("completions", "ground_truths"),
}
_NEEDED = {
    "source": {"solution_str", "ground_truth"},
    "pair": {"response", "ground_truth"},
    "list": set(_GIVEN["list"]),
}


def form_of(function: Callable[..., Any]) -> str | None:
    """`source`, `pair`, `list`, or None for a signature that is none of them."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    for form, needed in _NEEDED.items():
        if needed <= set(parameters):
            return form
    open_ended = [p.kind for p in parameters.values() if p.default is p.empty]
    # Only *args and **kwargs: written to take whatever it is given, by name.
    return "source" if inspect.Parameter.VAR_KEYWORD in open_ended and not _required(function) else None


def check_call(function: Callable[..., Any], kwargs: dict[str, Any]) -> str:
    """The function's form, after checking that it can be called with what a run has; RewardError otherwise."""
    form, name = form_of(function), getattr(function, "__name__", "function")
    if form is None:
        try:
            shown = str(inspect.signature(function))
        except (TypeError, ValueError):
            shown = "(unknown)"
        raise RewardError(
            f"reward function {name}{shown} has none of the known signatures", todo=f"name its parameters {FORMS}"
        )
    if inspect.iscoroutinefunction(function):
        raise RewardError(
            f"reward function {name} is async", todo="write it with `def`; workers call it in parallel already"
        )
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
        raise RewardError(
            f"reward function {name} has positional-only parameters", todo="remove the `/` from its signature"
        )
    missing = _required(function) - set(_GIVEN[form]) - set(kwargs)
    if missing:
        raise RewardError(
            f"reward function {name} needs {', '.join(sorted(missing))}, which a run does not have",
            todo="give a default, or a value in custom_reward_function.reward_kwargs",
        )
    clash = set(kwargs) & set(_GIVEN[form])
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = set() if takes_all else set(kwargs) - set(parameters)
    if clash or unknown:
        raise RewardError(
            f"custom_reward_function.reward_kwargs names {', '.join(sorted(clash or unknown))}, "
            + (f"which the run itself gives to {name}" if clash else f"which {name} does not take"),
            todo=f"remove it; {name}{inspect.signature(function)} can take its other parameters",
        )
    return form


def caller(function: Callable[..., Any], form: str, kwargs: dict[str, Any]) -> Callable[[Sequence[Fields]], Any]:
    """`call(items)` for one item (source, pair) or a group (list), by keyword, with only what the function takes."""
    parameters = inspect.signature(function).parameters
    if form == "list":
        return lambda items: function(completions=[i[1] for i in items], ground_truths=[i[2] for i in items], **kwargs)
    if form == "pair":
        return lambda items: function(response=items[0][1], ground_truth=items[0][2], **kwargs)
    names = _GIVEN["source"]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names = tuple(name for name in names if name in parameters)
    places = [_GIVEN["source"].index(name) for name in names]
    return lambda items: function(**{n: items[0][p] for n, p in zip(names, places, strict=True)}, **kwargs)


def _required(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

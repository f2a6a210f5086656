"""The ways to write a reward function, told apart by parameter names, and how each is called.

source: `fn(data_source, solution_str, ground_truth, extra_info)`   pair: `fn(response, ground_truth)`
list:   `fn(completions, ground_truths)`, called once with all responses of a prompt
batch:  `fn(prompts, completions, COLUMN, ..., **kwargs)`, TRL's, called likewise (batch.py)

A function with `prompts`, `completions` or `completion_ids` is of the last two forms, since no other has them; it is a
list where it asks for `completions` and `ground_truths` and nothing else. All its other parameters are columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from posttrain.rewards.types import RewardError

Fields = tuple[str, str, Any, Any, "int | None", "str | None", Any]
"""data_source, solution_str, ground_truth, extra_info and number of tokens of one response; what the model wrote of it,
if that is not all; and BatchFacts, for functions of that form."""

FORMS = (
    "(data_source, solution_str, ground_truth, extra_info), (response, ground_truth), (completions, ground_truths), or "
    "as TRL's: (prompts, completions, COLUMN, ..., **kwargs)"
)
BATCH = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What functions of TRL's form are given besides the columns of the rows."""
_OF_BATCHES = {"prompts", "completions", "completion_ids"}

_GIVEN = {
    "source": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "pair": ("response", "ground_truth"),
    "list": ("completions", "ground_truths"),
    "batch": BATCH,
}
_NEEDED = {
    "source": {"solution_str", "ground_truth"},
    "pair": {"response", "ground_truth"},
}


def form_of(function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None) -> str | None:
    """`source`, `pair`, `list`, `batch`, or None for a signature that is none of them. `kwargs` are given besides."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if _OF_BATCHES & set(parameters):
        needs = set(_GIVEN["list"])
        others = required(function) - needs - set(kwargs or {})
        return "list" if needs <= set(parameters) and not others else "batch"
    for form, needed in _NEEDED.items():
        if needed <= set(parameters):
            return form
    # Only *args and **kwargs: written to take whatever it is given, by name.
    return "source" if takes_all(function) and not required(function) else None


def check_call(function: Callable[..., Any], kwargs: dict[str, Any]) -> str:
    """The function's form, after checking that it can be called with what a run has; RewardError otherwise."""
    form, name = form_of(function, kwargs), name_of(function)
    if form is None:
        try:
            shown = str(inspect.signature(function))
        except (TypeError, ValueError):
            shown = "(unknown)"
        raise RewardError(
            f"reward function {name}{shown} has none of the known signatures", todo=f"name its parameters {FORMS}"
        )
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
        raise RewardError(
            f"reward function {name} has positional-only parameters", todo="remove the `/` from its signature"
        )
    missing = required(function) - set(_GIVEN[form]) - set(kwargs)
    if missing and form != "batch":  # whose other parameters are columns: see check_columns
        raise RewardError(
            f"reward function {name} needs {', '.join(sorted(missing))}, which a run does not have",
            todo="give a default, or a value in custom_reward_function.reward_kwargs",
        )
    clash = set(kwargs) & set(_GIVEN[form])
    unknown = set() if takes_all(function) else set(kwargs) - set(parameters)
    if clash or unknown:
        raise RewardError(
            f"custom_reward_function.reward_kwargs names {', '.join(sorted(clash or unknown))}, "
            + (f"which the run itself gives to {name}" if clash else f"which {name} does not take"),
            todo=f"remove it; {name}{inspect.signature(function)} can take its other parameters",
        )
    return form


def caller(function: Callable[..., Any], form: str, kwargs: dict[str, Any]) -> Callable[[Sequence[Fields]], Any]:
    """`call(items)` for one item (source, pair) or a group (list), by keyword, with only what the function takes."""
    if form == "list":
        return lambda items: awaited(
            function(completions=[i[1] for i in items], ground_truths=[i[2] for i in items], **kwargs)
        )
    if form == "pair":
        return lambda items: awaited(function(response=items[0][1], ground_truth=items[0][2], **kwargs))
    names = _GIVEN["source"]
    if not takes_all(function):
        parameters = inspect.signature(function).parameters
        names = tuple(name for name in names if name in parameters)
    places = [_GIVEN["source"].index(name) for name in names]
    return lambda items: awaited(function(**{n: items[0][p] for n, p in zip(names, places, strict=True)}, **kwargs))


def awaited(result: Any) -> Any:
    """The result of a function that may be `async def`."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    import asyncio  # a third of a worker's start, which few rewards need

    return asyncio.run(wait())


def columns_needed(function: Callable[..., Any], form: str, kwargs: Mapping[str, Any]) -> list[str]:
    """Columns that the rows must have for a function of TRL's form."""
    if form != "batch":
        return []
    return sorted(
        required(function) - set(kwargs) - {*BATCH, "ground_truth", "ground_truths", "data_source", "extra_info"}
    )


def required(function: Callable[..., Any]) -> set[str]:
    """Parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def takes_all(function: Callable[..., Any]) -> bool:
    """Whether it has `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def name_of(function: Any) -> str:
    """What a function, a partial one or a callable object is called."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__

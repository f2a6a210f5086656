"""The ways to write a reward function, distinguished by parameter names, and how each is called.

source: `fn(data_source, solution_str, ground_truth, extra_info)`   pair: `fn(response, ground_truth)`
    list:   `fn(completions, ground_truths)`, called once with all responses of a prompt
    batch:  `fn(prompts, completions, COLUMN, ..., **kwargs)`, TRL's, called likewise (batch.py)

Only the last two forms have `prompts`, `completions` or `completion_ids`. A function is a list if it requires
`completions` and `ground_truths` and nothing else; otherwise its other parameters are columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from posttrain.rewards.types import RewardError

# data_source, solution_str, ground_truth, extra_info and number of tokens of one response; the part that the model
# wrote, if that is not all; and BatchFacts, for functions of that form.
Fields = tuple[str, str, Any, Any, "int | None", "str | None", Any]

FORMS = (
    "(data_source, solution_str, ground_truth, extra_info), (response, ground_truth), (completions, ground_truths), or "
    "as TRL's: (prompts, completions, COLUMN, ..., **kwargs)"
)
# What functions of TRL's form get besides the columns of the rows.
BATCH = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
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
    """Return `source`, `pair`, `list` or `batch`; None for any other signature. `kwargs` are given in addition."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if _OF_BATCHES & set(parameters):
        needs = set(_GIVEN["list"])
        others = required_parameters(function) - needs - set(kwargs or {})
        return "list" if needs <= set(parameters) and not others else "batch"
    for form, needed in _NEEDED.items():
        if needed <= set(parameters):
            return form
    # With only *args and **kwargs it takes whatever it is given, by name.
    return "source" if takes_any_keyword(function) and not required_parameters(function) else None


def check_call(function: Callable[..., Any], kwargs: dict[str, Any]) -> str:
    """Return the function's form, after checking that a run can call it; RewardError otherwise."""
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
    missing = required_parameters(function) - set(_GIVEN[form]) - set(kwargs)
    if missing and form != "batch":  # other parameters of that form are columns: see check_columns
        raise RewardError(
            f"reward function {name} needs {', '.join(sorted(missing))}, which a run does not have",
            todo="give a default, or a value in custom_reward_function.reward_kwargs",
        )
    clash = set(kwargs) & set(_GIVEN[form])
    unknown = set() if takes_any_keyword(function) else set(kwargs) - set(parameters)
    if clash or unknown:
        raise RewardError(
            f"custom_reward_function.reward_kwargs names {', '.join(sorted(clash or unknown))}, "
            + (f"which the run itself gives to {name}" if clash else f"which {name} does not take"),
            todo=f"remove it; {name}{inspect.signature(function)} can take its other parameters",
        )
    return form


def make_caller(function: Callable[..., Any], form: str, kwargs: dict[str, Any]) -> Callable[[Sequence[Fields]], Any]:
    """Return `call(items)` for one item (source, pair) or a group (list); it passes only what the function takes."""
    if form == "list":
        return lambda items: wait_for_result(
            function(completions=[i[1] for i in items], ground_truths=[i[2] for i in items], **kwargs)
        )
    if form == "pair":
        return lambda items: wait_for_result(function(response=items[0][1], ground_truth=items[0][2], **kwargs))
    names = _GIVEN["source"]
    if not takes_any_keyword(function):
        parameters = inspect.signature(function).parameters
        names = tuple(name for name in names if name in parameters)
    places = [_GIVEN["source"].index(name) for name in names]
    return lambda items: wait_for_result(
        function(**{n: items[0][p] for n, p in zip(names, places, strict=True)}, **kwargs)
    )


def wait_for_result(result: Any) -> Any:
    """Return the result of a function that may be `async def`."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    import asyncio  # it takes a third of a worker's start, and few rewards need it

    return asyncio.run(wait())


def columns_needed(function: Callable[..., Any], form: str, kwargs: Mapping[str, Any]) -> list[str]:
    """List the columns that the rows must have for a function of TRL's form."""
    if form != "batch":
        return []
    return sorted(
        required_parameters(function)
        - set(kwargs)
        - {*BATCH, "ground_truth", "ground_truths", "data_source", "extra_info"}
    )


def required_parameters(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def name_of(function: Any) -> str:
    """Return the name of a function, a partial one or a callable object."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__

"""The ways to write a reward function, distinguished by parameter names; how each is called, and its result read.

source: `fn(data_source, solution_str, ground_truth, extra_info)`   pair: `fn(response, ground_truth)`
    list:   `fn(completions, ground_truths)`, called once with all responses of a prompt
    batch:  `fn(prompts, completions, COLUMN, ..., **kwargs)`, TRL's, called likewise (batch.py)

Only the last two forms have `prompts`, `completions` or `completion_ids`. A function is a list if it requires
`completions` and `ground_truths` and nothing else; otherwise its other parameters are columns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from posttrain.rewards.types import TOO_LARGE, Fields, Outcome, RewardError, failure, is_usable

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


# The outcome of a response that a function does not apply to.
NOT_APPLICABLE: Outcome = (math.nan, {}, None)
_NAME_CHARS = 200


@dataclass(frozen=True)
class BatchFacts:
    """What only functions of TRL's form can receive of a response."""

    # Messages or a text, as in the row; None if unknown.
    prompt: Any = None
    # Finished steps, and steps of the run.
    progress: tuple[int, int] | None = None
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class TrainerState:
    """The run's progress, under the names of transformers' TrainerState."""

    global_step: int
    max_steps: int


@dataclass
class _Logs:
    """What a function logs with `log_extra` and `log_metric`. It becomes named parts of its scores."""

    count: int
    parts: list[dict[str, float | str]] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def extra(self, column: str, values: Any) -> None:
        values = list(values)
        if len(values) != self.count:
            raise ValueError(f"log_extra({column!r}) has {len(values)} values for {self.count} responses")
        self.parts = self.parts or [{} for _ in values]
        for parts, value in zip(self.parts, values, strict=True):
            parts[text_of(column, _NAME_CHARS)] = read_part(value)

    def metric(self, name: str, value: Any) -> None:
        self.metrics.setdefault(text_of(name, _NAME_CHARS), []).append(float(value))

    def of(self, row: int) -> dict[str, float | str]:
        means = {name: read_part(sum(values) / len(values)) for name, values in self.metrics.items()}
        return {**means, **(self.parts[row] if self.parts else {})}


class BatchCall:
    """Scores all responses of a prompt with one function."""

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self.function, self.kwargs = function, kwargs
        self._all, self._names = takes_any_keyword(function), set(inspect.signature(function).parameters)
        self._required = required_parameters(function) - kwargs.keys()

    def __call__(self, items: Sequence[Fields]) -> list[Outcome]:
        logs = _Logs(len(items))
        try:
            results = wait_for_result(self.function(**self._arguments(items, logs), **self.kwargs))
            results = results.tolist() if hasattr(results, "tolist") else results
            wrong = check_length(results, len(items))
            if wrong is not None:
                return [failure(wrong)] * len(items)
            return [_read(result, logs.of(row)) for row, result in enumerate(results)]
        except RewardError as error:
            return [failure(error.what)] * len(items)
        except BaseException as error:
            return [failure(describe_exception(error))] * len(items)

    def _arguments(self, items: Sequence[Fields], logs: _Logs) -> dict[str, Any]:
        facts = [item[6] or BatchFacts() for item in items]
        prompts = [one.prompt for one in facts]
        texts = [item[1] for item in items]
        in_messages = [isinstance(prompt, list) for prompt in prompts]
        given: dict[str, Any] = {
            "prompts": prompts,
            "completions": [
                [{"role": "assistant", "content": text}] if is_list else text
                for text, is_list in zip(texts, in_messages, strict=True)
            ],
            "log_extra": logs.extra,
            "log_metric": logs.metric,
        }
        if all(one.token_ids is not None for one in facts):
            given["completion_ids"] = [list(one.token_ids or ()) for one in facts]
        if facts[0].progress is not None:
            given["trainer_state"] = TrainerState(*facts[0].progress)
        columns = [columns_of(item) for item in items]
        names = dict.fromkeys(name for row in columns for name in row if name not in BATCH)
        given |= {name: [row.get(name) for row in columns] for name in (*names, *self._required) if name not in BATCH}
        if "ground_truths" in self._names and "ground_truths" not in names:
            given["ground_truths"] = [item[2] for item in items]
        missing = self._required - given.keys()
        if missing:
            raise RewardError(f"it needs {', '.join(sorted(missing))}, which is known in a run alone")
        wanted = {name: value for name, value in given.items() if self._all or name in self._names}
        return {name: value for name, value in wanted.items() if name not in self.kwargs}


def columns_of(item: Fields) -> dict[str, Any]:
    source, _, truth, extra_info, *_ = item
    own = extra_info if isinstance(extra_info, dict) else {}
    return {**own, "ground_truth": truth, "data_source": source, "extra_info": extra_info}


def _read(result: Any, logged: dict[str, float | str]) -> Outcome:
    applies = result is not None
    if applies and not isinstance(result, str | bytes | dict):
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # read_result reports these
            applies = not math.isnan(result)
    score, parts, error = read_result(result) if applies else NOT_APPLICABLE
    return score, {**logged, **parts}, error


_PART_CHARS = 200


def call_and_read(call: Callable[[Sequence[Fields]], Any], items: Sequence[Fields], form: str) -> list[Outcome]:
    """Return one outcome per item; whatever the user's function raises becomes an outcome."""
    try:
        if form != "list":
            return [read_result(call([item])) for item in items]
        return read_results(call(items), len(items))
    except BaseException as error:
        return [failure(describe_exception(error))] * len(items)


def read_results(results: Any, count: int) -> list[Outcome]:
    results = results.tolist() if hasattr(results, "tolist") else results
    wrong = check_length(results, count)
    return [failure(wrong)] * count if wrong else [read_result(one) for one in results]


def check_length(results: Any, count: int) -> str | None:
    """Return what is wrong with a list of results for `count` responses; None if nothing is."""
    if not isinstance(results, list | tuple):
        return f"returned {_kind(results)}, not a list of {count} scores"
    return f"returned {len(results)} scores for {count} responses" if len(results) != count else None


def read_result(result: Any) -> Outcome:
    if result is None:  # most often the end of a function that returns a score in an `if` alone
        return failure("returned None instead of a number: every path through it must return a score")
    parts: dict[str, float | str] = {}
    if isinstance(result, dict):
        if "score" not in result:
            names = ", ".join(text_of(name, _PART_CHARS) for name in result)
            return failure(f"returned a dict without 'score' (keys: {names or 'none'})")
        parts = {text_of(name, _PART_CHARS): read_part(value) for name, value in result.items() if name != "score"}
        result = result["score"]
    if result is None or isinstance(result, str | bytes):
        return failure(f"returned {_kind(result)} instead of a number")
    try:
        score = float(result)
    except OverflowError:
        return failure(f"returned {text_of(result, 60)}{TOO_LARGE}")
    except (TypeError, ValueError, RuntimeError):
        return failure(f"returned {_kind(result)} instead of a number")
    if not math.isfinite(score):
        return failure(f"returned {score}")
    return (score, parts, None) if is_usable(score) else failure(f"returned {score:g}{TOO_LARGE}")


def read_part(value: Any) -> float | str:
    """Convert a named part to what is recorded: a number, or a short text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        try:
            number = float(value)
            if is_usable(number):
                return number
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    return text_of(value, _PART_CHARS)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({text_of(value, 60)!r})"


_HERE = os.path.dirname(os.path.abspath(__file__))
_FRAMES = 3
_LONGEST = 500


def describe_exception(error: BaseException) -> str:
    """Return `NameError: name 'torch' is not defined (add `import torch`)`, then the innermost lines of user code."""
    said = text_of(error, _LONGEST)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SystemExit):
        text = f"the function called exit({error.code!r})"
    if isinstance(error, RewardError):
        text = said
    if isinstance(error, NameError) and error.name and _importable(error.name):
        text += f" (the file never imports it: add `import {error.name}`)"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_own_frame(f.filename)]
    lines = [f"  {f.filename}, line {f.lineno}, in {f.name}: {f.line or ''}".rstrip(": ") for f in frames[-_FRAMES:]]
    return "\n".join([text[:_LONGEST], *lines])


def text_of(value: object, most: int) -> str:
    """Return a value's text, cut; if `str` fails (an integer beyond 4,300 digits, a faulty `__str__`), describe it."""
    try:
        return str(value)[:most]
    except Exception:
        if isinstance(value, int):
            return f"an integer of some {round(value.bit_length() * math.log10(2))} digits"
        return f"a {type(value).__name__} that has no text"


def explain_import_failure(error: BaseException, what: str) -> RewardError:
    """Build the RewardError for a user's file that could not be imported."""
    if isinstance(error, SyntaxError):
        return RewardError(
            f"syntax error in {error.filename}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}",
            todo="correct that line",
        )
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return RewardError(
        f"importing the reward {what} failed: {describe_exception(error)}",
        todo=f"install {missing}, or correct the import" if missing else "correct the file; workers import it as it is",
    )


def _is_own_frame(filename: str) -> bool:
    return filename.startswith((_HERE, "<frozen")) or f"{os.sep}importlib{os.sep}" in filename


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False

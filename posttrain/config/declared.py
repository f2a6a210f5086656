"""Checks of the settings that algorithms declare: their types, defaults, ranges and choices fit each other.

The checks of values trust what a field declares. A mistake in it would be shown as one of the run's settings, end in a
traceback, or be found where the loss computes with it.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from posttrain.algorithms.common import AlgorithmError, file_of
from posttrain.config.values import WrongValue, convert, describe_hint, split_hint
from posttrain.settings import choices_of, range_of

_TYPES = "float, int, bool, str, list[...] or dict[...], each also `| None`"


def check_declared_field(kind: type, field: dataclasses.Field[Any], hint: Any) -> None:
    """AlgorithmError with file, class, setting and what to do. `hint` is its type; a NameError if that is unknown."""
    problem, way = _problem_of(field, hint)
    if problem:
        raise declared_wrongly(kind, field.name, problem, way)


def declared_wrongly(kind: type, name: str, problem: str, way: str) -> AlgorithmError:
    return AlgorithmError(f"The setting `{name}` of {kind.__qualname__} in {file_of(kind)} {problem}: {way}.")


def _problem_of(field: dataclasses.Field[Any], hint: Any) -> tuple[str, str]:
    if isinstance(hint, NameError):
        return f"has an unknown type ({hint})", f"declare it as {_TYPES}"
    inner, optional = split_hint(hint)
    if inner not in (float, int, bool, str, Any) and typing.get_origin(inner) not in (list, dict):
        choices = "; a few names are `str` with `choices`"
        return f"has the type {getattr(hint, '__name__', hint)}, which settings do not have", f"use {_TYPES}{choices}"
    try:
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    except Exception as error:
        return f"has a factory that failed ({type(error).__name__}: {error})", "it is called without arguments"
    if value is None:
        return ("", "") if optional else ("has the default None", "add `| None` to its type, or give another default")
    if not _fits(value, hint):
        words = f"has the default {value!r}, but its type is {describe_hint(hint)}"
        return words, "change the default or the type"
    return _problem_of_limits(field, inner, value)


def _problem_of_limits(field: dataclasses.Field[Any], inner: Any, value: Any) -> tuple[str, str]:
    allowed, choices = range_of(field), choices_of(field)
    if choices and (inner is not str or not all(isinstance(one, str) for one in choices)):
        return (
            f"has choices={choices!r} and the type {describe_hint(inner)}",
            "choices are texts, of settings of type str",
        )
    if choices and value not in choices:
        return f"has the default {value!r}, which is none of its choices", f"choose one of {', '.join(choices)}"
    if allowed is None:
        return "", ""
    try:
        if allowed.allows(value):
            return "", ""
    except Exception:  # a function of the user's, or one for numbers with a text
        return f"has a range that its default {value!r} cannot be compared with", "give a range for values of its type"
    return f"has the default {value!r}, which is out of its own range", f"it must be {allowed.words}"


def _fits(value: Any, hint: Any) -> bool:
    """Whether a default is what the same value on a command line would become."""
    inner, _ = split_hint(hint)
    if inner is Any or isinstance(value, str):
        return inner in (Any, str)
    try:
        converted = convert(value, hint)
    except WrongValue:
        return False
    return converted == value and isinstance(converted, bool) == isinstance(value, bool)

"""Values as users write them (`1e-6`, `True`, `["a","b"]`, `a,b`, `null`) turned into a setting's declared type."""

from __future__ import annotations

import re
import types
import typing
from typing import Any

from posttrain.texts import MASK, is_secret, mask_urls
from posttrain.yaml_text import parse_yaml

NULLS = ("null", "none", "~")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_SWEEP = re.compile(r"^(choice|range|interval|glob)\(.*\)$")


class WrongValue(ValueError):
    """A value that does not fit; the text says what was expected."""


def shown(key: str, value: Any) -> str:
    """The value for a message, masked where it is a secret."""
    return MASK if is_secret(key) and value not in (None, "") else mask_urls(repr(value))


def unquote(text: str) -> str:
    """The text without one pair of quotes around it."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text


def split_hint(hint: Any) -> tuple[Any, bool]:
    """(type without None, whether None is allowed)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        return rest[0], len(rest) < len(typing.get_args(hint))
    return hint, hint is Any


def describe_hint(hint: Any) -> str:
    """The declared type in words."""
    kind, optional = split_hint(hint)
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    if typing.get_origin(kind) is list:
        inner = {int: "integers", float: "numbers", str: "texts"}.get(typing.get_args(kind)[0], "values")
        text = f"a list of {inner}"
    elif typing.get_origin(kind) is dict:
        text = "a mapping of names to values"
    else:
        text = names.get(kind, "a value or a list")
    return f"{text}, or null" if optional and hint is not Any else text


def convert(value: Any, hint: Any) -> Any:
    """The value as the declared type; raises WrongValue with what was expected."""
    kind, optional = split_hint(hint)
    if value is None or (isinstance(value, str) and value.lower() in NULLS and (optional or value.lower() == "null")):
        if optional:
            return None
        raise WrongValue(f"expected {describe_hint(hint)}, got null")
    try:
        return _convert(value, kind)
    except WrongValue:
        raise
    except (ValueError, TypeError, OverflowError):
        raise WrongValue(f"expected {describe_hint(hint)}, got {_brief(value)}" + _why_not(value, kind)) from None


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= 200 else f"{text[:150]}... ({len(text)} characters)"


def _why_not(value: Any, kind: Any) -> str:
    if isinstance(value, str) and value[:1] in "[{" and value[:1] and value.rstrip()[-1:] not in "]}":
        return " (its bracket is never closed; quote the whole in the shell: 'key=[a, b]')"
    if isinstance(value, str) and kind in (int, float, bool) and ("," in value or _SWEEP.match(value)):
        return " (this looks like a sweep: one run takes one value; start one run per value in a shell loop)"
    return ""


def _convert(value: Any, kind: Any) -> Any:
    if kind is bool:
        return _boolean(value)
    if kind in (int, float):
        return _number(value, kind)
    if kind is str:
        if isinstance(value, bool | list | dict):
            raise ValueError
        return unquote(value) if isinstance(value, str) else str(value)
    if typing.get_origin(kind) is list:
        return [_convert(item, typing.get_args(kind)[0]) for item in _as_list(value)]
    if typing.get_origin(kind) is dict:
        parsed = parse_yaml(value) if isinstance(value, str) else value
        if not isinstance(parsed, dict):
            raise ValueError
        return parsed
    return _path_or_list(value)


def _boolean(value: Any) -> bool:
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError


def _number(value: Any, kind: type) -> int | float:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, str):
        value = unquote(value.strip())
    # Through float first: `1e3` is a valid integer here, and `1.5` is not.
    number = float(value)
    if kind is float:
        return number
    try:
        # Exactly, where it can be: a float holds integers up to 2**53 only, and seeds are longer.
        exact = int(value)
    except ValueError:
        exact = int(number)
    if exact != number:
        raise ValueError
    return exact


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str):
        text = _quoted_list(value)
        value = parse_yaml(text) if text.startswith("[") else [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(value, dict):
        raise ValueError
    return list(value) if isinstance(value, list | tuple) else [value]


def _quoted_list(text: str) -> str:
    """A list with quotes around the whole of it, without them."""
    inner = unquote(text.strip())
    return inner if inner.startswith("[") and inner.endswith("]") else text.strip()


def _path_or_list(value: Any) -> Any:
    """For settings that take one text or several: `a`, `a,b`, `[a, b]`."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, tuple) else value
    text = _quoted_list(value)
    if text[:1] in "\"'" and unquote(text) != text:
        return unquote(text)
    if text.startswith("[") or "," in text:
        return [str(part) for part in _as_list(text)]
    return text

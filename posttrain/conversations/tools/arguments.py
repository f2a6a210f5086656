"""Checks the arguments that a model wrote against a tool's schema, which is a small part of JSON Schema.

Types are changed only where nothing is lost: "3" and 3.0 are integers, 3.5 is none; "[1, 2]" is an array.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from posttrain.texts import well_formed

_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}\.?[0-9]{0,400}|\.[0-9]{1,400})([eE][+-]?[0-9]{1,4})?")
_SHOWN, _BITS, _LONGEST = 60, 1400, 20_000
# How deep arguments may be nested. Values nested a few hundred deep cannot be written to files, copied or shown.
MOST_NESTED = 64


class ArgumentError(ValueError):
    """Arguments do not fit; its text is one sentence for the model."""


def convert_arguments(name: str, parameters: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """The arguments of a call in the types of the tool's `parameters`; ArgumentError if they do not fit."""
    known: Mapping[str, Any] = parameters.get("properties") or {}
    if not isinstance(arguments, dict):
        raise ArgumentError(f"The arguments of {name} must be a JSON object, not {shown(arguments)}.")
    for key in arguments:
        if key not in known and not parameters.get("additionalProperties"):
            raise ArgumentError(f"{name} has no parameter {shown(key)}; {_takes(known)}.")
    missing = [key for key in parameters.get("required") or () if key not in arguments]
    if missing:
        raise ArgumentError(f"{name} was called without {' and '.join(missing)}; {_takes(known)}.")
    return {key: _fitted(f"{name}: {key}", known.get(key) or {}, value) for key, value in arguments.items()}


def is_shallow(value: Any) -> bool:
    """Whether a value out of JSON is nested no deeper than MOST_NESTED."""
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [one for box in level if isinstance(box, dict | list) for one in _members(box)]
        if not level:
            return True
    return False


def _members(box: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return box.values() if isinstance(box, dict) else box


def well_formed_json(value: Any) -> Any:
    """A value out of JSON without halves of characters (`\\ud800`), which JSON can spell and UTF-8 cannot."""
    match value:
        case str():
            return well_formed(value)
        case dict():
            return {well_formed(key): well_formed_json(one) for key, one in value.items()}
        case list():
            return [well_formed_json(one) for one in value]
    return value


def shown(value: Any) -> str:
    """A value in a message: as JSON where it can be, and not long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def described(schema: Mapping[str, Any]) -> str:
    """The type that a schema asks for, in words."""
    if "enum" in schema:
        return "one of " + ", ".join(shown(one) for one in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(described(one) for one in schema["anyOf"])
    kinds = _kinds(schema)
    inner = schema.get("items")
    names = [f"array of {described(inner)}" if kind == "array" and inner else kind for kind in kinds]
    return " or ".join(names) or "value"


def _takes(known: Mapping[str, Any]) -> str:
    return "it takes " + (", ".join(f"{key} ({described(one or {})})" for key, one in known.items()) or "none")


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type")
    return [kind] if isinstance(kind, str) else list(kind or ())


def _fitted(where: str, schema: Mapping[str, Any], value: Any) -> Any:
    for one in schema.get("anyOf") or ():
        try:
            return _fitted(where, one, value)
        except ArgumentError:
            continue
    kinds = _kinds(schema)
    wrong = ArgumentError(f"{where} must be {described(schema)}, not {shown(value)}.")
    if "anyOf" in schema:
        raise wrong
    if schema.get("nullable") and value is None:
        return None
    if kinds:
        # A value that is of one of the types as it stands stays as it is.
        exact = [kind for kind in kinds if _EXACT.get(kind, lambda _: True)(value)]
        made = value if exact else next((one for kind in kinds if (one := _as(kind, value)) is not None), None)
        if made is None and not exact:
            raise wrong
        value = _inside(where, schema, made)
    if "enum" in schema and not any(type(one) is type(value) and one == value for one in schema["enum"]):
        raise wrong
    return value


def _inside(where: str, schema: Mapping[str, Any], value: Any) -> Any:
    """The members of an array or an object, fitted."""
    if isinstance(value, list) and schema.get("items"):
        return [_fitted(f"{where}[{place}]", schema["items"], one) for place, one in enumerate(value)]
    known = schema.get("properties")
    if isinstance(value, dict) and known:
        missing = [key for key in schema.get("required") or () if key not in value]
        if missing:
            raise ArgumentError(f"{where} is without {' and '.join(missing)}; {_takes(known)}.")
        return {key: _fitted(f"{where}.{key}", known.get(key) or {}, one) for key, one in value.items()}
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        return {key: _fitted(f"{where}.{key}", schema["additionalProperties"], one) for key, one in value.items()}
    return value


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value.bit_length() < _BITS if isinstance(value, int) else math.isfinite(value)


_EXACT: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def _as(kind: str, value: Any) -> Any:
    """The value in another type, if nothing is lost; otherwise None."""
    text = value.strip() if isinstance(value, str) else None
    if kind == "string":
        return str(value) if _is_number(value) else None
    if kind == "integer":
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return int(text) if text and _INTEGER.fullmatch(text) else None
    if kind == "number":
        number = float(text) if text and _NUMBER.fullmatch(text) else None
        return number if number is not None and math.isfinite(number) else None
    if kind == "boolean":
        return {"true": True, "false": False}.get((text or "").lower())
    if kind in ("array", "object") and text:
        try:
            made = json.loads(text)
        except (ValueError, RecursionError):
            made = _as_python(text)
        return made if _EXACT[kind](made) and is_shallow(made) else None
    return None


def _as_python(text: str) -> Any:
    """A list or an object of Python's literals, as the chat templates of Seed-OSS and MiniCPM write them; None if it is
    none, or holds what JSON does not have."""
    if len(text) > _LONGEST:
        return None
    try:
        made = ast.literal_eval(text)
        return made if json.loads(json.dumps(made, allow_nan=False)) == made else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None

"""The schema of a function, from its type hints and its docstring, as a chat template shows it to the model.

Parameters before `*` are the model's. Those behind it are settings (`rollout.tool_config.NAME`), which are checked
against the same hints: the model neither sees nor gives them.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.config.values import is_secret
from posttrain.conversations.tools.arguments import ArgumentError, convert_arguments
from posttrain.errors import UserError
from posttrain.spelling import closest

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_HEADING = re.compile(r"(args|arguments|parameters|returns?|raises|yields|examples?|notes?)\s*:\s*", re.IGNORECASE)
_ARGS = re.compile(r"(args|arguments|parameters):", re.IGNORECASE)
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """OpenAI's schema of a function; UserError if the model could not know what it does or takes."""
    said, words = read_docstring(inspect.getdoc(function) or "")
    if not said:
        raise UserError(
            f"the tool {name} has no docstring, so that a model cannot know what it does.\n"
            "  to do:  begin the function with one sentence in triple quotes"
        )
    hints, properties, required = _hints(function, name), dict[str, Any](), list[str]()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise UserError(
                f"the tool {name} takes {parameter}, which no schema can describe.\n"
                "  to do:  name each parameter, with its type"
            )
        properties[parameter.name] = _property(parameter, hints, name, words.get(parameter.name, ""))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    stray = [word for word in words if word not in inspect.signature(function).parameters]
    if stray:
        raise UserError(f"the docstring of the tool {name} describes {', '.join(stray)}, which it does not take.")
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": said, "parameters": parameters}}


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(its first paragraph on one line, what its `Args:` section says of each parameter)."""
    lines = text.strip().splitlines()
    first = list[str]()
    for line in lines:
        if not line.strip() or _HEADING.fullmatch(line.strip()):
            break
        first.append(line.strip())
    return " ".join(first), _arguments(lines)


def _arguments(lines: list[str]) -> dict[str, str]:
    start = next((n for n, line in enumerate(lines) if _ARGS.fullmatch(line.strip())), None)
    words, name, depth = dict[str, str](), "", 0
    for line in lines[start + 1 :] if start is not None else ():
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if indent == 0:
            break
        found = _ARGUMENT.fullmatch(line.strip())
        if found and (not name or indent <= depth):
            name, depth = found[1], indent
            words[name] = found[2]
        elif name:
            words[name] = f"{words[name]} {line.strip()}".strip()
    return words


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception as error:  # a hint is any expression
        raise UserError(f"the type hints of the tool {name} cannot be read: {error}") from error


def _property(parameter: inspect.Parameter, hints: dict[str, Any], tool: str, words: str) -> dict[str, Any]:
    if parameter.name not in hints:
        raise UserError(
            f"the parameter {parameter.name} of the tool {tool} has no type hint.\n"
            f"  to do:  write {parameter.name}: str, or int, float, bool, list[str], dict, Literal['a', 'b']"
        )
    made = hint_schema(hints[parameter.name], f"{parameter.name} of the tool {tool}")
    made |= {"description": words} if words else {}
    default = parameter.default
    plain = default is not parameter.empty and isinstance(default, str | int | float | bool | list | dict)
    return made | ({"default": default} if plain else {})


def hint_schema(hint: Any, where: str) -> dict[str, Any]:
    """A type hint as JSON Schema; UserError for types that JSON does not have."""
    inner, origin = typing.get_args(hint), typing.get_origin(hint)
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is typing.Annotated:
        return hint_schema(inner[0], where)
    if origin is typing.Literal:
        kinds = dict.fromkeys(_PLAIN.get(type(one), "null") for one in inner)
        return {"type": next(iter(kinds)) if len(kinds) == 1 else list(kinds), "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": hint_schema(inner[0], where)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": hint_schema(inner[1], where)}
    if origin in (typing.Union, types.UnionType):
        return _union([hint_schema(one, where) for one in inner if one is not type(None)], type(None) in inner)
    raise UserError(
        f"the type of {where}, {getattr(hint, '__name__', hint)}, cannot be written in JSON.\n"
        "  to do:  use str, int, float, bool, list[...], dict, Literal[...], or one of these | None"
    )


def _union(members: list[dict[str, Any]], none: bool) -> dict[str, Any]:
    if {} in members:
        return {}
    simple = all(set(one) == {"type"} and isinstance(one["type"], str) for one in members)
    if simple or len(members) == 1:
        kinds = [kind for one in members for kind in ([one["type"]] if isinstance(one["type"], str) else one["type"])]
        kinds += ["null"] if none else []
        made = dict(members[0]) if len(members) == 1 else {}
        if none and "enum" in made:
            made["enum"] = [*made["enum"], None]
        return made | {"type": kinds[0] if len(kinds) == 1 else kinds}
    return {"anyOf": [*members, *([{"type": "null"}] if none else [])]}


PLACE = "actor_rollout_ref.rollout.tool_config"


def read_settings(
    name: str, takes: Callable[..., Any], settings: Mapping[str, Any], *, rest: bool = False
) -> dict[str, Any]:
    """The settings as keyword arguments, in the types of the hints; UserError for unknown, wrong and missing ones.

    With `rest` only keyword-only parameters are settings, and what has no default may come with each conversation."""
    parameters = {
        key: one
        for key, one in inspect.signature(takes).parameters.items()
        if one.kind is one.KEYWORD_ONLY or (not rest and one.kind is one.POSITIONAL_OR_KEYWORD)
    }
    for key in settings:
        if key not in parameters:
            near = closest(str(key), parameters)
            hint = f"did you mean {near}? " if near else ""
            known = ", ".join(parameters) or "none"
            raise UserError(f"the tool {name} has no setting {key!r} (in {PLACE}.{name}): {hint}it has {known}.")
    hints = typing.get_type_hints(takes.__init__ if inspect.isclass(takes) else takes)
    properties = {key: hint_schema(hints.get(key, Any), f"{key} of the tool {name}") for key in parameters}
    required = [key for key, one in parameters.items() if one.default is one.empty and not rest]
    missing = [key for key in required if key not in settings]
    if missing:
        raise UserError(f"the tool {name} needs the setting {missing[0]}: {PLACE}.{name}.{missing[0]}=...")
    for key, value in settings.items():
        try:
            convert_arguments(name, {"properties": {key: properties[key]}}, {key: value})
        except ArgumentError as error:
            raise UserError(_without(f"{PLACE}.{name}.{key}", error, key)) from None
    return convert_arguments(name, {"properties": properties}, dict(settings))


def _without(place: str, error: ArgumentError, key: str) -> str:
    return f"{place} is of the wrong type." if is_secret(key) else f"{place}: {error}"


def secrets_of(settings: Mapping[str, Any]) -> list[str]:
    """Values that nobody may be shown, by their names (`api_key`, `token`, ...), the longest first."""
    found = {str(value) for key, value in settings.items() if is_secret(str(key)) and value not in (None, "")}
    found.update(one for value in settings.values() if isinstance(value, Mapping) for one in secrets_of(value))
    return sorted(found, key=len, reverse=True)

"""Settings of one tool (`rollout.tool_config.NAME`), checked against the parameters of its function or class."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.config.values import is_secret
from posttrain.conversations.tools.arguments import ArgumentError, convert_arguments
from posttrain.conversations.tools.schema import hint_schema
from posttrain.errors import UserError
from posttrain.spelling import closest

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

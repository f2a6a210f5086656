"""Free dicts that their owners check: entries against the dataclass that says what there is."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from posttrain.config.checked import nearest_name
from posttrain.config.values import WrongValue, convert

Settings = TypeVar("Settings")
Fault = tuple[str, str]
"""(what is wrong, what to do)."""


def settings_of(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """The settings of a checked dict."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: convert(value, hints[name]) for name, value in given.items()})


def typed_entry(key: str, name: str, value: Any, settings: type) -> Generator[Fault, None, Any]:
    """The value as `settings` has it, or None beside a fault: its name is not known, or it is of another type."""
    hints = typing.get_type_hints(settings)
    if name not in hints:
        known = tuple(one.name for one in dataclasses.fields(settings))
        yield f"`{key}.{name}` is not known; known: {', '.join(known)}.", nearest_name(name, known)
        return None
    try:
        return convert(value, hints[name])
    except WrongValue as error:
        yield f"`{key}.{name}`: {error}.", f"give {key}.{name} such a value"
        return None

"""Names of rows that are made instead of read: `SOURCE:NAME?KEY=VALUE&KEY=VALUE`."""

from __future__ import annotations

from typing import Any

from posttrain.config.values import parse_yaml
from posttrain.errors import UserError


def parse_name(name: str, setting: str) -> tuple[str, dict[str, Any]]:
    """(name within its source, settings behind `?`)."""
    source, _, rest = name.partition(":")
    task, _, rest = rest.partition("?")
    settings = dict[str, Any]()
    for part in filter(None, rest.split("&")):
        key, equals, value = part.partition("=")
        if not (key and equals):
            raise UserError(f"{setting}={name}: {part!r} is not KEY=VALUE.\n  to do:  {source}:{task}?size=1000&seed=1")
        settings[key] = parse_yaml(value)
    for key in ("size", "seed", "level"):
        if not isinstance(settings.get(key, 1), int) or settings.get(key, 1) < (key == "size"):
            raise UserError(f"{setting}={name}: {key} is {settings[key]!r}, no whole number that is large enough.")
    return task, settings

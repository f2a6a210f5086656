"""`state.json`: a run's plain state, refused before writing if JSON would not give the same back.

Floats come back to the bit (also NaN and infinities); tuples come back as lists.
"""

from __future__ import annotations

import json
from typing import Any

from posttrain.checkpoint.errors import CheckpointError


def dump(state: dict[str, Any]) -> bytes:
    """`state` as JSON; a TypeError names the first entry that JSON would lose or change."""
    _check(state, "state")
    return json.dumps(state, indent=1).encode() + b"\n"


def load(data: bytes) -> dict[str, Any]:
    try:
        state = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"state.json is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError("state.json does not hold a mapping")
    return state


def _check(value: Any, where: str) -> None:
    if value is None or type(value) in (bool, int, float, str):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; only text keys survive JSON")
            _check(item, f"{where}.{key}")
    else:
        raise TypeError(f"{where} is a {type(value).__name__}; a checkpoint's state holds plain JSON values only")

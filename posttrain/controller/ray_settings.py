"""`trainer.ray_init`: arguments of `ray.init` that the user gives, and what Ray says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from posttrain.errors import UserError


class RefusedByRay(UserError):
    """Ray does not take an argument."""


def as_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `ray.init` gets: without what is null, and environment variables as text."""
    arguments = _without_null(given)
    variables = arguments.get("runtime_env", {}).get("env_vars")
    if variables:
        arguments["runtime_env"]["env_vars"] = {name: _text(value) for name, value in variables.items()}
    return arguments


@contextmanager
def refused_by_ray(settings: Mapping[str, Any]) -> Iterator[None]:
    """Around a start of Ray: an error about the user's arguments names them."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # Ray asserts what a number is
        if not settings:
            raise
        raise RefusedByRay(
            f"Ray did not start with trainer.ray_init ({', '.join(settings)}): {error} Correct or remove what it "
            "names; `python -c 'import ray; help(ray.init)'` lists its arguments."
        ) from error


def _without_null(value: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: _without_null(item) if isinstance(item, Mapping) else item for name, item in value.items()}
    return {name: item for name, item in inner.items() if item is not None and item != {}}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

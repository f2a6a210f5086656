"""The secret that the processes of a Ray show each other."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWN = secrets.token_hex(32)
"""Of the Rays that this process starts for itself: Ray reads it once per process, and then none is written into the
home folder."""
MODE = "RAY_AUTH_MODE"
WAYS = "RAY_AUTH_TOKEN, a file named by RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token"


def shown_by_a_node(token: str) -> dict[str, str]:
    """Variables for a node that joins a Ray with this secret; without one, with the user's, if there is one. A head
    needs no word to use a secret that it finds; a node does."""
    mode = {MODE: os.environ.get(MODE, "token")}
    return {**mode, "RAY_AUTH_TOKEN": token} if token else mode if users_secret() else {}


def users_secret() -> str:
    """What the user has given in Ray's own ways, the same on every machine; empty if there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    with suppress(OSError):
        return (Path(named) if named else Path.home() / ".ray" / "auth_token").read_text().strip()
    return ""


@contextmanager
def users_secret_is_shown() -> Iterator[None]:
    """Around a connection to a Ray by its address. Ray shows the user's secret by itself only to a Ray that it has
    found without an address; to one without a secret it may be shown, too."""
    if MODE in os.environ or not users_secret():
        yield
        return
    from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

    os.environ[MODE] = "token"
    try:
        Config.initialize("")  # what Ray has read of the environment before
        yield
    finally:
        del os.environ[MODE]

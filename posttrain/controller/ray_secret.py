"""The secret that the processes of a Ray show each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

OWN = secrets.token_hex(32)
"""Of the Rays that this process starts for itself: Ray reads it once per process, and then none is written into the
home folder."""


def shown_by_a_node(token: str) -> dict[str, str]:
    """Variables for a node that joins a Ray with this secret; without one, with the user's, if there is one. A head,
    and a process that connects to it, need no word to use a secret that they find; a node does."""
    mode = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
    return {**mode, "RAY_AUTH_TOKEN": token} if token else mode if users_secret() else {}


def users_secret() -> bool:
    """Whether the user has given one in Ray's own ways: the same on every machine."""
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return given or Path.home().joinpath(".ray", "auth_token").is_file()

"""Where the environment says that a Ray runs, whether one answers there, and the secret that its processes share."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain.errors import UserError

# Of the Rays that this process starts for itself: Ray reads it once per process, and then none is written into the
# home folder.
OWN = secrets.token_hex(32)
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


ADDRESSES = ("RAY_ADDRESS", "RAY_HEAD_ADDRESS")
ANSWER_S = 5.0
_HOST_AND_PORT = re.compile(r"(?:ray://)?([\w.-]+):(\d+)$")


class NoRayThere(UserError):
    """The Ray whose address was given does not answer."""


def given_address() -> str | None:
    """Where the environment says that a Ray runs; with `RAY_HEAD_ADDRESS=auto`, that which `ray start` left here, if
    it answers."""
    plain, head = (os.environ.get(name) for name in ADDRESSES)
    if plain or head != "auto":
        return plain or head or None
    from ray._private.services import find_bootstrap_address

    found = find_bootstrap_address(None)
    return found if found and connection_error(found) is None else None


def no_ray(address: str, error: Exception) -> NoRayThere:
    name = next((name for name in ADDRESSES if os.environ.get(name)), None)
    if name is None:  # torchrun's first machine has published it
        return NoRayThere(
            f"No Ray answers at {address} ({error}), where the run's first machine said that its Ray is: see what its "
            "own command says, and whether this machine may reach that port."
        )
    return NoRayThere(
        f"{name}={address}: no Ray answers there ({error}). Start it (ray start --head), give the address of one that "
        f"runs, or unset {name}: then a Ray is started for this run."
    )


def wrong_secret(address: str, given: bool) -> NoRayThere:
    """The Ray there wants a secret, and was shown none or another."""
    name = next((name for name in ADDRESSES if os.environ.get(name)), "The address")
    found = "did not accept the token that was found" if given else "asks for a token, and none was found"
    return NoRayThere(
        f"{name}={address}: the Ray there {found}. Give this command the cluster's token in one of Ray's ways: {WAYS}. "
        "`ray get-auth-token` prints it on a machine of the cluster."
    )


def asks_for_a_secret(error: BaseException | None) -> bool:
    """Whether Ray rejected the token, by the words of its error or of what caused that."""
    while error is not None:
        if any(word in f"{type(error).__name__} {error}" for word in ("Unauthenticated", "AuthToken", "Authenticat")):
            return True
        error = error.__cause__ or error.__context__
    return False


def connection_error(address: str) -> Exception | None:
    """Why host:port does not answer; None if it does, or if the address has another form."""
    found = _HOST_AND_PORT.match(address)
    try:
        if found is not None:
            socket.create_connection((found[1], int(found[2])), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        return error
    return None

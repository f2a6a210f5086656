"""Where the environment says that a Ray runs, whether one answers there, and the secret that its processes share.

On several machines under torchrun, the first process of the first machine publishes the address of its Ray in
torchrun's store. Anyone who reaches the store's port can read and write it, so the address is signed there, and the
secret is never in it. The secret is the user's own, or one made for the run, in a file that only the user can read, on
the disk that all machines share.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, first_line

# Of the Rays that this process starts for itself. With one in the environment, Ray writes none into the home folder.
OWN = secrets.token_hex(32)
MODE = "RAY_AUTH_MODE"
WAYS = "RAY_AUTH_TOKEN, a file named by RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token"


def shown_by_a_node(token: str, address: str) -> dict[str, str]:
    """Variables for a node that joins the Ray at this address with this secret; without one, with the user's, if there
    is one and the Ray requires it. A head uses a secret that it finds; a node has to be told to."""
    if token:
        return {MODE: os.environ.get(MODE, "token"), "RAY_AUTH_TOKEN": token}
    return {MODE: mode} if (mode := _mode_for(address)) else {}


def users_secret() -> str:
    """What the user has given in Ray's own ways, the same on every machine; empty if there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    with suppress(OSError):
        return (Path(named) if named else Path.home() / ".ray" / "auth_token").read_text().strip()
    return ""


@contextmanager
def users_secret_as_asked(address: str) -> Iterator[None]:
    """Around a connection to the Ray at this address. By itself, Ray sends the user's secret only to a Ray that it
    found without an address. A Ray that requires none must not get it: its calls to this process would fail."""
    mode = _mode_for(address)
    if mode is None or MODE in os.environ:
        yield
        return
    os.environ[MODE] = mode
    try:
        _raylet().Config.initialize("")  # what Ray has read of the environment before
        yield
    finally:
        del os.environ[MODE]


def _mode_for(address: str) -> str | None:
    """How the user's secret is used with the Ray at this address; None without one."""
    if not users_secret():
        return None
    return os.environ.get(MODE) or ("token" if _asks_for_a_secret_at(address) else "disabled")


def _asks_for_a_secret_at(address: str) -> bool:
    if address == "auto":
        from ray._private.services import find_bootstrap_address

        address = find_bootstrap_address(None) or ""
    if not re.fullmatch(r"[\w.-]+:\d+", address):  # Ray's own clients (ray://) are shown it in any case
        return True
    try:
        _raylet().GcsClient(address=address)
    except Exception as error:
        return asks_for_a_secret(error)
    return False


def _raylet() -> Any:
    from ray import _raylet

    return _raylet


def forget_what_ray_has_read() -> None:
    """Make Ray read its variables again, after a Ray with variables of its own. It reads once per process whether a
    secret is required, and which one, so a later Ray with another secret or none would get no answers from here."""
    if loader := getattr(_raylet(), "AuthenticationTokenLoader", None):  # older versions know no secrets
        _raylet().Config.initialize("")
        loader.instance().reset_cache()


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
    """The Ray there requires a secret, and got none or another."""
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


WAIT = timedelta(minutes=30)  # for the first machine, which reads its data before it starts Ray
# A Ray that was started for this run, with the secret that signs its address; one that was there.
_OWN, _OTHER = "own", "other"
SHARED_S = 60.0  # for a file of another machine to be seen here


class NoMeeting(UserError):
    """The first machine of torchrun did not publish its address."""


def is_meeting() -> bool:
    """Whether torchrun has started this process, and others on further machines."""
    everywhere, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    return everywhere is not None and here is not None and everywhere != here


def master() -> str:
    """The name of the first machine, as torchrun was given it."""
    return os.environ["MASTER_ADDR"]


def tell_address(address: str, token: str, shared: Path | None) -> None:
    """`token` is Ray's secret where it was made for this run. What signs the address is the user's own secret, or one
    that is written to a file in `shared`."""
    secret = users_secret()
    if not secret:
        assert shared is not None
        secret = token or OWN
        file = _secret_file(shared)
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=file.parent, prefix=file.name)  # readable by its owner only
        with os.fdopen(handle, "w") as written:
            written.write(secret)
        os.replace(partial, file)
        _files.append(file)
    message = f"{address} {_OWN if token else _OTHER}"
    _store().set(_key(), f"{message} {_signature(message, secret)}")


def forget_secret() -> None:
    """Remove the file, when the run has ended."""
    while _files:
        with suppress(OSError):
            _files.pop().unlink()


def wait_for_address(shared: Path) -> tuple[str, str]:
    """(Ray's address, the secret made for this run or an empty string). An address without the
    first machine's signature is rejected: a Ray that this machine joins can run programs here."""
    try:
        message, _, signature = _store().get(_key()).decode().rpartition(" ")
    except Exception as error:  # torch has an error of its own for each way in which a store can fail
        raise NoMeeting(
            f"torchrun's first machine ({master()}) did not tell where its Ray is: see what its own command says. "
            f"({first_line(error)})"
        ) from error
    until = time.monotonic() + SHARED_S
    address, _, kind = message.partition(" ")
    while True:
        for secret in filter(None, (users_secret(), _made_for_this_run(shared))):
            if hmac.compare_digest(signature, _signature(message, secret)):
                return address, secret if kind == _OWN else ""
        if time.monotonic() > until:
            break
        time.sleep(0.5)
    raise NoMeeting(
        f"The address of Ray ({address}) in torchrun's store is not signed with the secret of its first machine "
        f"({master()}), as {_secret_file(shared)} or your own token should have it. All machines need "
        f"trainer.default_local_dir on a disk that they share and the same user; or give all of them one token: {WAYS}."
    )


def _signature(message: str, secret: str) -> str:
    return hmac.new(secret.encode(), f"{_key()} {message}".encode(), hashlib.sha256).hexdigest()


def _made_for_this_run(shared: Path) -> str:
    try:
        return _secret_file(shared).read_text()
    except OSError:
        return ""


def _secret_file(shared: Path) -> Path:
    # The same path on all machines, and another one for each run of torchrun and each of its attempts.
    of = f"{master()}:{os.environ['MASTER_PORT']} {_key()}"
    return shared / f".ray-secret-{hashlib.sha256(of.encode()).hexdigest()[:12]}"


def _key() -> str:
    return f"posttrain/ray/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store() -> Any:
    import torch

    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    first = os.environ.get("RANK") == "0"
    port = int(os.environ["MASTER_PORT"])
    made: Any = getattr(torch.distributed, "TCPStore")  # noqa: B009  (public, though not marked so for type checkers)
    store = made(master(), port, is_master=first and not agents, wait_for_workers=False, timeout=WAIT)
    _held.append(store)  # the first machine may be the one that hosts it
    return store


_held: list[Any] = []
_files: list[Path] = []

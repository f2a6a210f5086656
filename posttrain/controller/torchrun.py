"""Several machines under torchrun: the first process of the first one tells the others where its Ray is.

torchrun gives its processes a store that all machines reach. Ray's address goes through it, with a secret that is made
for the run, so that nobody else can use its Ray.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from posttrain.errors import UserError, first_line

WAIT = timedelta(minutes=30)
"""For the first machine, which reads its data before it starts Ray."""


class NoMeeting(UserError):
    """The first machine of torchrun did not tell its address."""


def is_meeting() -> bool:
    """Whether torchrun has started this process, and others on further machines."""
    everywhere, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    return everywhere is not None and here is not None and everywhere != here


def master() -> str:
    """The name of the first machine, as torchrun was given it."""
    return os.environ["MASTER_ADDR"]


def tell_address(address: str, token: str) -> None:
    _store().set(_key(), f"{address} {token}")


def wait_for_address() -> tuple[str, str]:
    """(Ray's address, its secret)."""
    try:
        address, _, token = _store().get(_key()).decode().partition(" ")
    except Exception as error:  # torch has an error of its own for each way in which a store can fail
        raise NoMeeting(
            f"torchrun's first machine ({master()}) did not tell where its Ray is: see what its own command says. "
            f"({first_line(error)})"
        ) from error
    return address, token


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

"""Messages between the processes of a sandbox: JSON, preceded by its length."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any

LONGEST = 256 * 1024 * 1024
_LENGTH = struct.Struct("!Q")


class Closed(EOFError):
    """The other side has closed the channel."""


def pack(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def send(fd: int, message: Any) -> None:
    """Write a whole message. Raises Closed if the other side no longer reads."""
    data = memoryview(pack(message))
    try:
        while data:
            data = data[os.write(fd, data) :]
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed(str(error)) from None


def receive(fd: int, longest: int = LONGEST, wait: Callable[[], None] = lambda: None) -> Any:
    """Read a whole message. `wait` is called before every read and may raise. An oversized one is a ValueError."""
    size = _LENGTH.unpack(_read_exactly(fd, _LENGTH.size, wait))[0]
    if size > longest:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_read_exactly(fd, size, wait))


def _read_exactly(fd: int, count: int, wait: Callable[[], None]) -> bytes:
    chunks = []
    while count:
        wait()
        try:
            chunk = os.read(fd, min(count, 1 << 20))
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise Closed("end of messages")
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)

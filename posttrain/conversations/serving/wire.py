"""Messages between the process that speaks HTTP and the process of the engine: many travel in one write.

A frame is the lengths of its parts, a JSON list of its messages, and their arrays one after another: token ids as
32-bit integers, log-probs as 64-bit floats. Nothing is pickled, because clients wrote some of the words.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

_LENGTHS = struct.Struct("!QQQ")  # bytes of the JSON, of the ids, and of the log-probs
_READ = 1 << 20
_LOG = logging.getLogger(__name__)

Receive = Callable[[list[Any], list[int], list[float]], None]
"""Takes a message: its words (JSON), and the ids and log-probs that came with it."""


class Link:
    """One end of a connection. `post` may be called in any thread; what is posted before the next write goes together.
    `lost` is called once, when the other end is gone."""

    def __init__(self, sock: socket.socket, receive: Receive, lost: Callable[[], None]) -> None:
        self._socket, self._receive, self._lost = sock, receive, lost
        self._posted = deque[tuple[list[Any], Sequence[int], Any]]()
        self._is_scheduled = False
        self._received, self._outbox = bytearray(), bytearray()
        self.is_open = False

    def open(self) -> None:
        """Begins to read and write, in the running event loop."""
        self._socket.setblocking(False)
        self._loop, self.is_open = asyncio.get_running_loop(), True
        self._loop.add_reader(self._socket, self._read)
        if self._posted:
            self._flush()

    def post(self, words: list[Any], ids: Sequence[int] = (), values: Any = ()) -> None:
        """Sends a message soon. What is posted to an end that is gone is dropped."""
        self._posted.append((words, ids, values))
        # In this order: either the flush under way takes the message, or another one is scheduled.
        if not self._is_scheduled and self.is_open:
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the loop is closed
                self.is_open = False

    def close(self) -> None:
        """Ends the connection, in the event loop's thread; the other end notices."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()

    def _flush(self) -> None:
        self._is_scheduled = False
        messages, ids, values = list[list[Any]](), list[bytes](), list[bytes]()
        while self._posted:
            words, own_ids, own_values = self._posted.popleft()
            messages.append([words, len(own_ids), len(own_values)])
            ids.append(array("i", own_ids).tobytes())
            # Engines give lists or NumPy arrays.
            values.append(array("d", own_values.tolist() if hasattr(own_values, "tolist") else own_values).tobytes())
        if messages and self.is_open:
            parts = json.dumps(messages).encode(), b"".join(ids), b"".join(values)
            self._outbox += b"".join((_LENGTHS.pack(*map(len, parts)), *parts))
            self._write()

    def _write(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:  # the other end is gone, which `_read` finds
            self._outbox.clear()
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._lost()
            return
        self._received += data
        while (frame := _split(self._received)) is not None:
            end, messages, ids, values = frame
            del self._received[:end]  # first: a frame is taken once, whatever comes of its messages
            at = value_at = 0
            for words, id_count, value_count in messages:
                own_ids = ids[at : at + id_count].tolist()
                own_values = values[value_at : value_at + value_count].tolist()
                at, value_at = at + id_count, value_at + value_count
                try:
                    self._receive(words, own_ids, own_values)
                except Exception:  # the other messages are of other requests
                    _LOG.exception("a message between the HTTP process and the engine's failed")


def _split(data: bytearray) -> tuple[int, list[Any], array[int], array[float]] | None:
    """(where the first frame ends, its messages, their ids, their log-probs); None while it is not whole."""
    if len(data) < _LENGTHS.size:
        return None
    words, ids, values = _LENGTHS.unpack_from(data)
    begin = _LENGTHS.size
    end = begin + words + ids + values
    if len(data) < end:
        return None
    found = json.loads(data[begin : begin + words])
    own_ids, own_values = array("i"), array("d")
    own_ids.frombytes(data[begin + words : begin + words + ids])
    own_values.frombytes(data[end - values : end])
    return end, found, own_ids, own_values

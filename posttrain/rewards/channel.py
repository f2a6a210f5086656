"""Messages between a RewardPool and one of its workers: pickles with their length before them, over a socket.

To the worker: the RewardSpec, then chunks of tasks [(task's number, [Payload, ...]), ...]
From it:       ("ready", spec) or ("failed", what, todo); ("print", line); ("wait", seconds);
               ("done", number, [(score, parts, error), ...], start, end);
               ("back", seconds of a task): gives back the rest of its chunk
               ("damage", what, what was put back): behind a "done", if its score changed what all scores of a worker
               share (surroundings.py). Where `what` names something, the worker ends.

A worker sends each answer when it has it, into the socket's buffer. There it is safe whatever the worker does next, and
the pool takes out many at a time.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

Payload = tuple[bytes, str, "int | None", "str | None", "Sequence[int] | None"]
"""Pickled (data_source, ground_truth, extra_info), with (prompt, progress) behind for functions of TRL's form; the
response, its number of tokens, what the model wrote of it if that is not all, and its token ids for that form."""

CHUNK_S = 0.05
"""Seconds of work that a chunk should hold; what a worker has not begun by then it gives back."""
CHUNK = 512
"""Most tasks of a chunk. All their answers fit into the socket's buffer."""
_BUFFER = 1 << 20  # the kernel gives as much of it as it allows
_LENGTH = struct.Struct("!Q")
_READ = 1 << 18
_LONGEST = 1 << 32
"""A length above this is none of ours: something else wrote into the connection."""


class Channel:
    """One end; `send` may be called by several threads."""

    def __init__(self, sock: socket.socket, send_s: float | None = None) -> None:
        """`send_s` seconds without progress end a `send` with an OSError; with it `receive` never waits."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        sock.settimeout(send_s)
        self._socket, self._lock, self._received = sock, threading.Lock(), bytearray()
        self.ended = False
        """Whether the other end was closed and all that it said was received."""
        self.broken = False
        """Whether something came that is no message; nothing after it can be read."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=5)
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[Any]:
        """The whole messages of what has come; once something else has come, `broken` is set and there are no more."""
        try:
            data = os.read(self._socket.fileno(), _READ)
            self.ended = not data
        except BlockingIOError:
            return []
        except OSError:
            self.ended = True
            return []
        if self.broken:
            return []
        self._received += data
        messages, start, size = [], 0, len(self._received)
        with memoryview(self._received) as view:
            while size - start >= _LENGTH.size:
                body = start + _LENGTH.size
                length = _LENGTH.unpack_from(view, start)[0]
                if length > _LONGEST:
                    self.broken = True
                    break
                end = body + length
                if end > size:
                    break
                try:
                    messages.append(pickle.loads(view[body:end]))
                except Exception:  # what unpickling nonsense raises is anybody's guess
                    self.broken = True
                    break
                start = end
        del self._received[: size if self.broken else start]
        return messages

    def close(self) -> None:
        self._socket.close()

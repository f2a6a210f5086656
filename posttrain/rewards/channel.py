"""Messages between a RewardPool and one of its workers: pickles, each preceded by its length, over a socket.

To the worker: the RewardSpec, then chunks of tasks [(task's number, [Payload, ...]), ...]
From it:       ("ready", spec) or ("failed", what, todo); ("print", line); ("wait", seconds);
               ("done", number, [(score, parts, error), ...], start, end);
               ("back", seconds of a task): gives back the rest of its chunk
               ("damage", what, what was restored): after a "done", if its score changed what all scores of a worker
               share (worker.py). If `what` is not empty, the worker ends.

A worker sends each answer at once, into the socket's buffer. There it is safe whatever the worker does next, and the
pool reads many at a time.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

# Pickled (data_source, ground_truth, extra_info), followed by (prompt, progress) for functions of TRL's form; the
# response, its number of tokens, the part that the model wrote if that is not all, and the token ids for TRL's form.
Payload = tuple[bytes, str, "int | None", "str | None", "Sequence[int] | None"]

# Seconds of work in one chunk; a worker gives back the tasks that it has not begun by then.
CHUNK_S = 0.05
# Most tasks in a chunk. All their answers fit into the socket's buffer, so that a worker never blocks on sending.
CHUNK = 512
_BUFFER = 1 << 20  # the kernel may grant less
_LENGTH = struct.Struct("!Q")
_READ = 1 << 18
# A larger length means that something else wrote into the connection.
_LONGEST = 1 << 32


def pack(message: Any) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(data)) + data


class Channel:
    """One end of the connection. Several threads may call `send`."""

    def __init__(self, sock: socket.socket, send_s: float | None = None) -> None:
        # After `send_s` seconds without progress `send` raises OSError; if set, `receive` never waits.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        sock.settimeout(send_s)
        self.socket, self._lock, self._received = sock, threading.Lock(), bytearray()
        # Whether the other end has closed, and everything that it sent was received.
        self.ended = False
        # Whether invalid bytes arrived; nothing after them can be read.
        self.broken = False

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Any) -> None:
        data = pack(message)
        with self._lock:
            self.socket.sendall(data)

    def receive(self) -> list[Any]:
        """Return the complete messages received so far. Invalid bytes set `broken`; no more follow."""
        try:
            data = os.read(self.socket.fileno(), _READ)
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
                except Exception:  # unpickling invalid bytes can raise anything
                    self.broken = True
                    break
                start = end
        del self._received[: size if self.broken else start]
        return messages

    def close(self) -> None:
        self.socket.close()

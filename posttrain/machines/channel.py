"""Messages between a worker process and its user: pickles, each preceded by its length, over a socket."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any

SEND_S = 60.0
"""How long a worker that should be reading may accept nothing of a message."""
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


class Relay:
    """Passes bytes of others into a socket and reads its bytes without waiting for the other end: a worker that is
    blocked does not read, and must not delay the bytes of other workers. Thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket, self._lock = sock, threading.Lock()
        self._left, self._is_last = bytearray(), False

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def has_more(self) -> bool:
        """Whether bytes wait until the other end reads."""
        return bool(self._left)

    def read(self) -> bytes | None:
        """What can be read now; empty at the end, None for nothing."""
        try:
            return self.socket.recv(_READ)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def write(self, data: bytes = b"", *, is_last: bool = False) -> None:
        """Writes as much as fits; the rest follows in later calls. After the last byte the socket is shut down."""
        with self._lock:
            self._left += data
            self._is_last = self._is_last or is_last
            try:
                while self._left:
                    del self._left[: self.socket.send(self._left)]
                if self._is_last:
                    self.socket.shutdown(socket.SHUT_RDWR)
            except BlockingIOError:
                pass
            except OSError:  # the other end is gone
                self._left.clear()

    def close_by(self, close: Callable[[], None]) -> None:
        """Calls what closes the socket, while nothing writes: its number could be another worker's by then."""
        with self._lock:
            close()

    def shut_down(self) -> None:
        """Shuts the socket down at once; bytes that wait are dropped."""
        with self._lock:
            self._left.clear()
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class Wake:
    """A pipe that ends a `wait` in another thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def __del__(self) -> None:
        # Not by a `close`: another thread might write into what has the pipe's number by then.
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full: the other thread wakes up anyway
            os.write(self._write, b".")

    def wait(self, relays: Iterable[Relay], seconds: float) -> list[Relay]:
        """Waits until some of these can be read, or have bytes left and can be written, and returns them; none after so
        many seconds, or after `set`. Not by `select`, which rejects descriptors above 1023."""
        poll, known = select.poll(), dict[int, Relay]()
        poll.register(self._read, select.POLLIN)
        for relay in relays:
            if (number := relay.fileno()) >= 0:  # it may have been closed meanwhile
                known[number] = relay
                poll.register(number, select.POLLIN | (select.POLLOUT if relay.has_more else 0))
        found = poll.poll(1000 * seconds)
        if any(number == self._read for number, _ in found):
            os.read(self._read, 4096)
        return [known[number] for number, _ in found if number in known]

"""JSON sent to a server by POST, and what it answers as JSON.

What may pass (no connection, a timeout, status 408, 425, 429 or 5xx) is tried again, with a pause that doubles; all
attempts together end in time. Redirects are not followed: a POST would arrive as a GET, and a key with a stranger.

A socket's own timeout bounds one read, and a server that sends a byte now and then is never late by it. So each attempt
runs in a thread of its own, and the caller waits for the whole of it: names, connection, body and answer.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_PASSING = {408, 425, 429, 500, 502, 503, 504}
_LEAST_S = 0.05
_MOST_BYTES, _SAID, _MOST_DIGITS = 64 << 20, 200, 400


class Refused(Exception):
    """No answer that can be used; says why. `status` is None where there was no answer at all."""

    def __init__(self, text: str, status: int | None = None, *, passing: bool = False) -> None:
        super().__init__(text)
        self.status, self.passing = status, passing


@dataclass(frozen=True)
class Patience:
    """How often a request is tried, and how long."""

    attempts: int
    pause_s: float  # before the second attempt; it doubles from one to the next
    total_s: float  # of all attempts together
    attempt_s: float | None = None  # of one attempt; None gives each what is left


def post_json(
    url: str, body: bytes, headers: Mapping[str, str], patience: Patience, *, clean: Callable[[str], str] = str
) -> Any:
    """The answer; Refused with the last attempt's reason if there is none. `clean` takes secrets out of what a server
    says of its errors."""
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json", **headers}, method="POST"
    )
    end, pause = time.monotonic() + patience.total_s, patience.pause_s
    for attempt in range(1, patience.attempts + 1):
        left = end - time.monotonic()
        try:
            return _once(request, max(_LEAST_S, min(left, patience.attempt_s or left)), clean)
        except Refused as error:
            if attempt == patience.attempts or not error.passing or time.monotonic() + pause >= end:
                times = f" (tried {attempt} times)" if attempt > 1 else ""
                raise Refused(f"{error}{times}", error.status) from None
        time.sleep(pause)
        pause *= 2
    raise AssertionError("the last attempt returns or raises")


def _once(request: urllib.request.Request, seconds: float, clean: Callable[[str], str]) -> Any:
    try:
        status, reason, text = _Exchange(request, seconds).answer()
    except TimeoutError:
        raise Refused(f"no answer within {seconds:.3g} s", passing=True) from None
    except urllib.error.URLError as error:
        raise Refused(f"no connection: {error.reason}", passing=True) from None
    except (OSError, http.client.HTTPException) as error:
        raise Refused(f"the connection broke: {type(error).__name__}: {error}", passing=True) from None
    if reason is not None:
        # Cut after it is cleaned: half a key is a secret too.
        said = clean(text.decode(errors="replace").strip())[:_SAID]
        words = f"status {status} {reason}" + (f": {said}" if said else "")
        raise Refused(words, status, passing=status in _PASSING)
    try:
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError):
        said = clean(text.decode(errors="replace"))[:80]
        raise Refused(f"answered no JSON: {said!r}", 200) from None


def _integer(digits: str) -> int | float:
    # An integer as JSON writes it; one that Python would not read becomes infinite.
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


_Answer = tuple[int, str | None, bytes]  # (status, reason of an error or None, body)


@dataclass
class _Exchange:
    """One request and its answer, in a thread; TimeoutError where the whole takes longer than `seconds`."""

    request: urllib.request.Request
    seconds: float
    done: threading.Event = field(default_factory=threading.Event)
    late: threading.Event = field(default_factory=threading.Event)
    sockets: list[socket.socket] = field(default_factory=list)
    found: _Answer | BaseException | None = None

    def answer(self) -> _Answer:
        threading.Thread(target=self._run, name="post", daemon=True).start()
        if not self.done.wait(self.seconds):
            self._hang_up()
            raise TimeoutError
        if isinstance(self.found, BaseException):
            raise self.found
        assert self.found is not None
        return self.found

    def _run(self) -> None:
        try:
            self.found = self._exchanged()
        except BaseException as error:  # raised in the thread that waits
            self.found = error
        self.done.set()

    def _exchanged(self) -> _Answer:
        opener = urllib.request.build_opener(_NoRedirect, _Http(self.opened), _Https(self.opened))
        try:
            with opener.open(self.request, timeout=self.seconds) as response:
                return response.status, None, response.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            return error.code, str(error.reason), error.read(_MOST_BYTES)

    def opened(self, connected: socket.socket) -> None:
        self.sockets.append(connected)
        if self.late.is_set():
            self._hang_up()

    def _hang_up(self) -> None:
        # The caller has given up: shutting the socket down wakes the thread that reads from it.
        self.late.set()
        for one in self.sockets:
            with suppress(OSError):  # closed by the thread meanwhile
                one.shutdown(socket.SHUT_RDWR)


Opened = Callable[[socket.socket], None]


class _Http(urllib.request.HTTPHandler):
    """Reports each socket that it opens."""

    def __init__(self, opened: Opened) -> None:
        super().__init__()
        self._opened = opened

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_telling(http.client.HTTPConnection, self._opened), req)  # pyright: ignore


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, opened: Opened) -> None:
        super().__init__()
        self._opened = opened

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_telling(http.client.HTTPSConnection, self._opened), req)  # pyright: ignore


def _telling(kind: type[http.client.HTTPConnection], opened: Opened) -> type[http.client.HTTPConnection]:
    class Telling(kind):
        def connect(self) -> None:
            super().connect()
            opened(self.sock)

    return Telling


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None

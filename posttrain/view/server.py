"""The web server: static files, answers as JSON, and searches as a stream of lines; read-only, on 127.0.0.1.

It is the standard library's, a thread per request: there is one user, nothing to upload, and a dozen addresses.
Only a browser on this machine (or at the other end of an ssh tunnel) that was given the token gets answers:

- `Host` must name this machine, so that no web page reaches the server under a name of its own (DNS rebinding).
- The token comes once in the address, is answered with a cookie, and leaves the address at once. The cookie is kept
  from scripts and is not sent along by other sites' pages.
- The answers' headers forbid the page everything that it does not need: other hosts, frames, inline scripts and styles.
"""

from __future__ import annotations

import gzip
import hmac
import json
import mimetypes
import secrets
import socket
from collections.abc import Iterator, Mapping
from email.message import Message
from functools import cache
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from posttrain.errors import UserError
from posttrain.view.answers import Answers, NotFound
from posttrain.view.page import static_file, static_files

Headers = Mapping[str, str] | Message
LOCAL = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Holds the token of one viewer. `port` keeps the cookies of several viewers apart."""

    def __init__(self, port: int, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(18)
        self._cookie = f"posttrain_view_{port}"

    def is_local(self, headers: Headers) -> bool:
        """Whether the request was sent to this machine by one of its own names."""
        host = headers.get("Host") or ""
        try:
            return urlsplit(f"//{host}").hostname in LOCAL
        except ValueError:
            return False

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def knows(self, headers: Headers) -> bool:
        """Whether the request carries the token, as a cookie or as `Authorization: Bearer`."""
        bearer = (headers.get("Authorization") or "").removeprefix("Bearer ")
        if bearer and self.is_token(bearer):
            return True
        try:
            found = SimpleCookie(headers.get("Cookie") or "").get(self._cookie)
        except CookieError:
            return False
        return found is not None and self.is_token(found.value)

    def cookie(self) -> str:
        """The `Set-Cookie` that lets a browser in until it is closed."""
        return f"{self._cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"


PORT = 6180
_SMALL = 1400
_NO_TOKEN = (
    "This page needs the token that `posttrain view` printed: open the address it gave, with ?token=... at its end."
)


class Viewer(ThreadingHTTPServer):
    """Serves `answers` on 127.0.0.1:`port`, or on the next free port where that is the default and taken."""

    daemon_threads = True

    def __init__(self, answers: Answers, port: int | None = None, token: str | None = None) -> None:
        self.answers = answers
        super().__init__(("127.0.0.1", _free(PORT) if port is None else port), _Handler, bind_and_activate=False)
        try:
            self.server_bind()
            self.server_activate()
        except OSError as error:
            self.server_close()
            raise UserError(f"Port {port} cannot be used: {error.strerror}. Give another with --port.") from error
        self.guard = Guard(self.server_port, token)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self.guard.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no news."""


def _free(port: int) -> int:
    """`port`, the next one that nobody listens on, or any."""
    for one in range(port, port + 20):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", one))
                return one
            except OSError:
                continue
    return 0


class _Handler(BaseHTTPRequestHandler):
    server: Viewer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "posttrain", ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        guard = self.server.guard
        if not guard.is_local(self.headers):
            return self._say(403, "This viewer answers only to 127.0.0.1 and localhost.")
        if "token" in query and url.path == "/":
            return self._let_in() if guard.is_token(query["token"]) else self._say(403, _NO_TOKEN)
        if not guard.knows(self.headers):
            return self._say(403, _NO_TOKEN)
        if url.path.startswith("/api/"):
            return self._answer(url.path.removeprefix("/api/"), query)
        return self._static("index.html" if url.path == "/" else url.path.removeprefix("/static/"))

    def _let_in(self) -> None:
        self.send_response(303)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", self.server.guard.cookie())
        self.send_header("Content-Length", "0")
        self._finish_headers()

    def _answer(self, name: str, query: dict[str, str]) -> None:
        try:
            found = self.server.answers.answer(name, query)
            data = b"" if isinstance(found, Iterator) else to_json(found)
        except NotFound as error:
            return self._say(404, str(error))
        except (KeyError, ValueError, TypeError, RecursionError) as error:  # the latter: of files that hold anything
            return self._say(400, f"This cannot be answered: {error}")
        if isinstance(found, Iterator):
            return self._stream(found)
        self._send(200, "application/json", data)

    def _static(self, name: str) -> None:
        if name not in static_files():
            return self._say(404, "There is no such page.")
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        kind = "text/javascript" if name.endswith(".js") else kind
        self._send(200, f"{kind}; charset=utf-8", static_file(name), kept=True)

    def _stream(self, lines: Iterator[Any]) -> None:
        """One JSON line each, as soon as it is known, until the reader leaves."""
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self._finish_headers()
        for line in lines:
            data = to_json(line) + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _say(self, status: int, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", text.encode())

    def _send(self, status: int, kind: str, data: bytes, *, kept: bool = False) -> None:
        self.send_response(status)
        if len(data) > _SMALL and "gzip" in (self.headers.get("Accept-Encoding") or ""):
            data = _packed(data) if kept else gzip.compress(data, 1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self._finish_headers()
        self.wfile.write(data)

    def _finish_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the user's, and addresses may hold the token."""


@cache
def _packed(data: bytes) -> bytes:
    """A file of the page, compressed once."""
    return gzip.compress(data, 6)


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")

"""The web server: static files, answers as JSON, and searches as a stream of lines; read-only, on 127.0.0.1.

It is the standard library's server with a thread per request: there is one user and a dozen addresses. Only a browser
on this machine (or at the other end of an ssh tunnel) that has the token gets answers:

- `Host` must name this machine, so that no web page reaches the server under a name of its own (DNS rebinding).
- The token comes once in the address and is exchanged for a cookie by a redirect, so it does not stay in the address.
  Scripts cannot read the cookie, and pages of other sites do not send it.
- The headers forbid the page what it does not need: other hosts, frames, inline scripts and styles.

The page's scripts are modules that import each other by one-line statements. They are served joined in the order of
their imports as one module, since no two use the same top-level name: one request instead of twenty.

`export` writes the same page as one HTML file of some runs: all metrics, settings and advice, and as many samples as
fit. Styles, scripts and answers are embedded; its content security policy forbids every request.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import hmac
import json
import mimetypes
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.message import Message
from functools import cache
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from posttrain.errors import UserError
from posttrain.tracking.rundir import ROOT
from posttrain.tracking.safe_files import replace_file
from posttrain.view.answers import Answers, NotFound
from posttrain.view.runs import Runs

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
    """Holds the token of one viewer. `port` is part of the cookie's name, so that several viewers do not clash."""

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
        # In constant time: the duration of an ordinary comparison tells how many characters were right.
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
    """Serves `answers` on 127.0.0.1:`port`, or on the next free port if no port was given and the default is taken."""

    # A stream to a browser may last for hours; Ctrl-C must not wait for it.
    daemon_threads = True

    def __init__(self, answers: Answers, port: int | None = None, token: str | None = None) -> None:
        self.answers = answers
        # Bound by hand below, so that a taken port is answered in words and the socket is closed.
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
        """Print nothing: browsers close connections all the time."""


def _free(port: int) -> int:
    # The first free one of 20; 0 lets the system choose.
    for one in range(port, port + 20):
        with socket.socket() as probe:
            # As the server binds: a port that was closed a moment ago counts as free.
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
        # First of all: a page of another site can make its name point here (DNS rebinding), but not change the Host
        # that its browser sends.
        if not guard.is_local(self.headers):
            return self._say(403, "This viewer answers only to 127.0.0.1 and localhost.")
        if "token" in query and url.path == "/":
            # The token moves into a cookie and out of the address, which browsers keep in their history and send along
            # as referrer.
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
        except (KeyError, ValueError, TypeError, RecursionError) as error:  # the last from deeply nested files
            return self._say(400, f"This cannot be answered: {error}")
        if isinstance(found, Iterator):
            return self._stream(found)
        self._send(200, "application/json", data)

    def _static(self, name: str) -> None:
        # A name from a list, never a path: `..` leads nowhere.
        if name not in static_files():
            return self._say(404, "There is no such page.")
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        kind = "text/javascript" if name.endswith(".js") else kind
        self._send(200, f"{kind}; charset=utf-8", static_file(name), kept=True)

    def _stream(self, lines: Iterator[Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self._finish_headers()
        for line in lines:
            data = to_json(line) + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            # Each line on its own: the page shows what is found so far.
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _say(self, status: int, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", text.encode())

    def _send(self, status: int, kind: str, data: bytes, *, kept: bool = False) -> None:
        self.send_response(status)
        if len(data) > _SMALL and "gzip" in (self.headers.get("Accept-Encoding") or ""):
            # Answers are compressed at the lowest level: they are made anew each time, and go to this machine.
            data = _compress(data) if kept else gzip.compress(data, 1)
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
        """Print nothing: addresses may contain the token."""


@cache
def _compress(data: bytes) -> bytes:
    # Files of the page never change, so they are compressed once, and better than answers.
    return gzip.compress(data, 6)


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


# -- the files of the page ---------------------------------------------------------------------------------------------
SCRIPT = "page.js"  # the name under which the joined modules are served
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.M)
_EXPORT = re.compile(r"^export (?=const|let|function|async)", re.M)


@cache
def static_files() -> set[str]:
    """Names of the files that are served; a list of names leaves no way out of the folder."""
    folder = resources.files("posttrain.view") / "static"
    return {SCRIPT, *(entry.name for entry in folder.iterdir() if entry.is_file())}


@cache
def static_file(name: str) -> bytes:
    if name == SCRIPT:
        return joined_modules("main.js").encode()
    return (resources.files("posttrain.view") / "static" / name).read_bytes()


def joined_modules(entry: str) -> str:
    """The module and all that it imports, each after its own imports."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for needed in _IMPORT.findall(static_file(name).decode()):
                visit(needed)
            order.append(name)

    visit(entry)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", static_file(name).decode())) for name in order)


_STYLES = re.compile(r'<link rel="(?:stylesheet|preload)"[^>]*>\n')
_SCRIPTS = re.compile(r"<script [^>]*></script>\n")


def one_file(embedded: dict[str, Any]) -> str:
    """The whole page with these answers in place of a server."""
    page = static_file("index.html").decode()
    style = "\n".join(static_file(name).decode() for name in ("uplot.min.css", "style.css"))
    charts, code = static_file("uplot.min.js").decode(), static_file(SCRIPT).decode()
    policy = (
        f"default-src 'none'; script-src {_source_hash(charts)} {_source_hash(code)}; style-src {_source_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(embedded, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    tail = (
        f'<script type="application/json" id="embedded">{data}</script>\n<script>{charts}</script>\n'
        f'<script type="module">{code}</script>\n'
    )
    page = _SCRIPTS.sub("", _STYLES.sub("", page))
    page = page.replace("</head>", head + "</head>").replace("</body>", tail + "</body>")
    return page.encode("utf-8", "replace").decode()


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Samples in one file, shared by its runs: so much opens quickly and can be sent by mail.
SAMPLE_BYTES = 15_000_000
# Of one run: steps with samples, spread evenly from the first to the last, and groups of each step.
STEPS, GROUPS = 12, 16


def export(answers: Answers, path: Path) -> Path:
    names = list(answers.runs.folders())
    held: dict[str, Any] = {"runs": answers.answer("runs", {})}
    for name in names:
        held |= _run(answers, name, SAMPLE_BYTES // len(names))
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = one_file({"answers": held, "note": f"exported {day}"})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.encode())
    return path


def _run(answers: Answers, run: str, room: int) -> dict[str, Any]:
    whole = answers.answer("metrics", {"run": run})
    every = answers.answer("metrics", {"run": run, "names": ",".join(whole["names"])})
    held = {key("metrics", run=run): every, key("config", run=run): answers.answer("config", {"run": run})}
    for name in ("diagnosis", "timeline", "details", "explain"):
        held[key(name, run=run)] = answers.answer(name, {"run": run})
    answers.read_all(run)
    held[key("failures", run=run)] = answers.answer("failures", {"run": run})
    held[key("steps", run=run, learn=1)] = kept = {"step": [], "val": []}
    for kind, step, found in _steps(answers, run, room):
        kept[kind].append(step)
        held |= found
    for steps in kept.values():
        steps.sort()
    return held


def _steps(answers: Answers, run: str, room: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    # (kind, step, its answers) of the newest, the first and those between, until there is no more room.
    available = answers.answer("steps", {"run": run})
    wanted = [("val", step) for step in pick_evenly(available["val"], 3)] + [
        ("step", step) for step in pick_evenly(available["step"], STEPS)
    ]
    for kind, step in sorted(wanted, key=lambda one: -one[1]):
        try:
            found = _step(answers, run, kind, step)
        except NotFound:
            continue  # thinned meanwhile
        room -= len(to_json(found))
        if room < 0:
            return
        yield kind, step, found


def _step(answers: Answers, run: str, kind: str, step: int) -> dict[str, Any]:
    where = {"run": run, "step": step, "kind": kind}
    asked = {name: str(value) for name, value in where.items()}
    groups = answers.answer("groups", asked)[:GROUPS]
    held = {key("groups", **where): groups}
    for group in groups:
        one = asked | {"uid": group["uid"]}
        held[key("group", **where, uid=group["uid"])] = found = answers.answer("group", one)
        for response in found["responses"]:
            place = {name: response[name] for name in ("sample", "branch") if response[name] is not None}
            tokens = answers.answer("response", one | {name: str(value) for name, value in place.items()})
            held[key("response", **where, uid=group["uid"], **place)] = tokens
    return held


def pick_evenly(steps: list[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly, the first and the last among them."""
    if len(steps) <= count:
        return steps
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def key(name: str, **query: Any) -> str:
    """As the page spells a question to an exported file."""
    return name + "?" + "&".join(f"{field}={value}" for field, value in sorted(query.items()))


def main(args: Sequence[str]) -> int:
    """`posttrain view [RUN...]`: serve the page until Ctrl-C, or write it into one file."""
    parser = argparse.ArgumentParser(
        prog="posttrain view",
        description="Runs in a browser: curves, samples token by token, health; live while a run goes on.",
        epilog="From another machine: ssh -L 6180:127.0.0.1:6180 HOST, then open the address that was printed.",
    )
    parser.add_argument("run", nargs="*", help=f"runs' folders or names, or folders that hold runs (default: {ROOT}/)")
    parser.add_argument("--port", type=int, help="of 127.0.0.1 (default: 6180, or the next that is free)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one HTML file that needs no server")
    options = parser.parse_args(args)
    answers = Answers(Runs(options.run))
    if options.export:
        print(f"written: {export(answers, options.export)}")
        return 0
    with Viewer(answers, options.port) as viewer:
        count = len(answers.runs.folders())
        print(f"{count} {'run' if count == 1 else 'runs'}: {viewer.address}\nCtrl-C ends it.", flush=True)
        try:
            viewer.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0

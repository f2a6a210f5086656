"""A browser driven from Python: Chromium without a window, asked over its DevTools protocol; standard library only."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import secrets
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

WAIT = """(condition, limit) => new Promise((done) => {
  const start = performance.now();
  const look = () => {
    let met = false;
    try { met = condition(); } catch { met = false; }
    if (met) return requestAnimationFrame(() => done(performance.now() - start));
    if (performance.now() - start > limit) return done(null);
    requestAnimationFrame(look);
  };
  look();
})"""


class Browser:
    """One Chromium with one page."""

    def __init__(self, program: str = "chromium", width: int = 1280, height: int = 900) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-quic",
        ]
        place = [
            f"--user-data-dir={self._profile.name}",
            "--remote-debugging-port=0",
            f"--window-size={width},{height}",
        ]
        self._log = Path(self._profile.name) / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([program, *flags, *place, "about:blank"], stdout=log, stderr=log)
        port = self._port()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            target = next(one for one in json.load(answer) if one["type"] == "page")
        self._socket = _connect(target["webSocketDebuggerUrl"])
        self._numbers, self.events = itertools.count(1), []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _port(self) -> int:
        deadline = time.time() + 60
        while time.time() < deadline:
            match = re.search(r"DevTools listening on ws://127\.0\.0\.1:(\d+)", self._log.read_text(errors="replace"))
            if match:
                return int(match[1])
            time.sleep(0.1)
        raise RuntimeError(f"Chromium did not start: {self._log.read_text(errors='replace')[-500:]}")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        _send(self._socket, json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(_receive(self._socket))
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def run(self, code: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"])[:800])
        return answer["result"].get("value")

    def timed(self, act: str, condition: str, limit_ms: int = 30000) -> float | None:
        """Milliseconds from doing `act` until `condition` holds and was painted; None if it never does."""
        waited = f"const w = await ({WAIT})(() => {condition}, {limit_ms})"
        done = "return w === null ? null : performance.now() - t"
        return self.run(f"(async () => {{ const t = performance.now(); {act}; {waited}; {done}; }})()")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def mouse(self, *places: tuple[float, float], press: bool = False) -> None:
        """Move through these places, with the button held from the first to the last if `press`."""
        for i, (x, y) in enumerate(places):
            held = press and i > 0
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, buttons=int(held))
            if press and i in (0, len(places) - 1):
                kind = "mousePressed" if i == 0 else "mouseReleased"
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def place_of(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of the first element of that kind."""
        return tuple(
            self.run(
                f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                "return [r.left, r.top, r.width, r.height]; })()"
            )
        )

    def save_downloads_in(self, folder: Path) -> None:
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder.resolve()))

    def shot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def problems(self) -> list[str]:
        """Errors that the page threw, and what its security policy refused."""
        found = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(f"{event['params']['entry']['text']} {event['params']['entry'].get('url', '')}")
        return found

    def requests(self) -> set[str]:
        """Every address that the page asked for."""
        return {e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._profile.cleanup()


def _connect(address: str) -> socket.socket:
    match = re.fullmatch(r"ws://([^:/]+):(\d+)(/.*)", address)
    assert match is not None
    connection = socket.create_connection((match[1], int(match[2])))
    key = base64.b64encode(secrets.token_bytes(16)).decode()
    lines = [f"GET {match[3]} HTTP/1.1", f"Host: {match[1]}:{match[2]}", "Upgrade: websocket", "Connection: Upgrade"]
    connection.sendall("\r\n".join([*lines, f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]).encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += connection.recv(1)
    assert b" 101 " in answer.split(b"\r\n")[0], answer
    return connection


def _send(connection: socket.socket, text: str) -> None:
    data = text.encode()
    size = (
        bytes([0x80 | len(data)])
        if len(data) < 126
        else b"\xfe" + struct.pack(">H", len(data))
        if len(data) < 65536
        else b"\xff" + struct.pack(">Q", len(data))
    )
    mask = os.urandom(4)
    masked = (int.from_bytes(data, "big") ^ int.from_bytes((mask * (len(data) // 4 + 1))[: len(data)], "big")).to_bytes(
        len(data), "big"
    )
    connection.sendall(b"\x81" + size + mask + masked)


def _receive(connection: socket.socket) -> str:
    whole = b""
    while True:
        first, second = _exactly(connection, 2)
        size = second & 127
        if size == 126:
            size = struct.unpack(">H", _exactly(connection, 2))[0]
        elif size == 127:
            size = struct.unpack(">Q", _exactly(connection, 8))[0]
        whole += _exactly(connection, size)
        if first & 0x80:
            return whole.decode()


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connection.recv(min(count - len(data), 1 << 20))
    return data

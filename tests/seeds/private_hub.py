"""A hub on this machine that gives one model's files to whoever shows the token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0" * 40


@contextmanager
def private_hub(folder: Path, name: str, token: str) -> Iterator[tuple[str, list[str]]]:
    """(address, requests that showed no token); serves `folder` as the model `name`."""
    refused: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            if self.headers.get("Authorization") != f"Bearer {token}":
                refused.extend([self.path] if name in self.path else [])
                return self.reply(401, b"", {"X-Error-Code": "GatedRepo"}, with_body)
            file = folder / self.path.partition("?")[0].rpartition("/")[2]
            if self.path.startswith(f"/api/models/{name}"):
                names = [path.name for path in folder.iterdir()]
                files = [{"type": "file", "path": one, "rfilename": one, "size": 1, "oid": one} for one in names]
                listing = files if "/tree/" in self.path else {"id": name, "sha": COMMIT, "siblings": files}
                return self.reply(200, json.dumps(listing).encode(), {}, with_body)
            if self.path.startswith(f"/{name}/resolve/") and file.is_file():
                return self.reply(200, file.read_bytes(), {"ETag": f'"{file.name}"'}, with_body)
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)

        def reply(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for key, value in {**headers, "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", refused
    finally:
        server.shutdown()
        server.server_close()

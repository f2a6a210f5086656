"""A small run made without training, and questions to a viewer over real HTTP."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from posttrain.view.answers import Answers
from posttrain.view.runs import Runs
from posttrain.view.server import Viewer

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from synthetic_run import make_run

STEPS, RESPONSES = 6, 32


def small_run(folder: Path, **more: Any) -> Path:
    return make_run(folder, **{"steps": STEPS, "responses": RESPONSES, **more})


class Client:
    """Asks a viewer of these runs, which is served from a thread."""

    def __init__(self, *runs: Path) -> None:
        self.viewer = Viewer(Answers(Runs([str(run) for run in runs])), 0)
        threading.Thread(target=self.viewer.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body, exactly for this path, with exactly these headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.viewer.server_port, timeout=30)
        connection.putrequest("GET", path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return found

    def ask(self, name: str, **query: Any) -> Any:
        status, _, body = self.get(f"/api/{name}?{urlencode(query)}", Authorization=f"Bearer {self.viewer.guard.token}")
        assert status == 200, body
        return json.loads(body)

    def lines(self, name: str, **query: Any) -> list[Any]:
        _, _, body = self.get(f"/api/{name}?{urlencode(query)}", Authorization=f"Bearer {self.viewer.guard.token}")
        return [json.loads(line) for line in body.splitlines()]

    def close(self) -> None:
        self.viewer.shutdown()
        self.viewer.server_close()

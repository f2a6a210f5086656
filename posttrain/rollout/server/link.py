"""The near side's connection to one rollout server, and what a failed one is called."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

from posttrain.errors import UserError
from posttrain.rollout.server.wire import ROOT, SESSION

KEY_VARIABLE = "POSTTRAIN_API_KEY"
IDLE_S = 15.0  # servers and proxies close connections that are idle for long; ours is opened anew before that
START = "posttrain serve MODEL --accept-weights"


class ServerError(UserError):
    """A rollout server cannot be used; says which, and what to do."""


class Link:
    """`call(name, body)` to one server, one at a time. `timeout_s` is how long it may give no sign of life; while it
    computes it gives one every few seconds."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self.url, self.key, self.timeout_s = url.rstrip("/"), key, timeout_s
        self.session = ""
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0

    def call(self, name: str, body: Any = None, **headers: str) -> Any:
        """The result; ServerError where there is none. Bytes are sent as they are, anything else as JSON."""
        sent = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        try:
            status, text = self._exchange(f"{ROOT}/{name}", sent, {SESSION: self.session, **headers})
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._lost(name, error) from None
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {}
        if status == 200 and "result" in answer:
            return answer["result"]
        self.close()
        raise ServerError(
            self._words(name, status, str(answer.get("error", "")) or text[:200].decode(errors="replace"))
        )

    def _exchange(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._connection is not None and time.monotonic() - self._used > IDLE_S:
            self.close()
        if self._connection is None:
            parts = urlsplit(self.url)
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(parts.netloc, timeout=self.timeout_s)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/octet-stream", **headers}
        self._connection.request("POST", urlsplit(self.url).path + path, body, headers)
        with self._connection.getresponse() as response:
            text = response.read()
        self._used = time.monotonic()
        return response.status, text

    def _lost(self, name: str, error: Exception) -> ServerError:
        reason = f"no sign of life for {self.timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        reason = reason or type(error).__name__
        if not self.session:
            return ServerError(
                f"No rollout server answers at {self.url}: {reason}.\n"
                f"  to do:  start `{START}` there first, or correct actor_rollout_ref.rollout.server.url"
            )
        return ServerError(
            f"The rollout server {self.url} was lost during `{name}`: {reason}.\n"
            f"  to do:  look at its output, start it again (`{START}`), and repeat this command: the run continues "
            "from its newest checkpoint"
        )

    def _words(self, name: str, status: int, said: str) -> str:
        at = f"The rollout server {self.url}"
        if status == 401:
            return f"{at} rejects the key.\n  to do:  set {KEY_VARIABLE} to the key that it was started with"
        if status == 404:
            return f"{at} is not one for runs.\n  to do:  start it as `{START}`, and give its address without a path"
        if status == 410:
            return f"{at} belongs to another run now: {said}.\n  to do:  give each run servers of its own"
        return f"{at} failed in `{name}`" + (f" (status {status})" if status != 200 else "") + f": {said}"

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

"""A reward behind a URL: rows go out as JSON in one POST per group, scores come back.

out:  {"rows": [{"data_source": ..., "solution_str": ..., "ground_truth": ..., "extra_info": ...}, ...]}
back: {"scores": [0.5, {"score": 1.0, "acc": 1}, ...]}, or the list alone

What may pass (no connection, a timeout, status 408, 429 or 5xx) is tried again, with a pause that doubles; whatever
remains gives its rows an error. All attempts together end before the deadline of the score.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.masking import mask_urls
from posttrain.rewards.outcomes import Outcome, failure, read_results
from posttrain.rewards.signatures import Fields
from posttrain.rewards.types import RewardError

NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_SHARE = 0.9
"""Share of a score's time that all attempts may take; the rest is for writing and reading."""
_MOST_BYTES = 64 << 20
_MOST_DIGITS = 400


@dataclass
class Remote:
    """Scores items by a server; `total_s` is the time of all attempts together."""

    url: str
    attempts: int = 4
    """How often a request is tried."""
    attempt_s: float | None = None
    """Seconds of one attempt; None gives each what is left."""
    pause_s: float = 0.1
    """Pause before the second attempt; it doubles from one to the next."""
    token_env: str | None = None
    """Environment variable whose value is sent as the bearer token."""
    total_s: float = 10.0

    @property
    def shown(self) -> str:
        """The address as people may see it."""
        return mask_urls(self.url)

    def __call__(self, items: Sequence[Fields]) -> list[Outcome]:
        try:
            body = json.dumps({"rows": [dict(zip(NAMES, item[:4], strict=True)) for item in items]}, default=_plain)
            answer = self._post(body.encode())
        except (_Refused, TypeError, ValueError) as error:
            return [failure(f"{self.shown}: {error}")] * len(items)
        scores = answer.get("scores", answer) if isinstance(answer, dict) else answer
        return [
            (score, parts, f"{self.shown} {error}" if error else None)
            for score, parts, error in read_results(scores, len(items))
        ]

    def check(self) -> None:
        """RewardError if nobody answers; what the server thinks of an empty batch does not matter."""
        try:
            self._post(b'{"rows": []}')
        except _Refused as error:
            if error.status not in (None, 404):
                return
            raise RewardError(
                f"the reward server {self.shown} does not answer: {error}",
                todo="start it, or correct the URL; it takes POST requests",
            ) from None
        except ValueError:
            return

    def _post(self, body: bytes) -> Any:
        end, pause = time.monotonic() + _SHARE * self.total_s, self.pause_s
        for attempt in range(1, self.attempts + 1):
            left = end - time.monotonic()
            try:
                return self._once(body, max(0.05, min(left, self.attempt_s or left)))
            except _Refused as error:
                last = attempt == self.attempts or not error.passing or time.monotonic() + pause >= end
                if last:
                    times = f" (tried {attempt} times)" if attempt > 1 else ""
                    raise _Refused(f"{error}{times}", error.status) from None
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def _once(self, body: bytes, seconds: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.token_env:
            headers["Authorization"] = f"Bearer {os.environ.get(self.token_env, '')}"
        address, user = _without_user(self.url)
        if user and not self.token_env:
            headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        request = urllib.request.Request(address, data=body, headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                text = response.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            said = error.read(200).decode(errors="replace").strip()
            words = f"status {error.code} {error.reason}" + (f": {said}" if said else "")
            raise _Refused(words, error.code, passing=error.code in _PASSING) from None
        except TimeoutError:
            raise _Refused(f"no answer within {seconds:.3g} s", passing=True) from None
        except urllib.error.URLError as error:
            raise _Refused(f"no connection: {error.reason}", passing=True) from None
        except (OSError, http.client.HTTPException) as error:
            raise _Refused(f"the connection broke: {type(error).__name__}: {error}", passing=True) from None
        try:
            return json.loads(text, parse_int=_integer)
        except ValueError:
            raise _Refused(f"answered no JSON: {text[:80].decode(errors='replace')!r}", 200) from None


class _Refused(Exception):
    def __init__(self, text: str, status: int | None = None, *, passing: bool = False) -> None:
        super().__init__(text)
        self.status, self.passing = status, passing


def _integer(digits: str) -> int | float:
    """An integer as JSON writes it; one that no score can be, and Python would not read, becomes infinite."""
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _without_user(url: str) -> tuple[str, str]:
    """The address without `user:password@`, and what stood there, decoded: urllib takes it for a host."""
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), urllib.parse.unquote(user)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy, as parquet columns arrive
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)

"""In a worker: the reward behind a URL. Rows go as JSON in one POST per group, scores come back:

out:  {"rows": [{"data_source": ..., "solution_str": ..., "ground_truth": ..., "extra_info": ...}, ...]}
back: {"scores": [0.5, {"score": 1.0, "acc": 1}, ...]}, or the list alone

Temporary failures are retried (posting.py); rows that still fail get an error. All attempts together end before the
score's deadline. Only workers of such a reward import this file: HTTP and TLS would be a third of a worker's start.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.posting import Patience, Refused, post_json
from posttrain.rewards.signatures import read_results
from posttrain.rewards.types import Fields, Outcome, RewardError, failure
from posttrain.texts import mask_urls

NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
# The share of a score's time for all attempts; the rest is for writing and reading.
_SHARE = 0.9


@dataclass
class Remote:
    """Scores items on a server; `total_s` limits all attempts together."""

    url: str
    # How often a request is tried.
    attempts: int = 4
    # Seconds for one attempt; None gives each attempt the time that is left.
    attempt_s: float | None = None
    # Pause before the second attempt; it doubles each time.
    pause_s: float = 0.1
    # Environment variable whose value is sent as the bearer token.
    token_env: str | None = None
    total_s: float = 10.0

    @property
    def shown(self) -> str:
        return mask_urls(self.url)

    def __call__(self, items: Sequence[Fields]) -> list[Outcome]:
        try:
            body = json.dumps({"rows": [dict(zip(NAMES, item[:4], strict=True)) for item in items]}, default=_plain)
            answer = self._post(body.encode())
        except (Refused, TypeError, ValueError) as error:
            return [failure(f"{self.shown}: {error}")] * len(items)
        scores = answer.get("scores", answer) if isinstance(answer, dict) else answer
        return [
            (score, parts, f"{self.shown} {error}" if error else None)
            for score, parts, error in read_results(scores, len(items))
        ]

    def check(self) -> None:
        """Raise RewardError if the server does not answer; its response to an empty batch does not matter."""
        try:
            self._post(b'{"rows": []}')
        except Refused as error:
            if error.status not in (None, 404):
                return
            raise RewardError(
                f"the reward server {self.shown} does not answer: {error}",
                todo="start it, or correct the URL; it takes POST requests",
            ) from None
        except ValueError:
            return

    def _post(self, body: bytes) -> Any:
        address, user = _without_user(self.url)
        headers = {}
        if self.token_env:
            headers["Authorization"] = f"Bearer {os.environ.get(self.token_env, '')}"
        elif user:
            headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        patience = Patience(self.attempts, self.pause_s, _SHARE * self.total_s, self.attempt_s)
        return post_json(address, body, headers, patience)


def _without_user(url: str) -> tuple[str, str]:
    # urllib takes `user:password@` for a part of the host name.
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), urllib.parse.unquote(user)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy values, from parquet columns
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)

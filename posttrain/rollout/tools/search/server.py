"""Passages from a retrieval server.

out:  {"queries": ["..."], "topk": 3, "return_scores": true}
back: {"result": [[{"document": {"contents": "..."}, "score": 0.9}, ...]]}, as Search-R1's server answers, or
      {"results": [{"title": "...", "text": "..."}, ...]} (`content` and `snippet` for `text` are read too)

The key goes out as a bearer token, to this server alone: redirects are not followed. What may pass (no connection, a
timeout, status 408, 429 or 5xx) is tried again.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from posttrain.errors import UserError
from posttrain.masking import mask_urls
from posttrain.rollout.tools.answers import redacted
from posttrain.rollout.tools.search.corpus import Passage, passage_of

_PASSING = {408, 425, 429, 500, 502, 503, 504}
_ATTEMPTS, _PAUSE_S, _TOTAL_S = 3, 0.2, 30.0
_MOST_BYTES, _SAID = 16 << 20, 200


class Unanswered(Exception):
    """The server gave no passages; says why, without the key."""


class Server:
    """Asks one server. UserError for an address that is none."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urllib.parse.urlsplit(url)
        self.shown = mask_urls(redacted(url, [api_key] if api_key else []))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"the address of the search server must begin with http:// or https://, not {self.shown!r}."
            )
        if "@" in parts.netloc:
            raise UserError(f"the address {self.shown} has a user in it.\n  to do:  give the key alone, as api_key")
        if any(ord(one) < 33 or ord(one) > 126 for one in api_key):
            raise UserError("the api_key of the search server has characters in it that no header can hold.")
        self._url, self._key = url, api_key
        self._opener = urllib.request.build_opener(_NoRedirect)

    def best(self, query: str, most: int) -> list[Passage]:
        """The passages that the server finds; Unanswered if it does not say."""
        body = json.dumps({"queries": [query], "topk": most, "return_scores": True}).encode()
        try:
            return read_passages(self._post(body))[:most]
        except Unanswered as error:
            raise Unanswered(redacted(mask_urls(str(error)), [self._key] if self._key else [])) from None

    def _post(self, body: bytes) -> Any:
        end, pause = time.monotonic() + _TOTAL_S, _PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._once(body, max(0.1, end - time.monotonic()))
            except _Passing as error:
                if attempt == _ATTEMPTS or time.monotonic() + pause >= end:
                    raise Unanswered(f"{error} (tried {attempt} times)") from None
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def _once(self, body: bytes, seconds: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=seconds) as response:
                text = response.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            # Cut after the key is taken out of it: half a key is a secret too.
            said = error.read(_MOST_BYTES).decode(errors="replace").strip()
            said = redacted(said, [self._key] if self._key else [])[:_SAID]
            words = f"status {error.code}" + (f": {said}" if said else "")
            raise (_Passing if error.code in _PASSING else Unanswered)(words) from None
        except TimeoutError:
            raise _Passing(f"no answer within {seconds:.3g} s") from None
        except urllib.error.URLError as error:
            raise _Passing(f"no connection: {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"the connection broke: {type(error).__name__}") from None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise Unanswered("it answered no JSON") from None


def read_passages(answer: Any) -> list[Passage]:
    """The passages of an answer in one of the known forms; Unanswered for any other."""
    rows = answer.get("result", answer.get("results")) if isinstance(answer, dict) else answer
    if isinstance(rows, list) and len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]  # one list per query
    if not isinstance(rows, list):
        said = ", ".join(answer)[:_SAID] if isinstance(answer, dict) else type(answer).__name__
        raise Unanswered(f"it answered without `result` and `results` ({said})")
    documents = [row.get("document", row) if isinstance(row, dict) else row for row in rows]
    found = [Passage("", one) if isinstance(one, str) else _passage(one) for one in documents]
    return [one for one in found if one.text]


def _passage(document: Any) -> Passage:
    found = passage_of(document) if isinstance(document, dict) else None
    if found is None:
        raise Unanswered("it answered with a passage that has neither `contents` nor `text`")
    return found


class _Passing(Exception):
    """What may be over when it is tried again."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None

"""Passages from a retrieval server, or from a search service whose keys have a known form.

out:  {"queries": ["..."], "topk": 3, "return_scores": true}
back: {"result": [[{"document": {"contents": "..."}, "score": 0.9}, ...]]}, as Search-R1's server answers, or
      {"results": [{"title": "...", "text": "..."}, ...]} (`content` and `snippet` for `text` are read too)

A key goes out in a header, to the service whose form it has or to the server of `url`, and to no other. What may pass
is tried again (posting.py).
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from posttrain.conversations.tools.base import redacted
from posttrain.conversations.tools.search.corpus import Passage, passage_of
from posttrain.errors import UserError
from posttrain.posting import Patience, Refused, post_json
from posttrain.texts import mask_urls

ADDRESS = "SEARCH_API_URL"
"""The environment variable that names a server beside SEARCH_API_KEY."""


@dataclass(frozen=True)
class Service:
    """One way of asking for passages."""

    name: str
    url: str
    key_form: re.Pattern[str] | None
    body: Callable[[str, int], dict[str, Any]]
    headers: Callable[[str], dict[str, str]]
    rows: str
    """The field of an answer that holds the passages; empty for the forms of retrieval servers."""


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


RETRIEVAL = Service(
    "retrieval",
    "",
    None,
    lambda query, most: {"queries": [query], "topk": most, "return_scores": True},
    _bearer,
    "",
)
"""A server of one's own, as Search-R1's."""
TAVILY = Service(
    "tavily",
    "https://api.tavily.com/search",
    re.compile(r"tvly-[\w-]+"),
    lambda query, most: {"query": query, "max_results": most},
    _bearer,
    "results",
)
SERPER = Service(
    "serper",
    "https://google.serper.dev/search",
    re.compile(r"[0-9a-f]{40}"),
    lambda query, most: {"q": query, "num": most},
    lambda key: {"X-API-KEY": key},
    "organic",
)
SERVICES = {service.name: service for service in (RETRIEVAL, TAVILY, SERPER)}


def service_of_key(key: str) -> Service | None:
    """The service whose keys have this form; None if none is known."""
    return next((one for one in SERVICES.values() if one.key_form is not None and one.key_form.fullmatch(key)), None)


_PATIENCE = Patience(attempts=3, pause_s=0.2, total_s=30.0)
_SAID = 200


class Unanswered(Exception):
    """The server gave no passages; says why, without the key."""


class Server:
    """Asks one server. UserError for an address that is none."""

    def __init__(self, url: str, api_key: str = "", service: Service = RETRIEVAL) -> None:
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
        self._url, self._key, self._service = url, api_key, service

    def best(self, query: str, most: int) -> list[Passage]:
        """The passages that the server finds; Unanswered if it does not say."""
        body = json.dumps(self._service.body(query, most)).encode()
        headers = self._service.headers(self._key)
        try:
            answer = post_json(self._url, body, headers, _PATIENCE, clean=self._without_key)
            return read_passages(answer, self._service.rows)[:most]
        except (Refused, Unanswered) as error:
            raise Unanswered(self._without_key(mask_urls(str(error)))) from None

    def _without_key(self, text: str) -> str:
        return redacted(text, [self._key] if self._key else [])


def read_passages(answer: Any, field: str = "") -> list[Passage]:
    """The passages of an answer, under `field` or in one of the known forms; Unanswered for any other."""
    if field and isinstance(answer, dict):
        rows = answer.get(field, [])  # a service without a hit leaves it out
    else:
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

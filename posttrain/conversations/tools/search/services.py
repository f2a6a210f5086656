"""Search services that a key alone tells: their addresses, and how each is asked and answers.

A key is sent to the service whose form it has, and to no other: a key of unknown form needs `url` (or `provider`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """The field of an answer that holds the passages; empty for the forms that `server.py` knows."""


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

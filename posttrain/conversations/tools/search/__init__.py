"""The tool `search`: a local index by BM25, a retrieval server, or a search service whose keys have a known form.

A server is sent and answers:

out:  {"queries": ["..."], "topk": 3, "return_scores": true}
back: {"result": [[{"document": {"contents": "..."}, "score": 0.9}, ...]]}, as Search-R1's server answers, or
      {"results": [{"title": "...", "text": "..."}, ...]} (`content` and `snippet` for `text` are read too)

A key goes out in a header, to the service whose form it has or to the server of `url`, and to no other. What may pass
is tried again (posting.py).
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from posttrain.conversations.tools.base import Tool, ToolAnswer, ToolFault, redacted
from posttrain.conversations.tools.schema import PLACE, schema_of
from posttrain.conversations.tools.search.corpus import EMBEDDED, Passage, passage_of, passages, read_corpus
from posttrain.conversations.tools.threads import Threads
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


_MOST = 20
_SETTINGS = (
    f"{PLACE}.search.corpus=FILE (.jsonl, .json, .parquet, .txt, or a folder of text files), "
    f"{PLACE}.search.corpus=embedded (a few facts, to try it), or {PLACE}.search.url=http://HOST/retrieve (a server)"
)
_FOR_A_KEY = (
    f"{PLACE}.search.url=http://HOST/retrieve or the environment variable {ADDRESS} (the server that the key is for), "
    f"{PLACE}.search.provider=tavily or serper (the service that gave it), or, without a server, "
    f"{PLACE}.search.corpus=FILE"
)


class SearchTool(Tool):
    """With `url` a server is asked, unless `api_key` is given and empty; otherwise an index over `corpus`.

    An `api_key` without `url` is for the server of the environment variable SEARCH_API_URL, else for the service
    (`provider`: tavily, serper) whose keys have its form."""

    name = "search"
    isolated = False  # its waits have deadlines, and all workers would have a copy of the index

    def __init__(
        self,
        corpus: str | None = None,
        url: str | None = None,
        api_key: str | None = None,
        provider: str | None = None,
    ) -> None:
        self.schema = schema_of(self.search, self.name)
        keyless = api_key is not None and not api_key.strip()
        service = _service(provider, None if url or corpus else api_key)
        url = url or (os.environ.get(ADDRESS) if api_key and not keyless and not corpus else None) or service.url
        if not corpus and not url and not keyless:
            if api_key:
                what, do = "a key of no service that is known by its keys' form, but no url", _FOR_A_KEY
            else:
                what, do = "neither a corpus nor a server", _SETTINGS
            raise UserError(f"the tool search was given {what}.\n  to do:  {do}")
        self.secrets = [api_key] if api_key and not keyless else []
        self._threads, self._server, self._local = Threads(), None, None
        if url and not keyless:
            self._server = _answering(Server(url, api_key or "", service))
            self.note = f"search asks {self._server.shown}" + (f"; the corpus {corpus} is not used" if corpus else "")
            return
        self._local = _Local(corpus or EMBEDDED)
        self.note = f"search uses {self._local}"
        if keyless:
            self.note = f"{PLACE}.search.api_key is empty: {self.note}" + (", and no server" if url else "")

    async def call(self, conversation: Hashable, arguments: dict[str, Any]) -> str | ToolAnswer:
        return await self.search(**arguments)

    async def search(self, query: str, top_k: int = 3) -> str | ToolAnswer:
        """Searches a collection of texts and gives the passages that fit the query best.

        Args:
            query: What to look for: names and words that the passage should have
            top_k: How many passages to give, at most 20
        """
        if not query.strip() or not 1 <= top_k <= _MOST:
            raise ToolFault(f"A query has words, and top_k is from 1 to {_MOST}.")
        try:
            found = await self._threads.run((self._server or self._local).best, query, top_k)  # pyright: ignore
        except Unanswered as error:
            return ToolAnswer("The search did not work: its server gave no passages.", error=f"server: {error}")
        return shown(found)


def _service(provider: str | None, key: str | None) -> Service:
    """The service by its name, else by the form of the key; a server of one's own otherwise."""
    if provider is not None and provider not in SERVICES:
        names = ", ".join(SERVICES)
        raise UserError(
            f"the tool search was given provider={provider}.\n  to do:  {PLACE}.search.provider is one of {names}"
        )
    if provider is not None:
        return SERVICES[provider]
    own_server = os.environ.get(ADDRESS)
    return RETRIEVAL if own_server or not key else service_of_key(key.strip()) or RETRIEVAL


def shown(found: list[Passage]) -> str:
    """Passages as the model sees them, numbered."""
    return "\n\n".join(f"[{n}] {one}" for n, one in enumerate(found, 1)) or "Nothing was found. Try other words."


class _Local:
    def __init__(self, corpus: str) -> None:
        from posttrain.conversations.tools.search.bm25 import BM25  # numpy, which only the index needs

        self._passages = passages() if corpus == EMBEDDED else read_corpus(corpus)
        self._index = BM25([f"{one.title} {one.text}" for one in self._passages])
        self._name = "the embedded facts" if corpus == EMBEDDED else corpus

    def __str__(self) -> str:
        return f"a local index over {len(self._passages):,} passages of {self._name}"

    def best(self, query: str, most: int) -> list[Passage]:
        return [self._passages[place] for place, _ in self._index.best(query, most)]


def _answering(server: Server) -> Server:
    """The server, asked once: a wrong address or key is said before a run, not by every call."""
    try:
        server.best("test", 1)
    except Unanswered as error:
        raise UserError(
            f"the search server {server.shown} gives no passages: {error}\n"
            f"  to do:  start it, or correct {PLACE}.search.url or .api_key; without them: {PLACE}.search.corpus=FILE"
        ) from None
    return server

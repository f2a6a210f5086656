"""The tool `search`: a local index by BM25, or a retrieval server."""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

from posttrain.conversations.tools.base import Tool, ToolAnswer, ToolFault
from posttrain.conversations.tools.schema import PLACE, schema_of
from posttrain.conversations.tools.search.corpus import EMBEDDED, Passage, passages, read_corpus
from posttrain.conversations.tools.search.server import (
    ADDRESS,
    RETRIEVAL,
    SERVICES,
    Server,
    Service,
    Unanswered,
    service_of_key,
)
from posttrain.conversations.tools.threads import Threads
from posttrain.errors import UserError

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

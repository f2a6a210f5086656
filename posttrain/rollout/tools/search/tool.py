"""The tool `search`: a local index by BM25, or a retrieval server."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from posttrain.errors import UserError
from posttrain.rollout.tools.base import Tool, ToolAnswer, ToolFault
from posttrain.rollout.tools.schema import schema_of
from posttrain.rollout.tools.search.corpus import Passage, read_corpus
from posttrain.rollout.tools.search.facts import EMBEDDED, passages
from posttrain.rollout.tools.search.server import Server, Unanswered
from posttrain.rollout.tools.settings import PLACE
from posttrain.rollout.tools.threads import Threads

_MOST = 20
_SETTINGS = (
    f"{PLACE}.search.corpus=FILE (.jsonl, .json, .parquet, .txt, or a folder of text files), "
    f"{PLACE}.search.corpus=embedded (a few facts, to try it), or {PLACE}.search.url=http://HOST/retrieve (a server)"
)


class SearchTool(Tool):
    """With `url` a server is asked, unless `api_key` is given and empty; otherwise an index over `corpus`."""

    name = "search"

    def __init__(self, corpus: str | None = None, url: str | None = None, api_key: str | None = None) -> None:
        self.schema = schema_of(self.search, self.name)
        keyless = api_key is not None and not api_key.strip()
        if not corpus and not url and not keyless:
            what = "a key, which is for a server, but no url" if api_key else "neither a corpus nor a server"
            raise UserError(f"the tool search was given {what}.\n  to do:  {_SETTINGS}")
        self.secrets = [api_key] if api_key and not keyless else []
        self._threads, self._server, self._local = Threads(), None, None
        if url and not keyless:
            self._server = _answering(Server(url, api_key or ""))
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


def shown(found: list[Passage]) -> str:
    """Passages as the model sees them, numbered."""
    return "\n\n".join(f"[{n}] {one}" for n, one in enumerate(found, 1)) or "Nothing was found. Try other words."


class _Local:
    def __init__(self, corpus: str) -> None:
        from posttrain.rollout.tools.search.bm25 import BM25  # numpy, which only the index needs

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

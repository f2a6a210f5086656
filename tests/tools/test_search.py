"""The tool `search`: BM25 against its formula, corpora of every kind, servers, and a key that nobody sees."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from posttrain.conversations.tools.base import ToolAnswer, ToolCall, ToolFault
from posttrain.conversations.tools.registry import make_tools
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.conversations.tools.search import SearchTool
from posttrain.conversations.tools.search.bm25 import BM25, split_words
from posttrain.conversations.tools.search.corpus import Passage, facts, read_corpus
from posttrain.errors import UserError
from posttrain.posting import Patience

KEY = "hush-0123456789-abcdef"


def ask(tool: SearchTool, query: str, **more) -> str | ToolAnswer:
    return asyncio.run(tool.call("c", {"query": query, **more}))


def plain_bm25(passages: list[str], query: str) -> list[float]:
    """The formula, word by word."""
    bags = [Counter(split_words(passage)) for passage in passages]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = []
    for bag in bags:
        score = 0.0
        for word in set(split_words(query)):
            having = sum(word in other for other in bags)
            idf = math.log(1 + (len(bags) - having + 0.5) / (having + 0.5))
            score += idf * bag[word] * 2.2 / (bag[word] + 1.2 * (0.25 + 0.75 * bag.total() / mean)) if bag[word] else 0
        scores.append(score)
    return scores


PASSAGES = [
    "The heron eats fish, fish and fish.",
    "A fish",
    "",
    "the THE the heron",
    "Nothing_here",
    "東京は日本の首都",
]


@pytest.mark.parametrize("query", ["the fish", "heron", "fish heron fish", "nothing", "日本", "absent", ""])
def test_scores_are_those_of_the_formula(query):
    expected = plain_bm25(PASSAGES, query)
    found = BM25(PASSAGES).best(query, 10)
    assert dict(found) == pytest.approx({n: score for n, score in enumerate(expected) if score > 0}, rel=1e-5)
    assert [place for place, _ in found] == sorted(dict(found), key=lambda place: -expected[place])


def test_equal_passages_come_in_their_order_however_many_there_are():
    index = BM25(["other words"] + ["the same words"] * 50 + ["same"])
    assert [place for place, _ in index.best("same", 4)] == [51, 1, 2, 3]
    assert BM25([]).best("x", 3) == []


def test_every_question_about_the_embedded_facts_finds_its_answer():
    tool = SearchTool(corpus="embedded")
    assert len(facts()) == 40 and "40 passages" in tool.note
    for fact in facts():
        said = ask(tool, fact.question)
        assert isinstance(said, str) and said.startswith("[1] ") and fact.answer in said, fact
    assert str(ask(tool, "capital of Brenna", top_k=1)).count("[") == 1
    assert ask(tool, "xyzzy") == "Nothing was found. Try other words."


@pytest.mark.parametrize("arguments", [{"query": " "}, {"query": "x", "top_k": 0}, {"query": "x", "top_k": 21}])
def test_a_query_without_words_and_a_wrong_count_are_told_to_the_model(arguments):
    with pytest.raises(ToolFault, match="top_k is from 1 to 20"):
        asyncio.run(SearchTool(corpus="embedded").call("c", arguments))


def test_corpora_of_every_kind_are_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": "0", "contents": '"Rome"\nA city.'}, {"title": "Po", "text": "A river."}]
    expected = [Passage("Rome", "A city."), Passage("Po", "A river.")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    columns = {"title": [None, "Po"], "contents": [rows[0]["contents"], "A river."], "more": [1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    for kind in ("jsonl", "json", "parquet"):
        assert read_corpus(str(tmp_path / f"a.{kind}")) == expected
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "deep" / "Rome.txt").write_text("A city.\n\nOld.\n")
    (tmp_path / "texts" / "Po.md").write_text("A river.")
    folder = read_corpus(str(tmp_path / "texts"))
    assert folder == [Passage("Po", "A river."), Passage("Rome", "A city."), Passage("Rome", "Old.")]
    assert read_corpus(str(tmp_path / "texts" / "deep" / "Rome.txt")) == [Passage("", "A city."), Passage("", "Old.")]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("gone.txt", None, "does not exist"),
        ("empty.txt", "\n\n", "has no passages"),
        ("odd.csv", "a,b", "of no kind that is known"),
        ("bad.jsonl", '{"text": "a"}\n{"text"\n', "no JSON in line 2"),
        ("rows.jsonl", '{"text": "a"}\n{"body": "b"}\n', "row 2 of the corpus .* has no text"),
        ("bad.parquet", "no parquet", "is no parquet file"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_said_in_words(tmp_path, name, text, why):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=why):
        make_tools(["search"], {"search": {"corpus": str(tmp_path / name)}})


@pytest.fixture(scope="module")
def server():
    """A retrieval server whose path says how it answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            this.seen.append((self.path, asked, self.headers.get("Authorization")))
            said = {
                "/retrieve": {"result": [[{"document": {"contents": '"Rome"\nA city.'}, "score": 0.9}] * 9]},
                "/plain": {"results": [{"title": "Po", "snippet": "A river."}, {"content": "Old."}]},
                "/odd": {"answers": []},
                "/leak": {"results": [{"title": "Key", "text": f"you sent {KEY}"}]},
            }.get(self.path.partition("?")[0])
            status = 200
            if self.path == "/refuse":
                status, said = 403, "x" * 190 + f" {self.headers['Authorization']} is not allowed"
            elif self.path == "/elsewhere":
                status, said = 302, ""
            elif self.path == "/busy":
                status, said = (503, "later") if len([one for one in this.seen if one[0] == "/busy"]) % 2 else (200, [])
                said = said if status == 503 else {"results": []}
            elif said is None:
                status, said = 404, "nothing here"
            body = json.dumps(said).encode() if status == 200 else str(said).encode()
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/retrieve")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            this.seen.append((self.path, "followed", self.headers.get("Authorization")))
            self.send_error(404)

        def log_message(self, *_):
            pass

    this = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    this.seen = []
    this.url = f"http://127.0.0.1:{this.server_address[1]}"
    threading.Thread(target=this.serve_forever, args=(0.02,), daemon=True).start()
    yield this
    this.shutdown()
    this.server_close()


def test_a_server_is_asked_as_search_r1_asks_and_both_forms_of_answers_are_read(server):
    tool = SearchTool(url=f"{server.url}/retrieve")
    assert ask(tool, "Rome", top_k=2) == "[1] Rome\nA city.\n\n[2] Rome\nA city."
    assert server.seen[-1] == ("/retrieve", {"queries": ["Rome"], "topk": 2, "return_scores": True}, None)
    assert ask(SearchTool(url=f"{server.url}/plain"), "Po") == "[1] Po\nA river.\n\n[2] Old."
    assert ask(SearchTool(url=f"{server.url}/busy"), "Po") == "Nothing was found. Try other words.", "tried again"


def test_the_server_receives_the_key_and_nobody_else_sees_it(server):
    settings = {"search": {"url": f"{server.url}/leak?key={KEY}", "api_key": KEY}}
    tools = make_tools(["search"], settings)
    with ToolRunner(tools, timeout_s=20, max_chars=1000, side="left") as runner:
        (answer,) = runner.answer("c", [ToolCall("search", {"query": "x"})]).result()
    assert server.seen[-1][2] == f"Bearer {KEY}"
    assert answer.text == "[1] Key\nyou sent ***"
    assert KEY not in repr(tools["search"]) + tools["search"].note + str(tools["search"].schema)


@pytest.mark.parametrize("path", ["/refuse", "/elsewhere", "/odd", "/gone"])
def test_a_server_that_gives_nothing_is_refused_before_a_run_without_its_key(server, path):
    before = len(server.seen)
    with pytest.raises(UserError, match=r"the search server http://127.0.0.1.* gives no passages: ") as caught:
        SearchTool(url=f"{server.url}{path}", api_key=KEY)
    assert KEY[:6] not in str(caught.value) and "to do:" in str(caught.value)
    assert [one[0] for one in server.seen[before:]] == [path], (
        "a redirect, which would carry the key on, is not followed"
    )


def test_a_server_that_ends_during_a_run_gives_an_answer_that_says_so(server, monkeypatch):
    monkeypatch.setattr("posttrain.conversations.tools.search._PATIENCE", Patience(3, 0.001, 30.0))
    tool = SearchTool(url=f"{server.url}/plain", api_key=KEY)
    tool._server._url = "http://127.0.0.1:9/gone"
    answer = ask(tool, "x")
    assert isinstance(answer, ToolAnswer) and answer.text.startswith("The search did not work")
    assert "tried 3 times" in (answer.error or "")


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://host/x", "host/retrieve", "http://me:pass@host/x", "http://"]
)
def test_only_plain_http_addresses_are_taken(url):
    with pytest.raises(UserError, match=r"http|has a user in it") as caught:
        SearchTool(url=url)
    assert "pass@" not in str(caught.value)


def test_an_empty_key_means_the_local_index_with_a_note(tmp_path):
    (tmp_path / "a.txt").write_text("Rome is old.")
    tool = SearchTool(url="http://nobody.invalid/x", corpus=str(tmp_path / "a.txt"), api_key="")
    assert ask(tool, "Rome") == "[1] Rome is old."
    assert "api_key is empty" in tool.note and "local index over 1 passages" in tool.note and "no server" in tool.note
    assert "embedded facts" in make_tools(["search"], {"search": {"api_key": ""}})["search"].note


@pytest.mark.parametrize(
    ("settings", "what"), [({}, "neither a corpus nor a server"), ({"api_key": KEY}, "but no url")]
)
def test_without_corpus_and_server_search_is_refused_in_words_that_say_how_to_give_one(settings, what, monkeypatch):
    monkeypatch.delenv("SEARCH_API_URL", raising=False)
    with pytest.raises(UserError, match=what) as caught:
        make_tools(["search"], {"search": settings})
    assert (
        "search.corpus=FILE" in str(caught.value)
        and "search.url=" in str(caught.value)
        and KEY not in str(caught.value)
    )


def test_a_key_alone_goes_to_the_server_that_the_environment_names(server, monkeypatch):
    monkeypatch.setenv("SEARCH_API_URL", f"{server.url}/plain")
    tool = make_tools(["search"], {"search": {"api_key": KEY}})["search"]
    assert ask(tool, "Po") == "[1] Po\nA river.\n\n[2] Old." and server.seen[-1][2] == f"Bearer {KEY}"
    assert f"search asks {server.url}/plain" in tool.note
    assert "local index" in SearchTool(corpus="embedded", api_key=KEY).note, "a corpus is what was asked for"
    assert "local index" in SearchTool(api_key="").note, "an empty key is for no server"


@pytest.mark.parametrize(
    ("key", "provider", "path", "body", "header"),
    [
        (
            "tvly-dev-0aB9",
            None,
            "/tavily",
            {"query": "Po", "max_results": 3},
            ("Authorization", "Bearer tvly-dev-0aB9"),
        ),
        ("0123456789abcdef" * 2 + "01234567", None, "/serper", {"q": "Po", "num": 3}, ("X-API-KEY", "{key}")),
        ("of-another-form", "serper", "/serper", {"q": "Po", "num": 3}, ("X-API-KEY", "{key}")),
    ],
)
def test_a_key_alone_is_sent_to_the_service_that_gave_it(
    service_server, monkeypatch, key, provider, path, body, header
):
    """The services' addresses are the stand-in's; how they are asked and answer is theirs."""
    from dataclasses import replace

    from posttrain.conversations.tools.search import SERVICES

    monkeypatch.delenv("SEARCH_API_URL", raising=False)
    for name in ("tavily", "serper"):
        known = SERVICES[name]
        monkeypatch.setitem(SERVICES, name, replace(known, url=f"{service_server.url}/{name}"))
    tool = make_tools(["search"], {"search": {"api_key": key} | ({"provider": provider} if provider else {})})["search"]
    assert ask(tool, "Po") == "[1] Po\nA river."
    assert service_server.seen[-1][:2] == (path, body)
    assert service_server.seen[-1][2][header[0].lower()] == header[1].format(key=key)
    assert key not in tool.note + repr(tool)


def test_an_unknown_provider_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="one of retrieval, tavily, serper"):
        make_tools(["search"], {"search": {"api_key": KEY, "provider": "bong"}})


@pytest.fixture
def service_server():
    """Answers as Tavily and Serper do."""
    row = {"title": "Po", "url": "http://x", "link": "http://x"}
    answers = {
        "/tavily": {"query": "q", "results": [row | {"content": "A river.", "score": 0.9}]},
        "/serper": {"searchParameters": {"q": "q"}, "organic": [row | {"snippet": "A river.", "position": 1}]},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            this.seen.append((self.path, sent, {name.lower(): value for name, value in self.headers.items()}))
            body = json.dumps(answers[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    this = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    this.seen = []
    this.url = f"http://127.0.0.1:{this.server_address[1]}"
    threading.Thread(target=this.serve_forever, args=(0.02,), daemon=True).start()
    yield this
    this.shutdown()
    this.server_close()

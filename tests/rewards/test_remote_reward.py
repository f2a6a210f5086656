"""Rewards behind a URL: batches out, scores back, what passes is tried again, what remains is recorded."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from posttrain.config.rollout import CustomRewardConfig
from posttrain.posting import Patience, Refused, post_json
from posttrain.rewards import RewardError, RewardItem, RewardPool, resolve_reward


class Scores(BaseHTTPRequestHandler):
    seen: ClassVar[list[dict]] = []

    def do_POST(self):
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rows"]
        said = [row["solution_str"] for row in rows]
        type(self).seen.append({"rows": rows, "token": self.headers.get("Authorization")})
        tries = sum(said == [row["solution_str"] for row in call["rows"]] for call in self.seen)
        status, body = 200, json.dumps({"scores": [{"score": len(text), "acc": 1} for text in said]})
        if "busy once" in said and tries == 1:
            status = 503
        if "refused" in said:
            status, body = 400, "no such task"
        if "too few" in said:
            body = "[]"
        if "nan" in said:
            body = '{"scores": [NaN]}'
        if "huge" in said:
            body = '{"scores": [1' + "0" * 5000 + "]}"
        if "words" in said:
            body = "<html>"
        if "moved" in said:
            status = 302
        if "slow" in said:
            time.sleep(1.0)
        with contextlib.suppress(BrokenPipeError):  # whoever asked has given up
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body.encode())

    def do_GET(self):
        type(self).seen.append({"rows": [], "token": self.headers.get("Authorization")})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[1.0]")

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Scores) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/score"
        server.shutdown()
        thread.join()


def scored(url, texts, *, group=None, timeout_s=5.0, **kwargs):
    spec = resolve_reward(CustomRewardConfig(path=url, reward_kwargs=kwargs))
    with RewardPool(spec, num_workers=1, failure_score=-1.0, timeout_s=timeout_s) as pool:
        for key, text in enumerate(texts):
            pool.submit(key, RewardItem("mine", text, ["a", 1], {"n": key}, group=group, group_size=len(texts)))
        results = pool.wait_all()
    return [results[key] for key in range(len(texts))]


def test_a_group_goes_out_in_one_request_and_comes_back_with_parts(server, monkeypatch):
    monkeypatch.setenv("SCORES_KEY", "abc")
    results = scored(server, ["a", "bb", "ccc"], group="g", token_env="SCORES_KEY")
    assert [(result.score, result.parts) for result in results] == [(n, {"acc": 1.0}) for n in (1.0, 2.0, 3.0)]
    call = Scores.seen[-1]
    assert call["token"] == "Bearer abc" and len(call["rows"]) == 3
    row = {"data_source": "mine", "solution_str": "bb", "ground_truth": ["a", 1], "extra_info": {"n": 1}}
    assert call["rows"][1] == row


def test_what_passes_is_tried_again_and_the_rest_is_recorded(server):
    texts = ["busy once", "refused", "too few", "nan", "words", "huge", "fine"]
    results = scored(server, texts)
    errors = [result.error for result in results]
    assert errors[0] is None and errors[6] is None and results[6].score == 4.0
    parts = ["status 400 Bad Request: no such task", "0 scores for 1", "nan", "no JSON", "inf"]
    for error, part in zip(errors[1:6], parts, strict=True):
        assert error is not None and part in error and server in error
    assert [result.score for result in results[1:6]] == [-1.0] * 5


def test_a_redirect_which_would_carry_the_key_on_and_leave_the_rows_behind_is_not_followed(server, monkeypatch):
    monkeypatch.setenv("SCORES_KEY", "abc")
    (result,) = scored(server, ["moved"], token_env="SCORES_KEY")
    assert result.score == -1.0 and "status 302" in result.error
    assert Scores.seen[-1]["rows"], "nothing was asked of the other place"


def test_a_slow_server_is_given_up_before_the_deadline_of_the_score(server):
    (result,) = scored(server, ["slow"], timeout_s=30.0, attempt_s=0.2, attempts=2)
    assert result.score == -1.0 and "no answer within 0.2 s (tried 2 times)" in result.error


def test_a_server_that_goes_away_is_a_recorded_failure_and_one_that_never_was_stops_the_run():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    with pytest.raises(RewardError, match=r"does not answer: no connection(.|\n)*set in: custom(.|\n)*start it"):
        resolve_reward(CustomRewardConfig(path=url, reward_kwargs={"attempts": 1}))
    from posttrain.rewards.remote import Remote

    ((score, _, error),) = Remote(url, attempts=2, pause_s=0.01)([("", "x", "", None, 1, None)])
    assert score == 0.0 and "no connection" in error and "tried 2 times" in error


def test_unknown_settings_of_a_url_are_refused(server):
    with pytest.raises(RewardError, match="attempts, attempt_s"):
        resolve_reward(CustomRewardConfig(path=server, reward_kwargs={"retry": 1}))


def test_credentials_in_an_address_are_used_and_shown_nowhere(server, tmp_path):
    """Not in the label, not in errors that samples keep, not in the stored settings, not in `posttrain config`."""
    from posttrain.config import load_config
    from posttrain.texts import redact

    url = server.replace("://", "://anna:s%40cret@") + "?api_key=hidden1&task=sums"
    spec = resolve_reward(CustomRewardConfig(path=url))
    masked = server.replace("://", "://***@") + "?api_key=***&task=sums"
    assert spec.label == masked
    with RewardPool(spec, num_workers=1) as pool:
        for key, text in enumerate(("fine", "refused")):
            pool.submit(key, RewardItem("", text, ""))
        results = pool.wait_all()
    assert results[0].score == 4.0 and results[0].error is None
    assert Scores.seen[-1]["token"] == "Basic YW5uYTpzQGNyZXQ="  # anna:s@cret
    assert results[1].error is not None and results[1].error.startswith(masked)
    settings = load_config([f"custom_reward_function.path={url}"])
    texts = [settings.describe(), settings.to_yaml(), str(redact(settings.config.to_dict())), str(results[1].error)]
    assert [text for text in texts if "cret" in text or "hidden1" in text] == [] and all("***@" in t for t in texts)


def test_an_address_that_does_not_answer_is_named_without_its_credentials():
    config = CustomRewardConfig(path="http://anna:secret@127.0.0.1:9/x?token=abc", reward_kwargs={"attempts": 1})
    with pytest.raises(RewardError) as caught:
        resolve_reward(config)
    assert "http://***@127.0.0.1:9/x?token=***" in str(caught.value)
    assert "secret" not in str(caught.value) and "abc" not in str(caught.value)


@pytest.fixture
def drips():
    """A server that sends what it is told to, a few bytes at a time with pauses; gives (url, what it sends)."""
    sent = {"head": b"", "dripped": b"", "pause": 0.0}

    def serve(listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection):
        with connection, contextlib.suppress(OSError):
            asked = b""
            while not asked.endswith(b"}"):  # whole: a socket that is closed with something unread breaks the answer
                asked += connection.recv(1 << 16)
            connection.sendall(sent["head"])
            for at in range(0, len(sent["dripped"]), 4):
                time.sleep(sent["pause"])
                connection.sendall(sent["dripped"][at : at + 4])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/score", sent


OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
WHERE = {
    "in its body": (OK, b'{"scores": [0.5]}'),
    "in its headers": (b"HTTP/1.1 200 OK\r\n", b"X: yyyyyyyyyyyyyyyyy\r\n\r\n[0.5]"),
    "in the body of an error": (b"HTTP/1.1 400 Bad\r\n\r\n", b"no such task, of any kind"),
    "before anything": (b"", b"HTTP/1.1 200 OK\r\n\r\n[0.5]"),
}


@pytest.mark.parametrize("where", WHERE)
def test_a_server_that_never_stops_sending_for_long_is_late_when_the_whole_request_is(drips, where):
    """No single pause is long. Every attempt, and all of them together, end in time."""
    url, sent = drips
    sent["head"], sent["dripped"] = WHERE[where]
    sent["pause"] = 0.2
    with pytest.raises(Refused, match=r"no answer within 0\.[0-9]+ s$"):
        post_json(url, b"{}", {}, Patience(attempts=1, pause_s=0.01, total_s=0.5))
    with pytest.raises(Refused, match=r"no answer within 0\.1 s \(tried 3 times\)"):
        post_json(url, b"{}", {}, Patience(attempts=3, pause_s=0.01, total_s=60.0, attempt_s=0.1))
    sent["pause"] = 0.001
    if where == "in the body of an error":
        with pytest.raises(Refused, match="status 400 Bad: no such task, of any kind"):
            post_json(url, b"{}", {}, Patience(1, 0.01, 60.0))
    else:
        answer = post_json(url, b"{}", {}, Patience(1, 0.01, 60.0))
        assert answer in ([0.5], {"scores": [0.5]}), "slowly, and in time"


def test_a_reward_server_that_drips_gives_its_rows_an_error(drips):
    url, sent = drips
    sent["head"], sent["dripped"] = WHERE["in its body"]
    sent["pause"] = 0.3
    (result,) = scored(url, ["a"], timeout_s=0.9, attempts=1)
    assert result.score == -1.0 and "no answer within 0.81 s" in result.error

"""One program for all samples of a run, and the HTTP processes that serve it."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("aiohttp")
from posttrain.conversations import programs
from posttrain.conversations.settings import AgentSettings
from tests.serving.program_runs import TWO_TURNS, conversations

RUN_HEADER = """
import json, os, sys, time, urllib.error, urllib.request
run = os.environ["POSTTRAIN_RUN_URL"]

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["POSTTRAIN_API_KEY"]}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

def claim():
    while (found := post(run + "/s/next", {}))["id"] is None:
        time.sleep(0.02)
    return found

def play(found, reward):
    # One address for all samples: the request names its own as the model.
    body = {"model": found["id"], "messages": found["task"]["messages"]}
    post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    post(run + "/s/" + found["id"] + "/reward", {"reward": reward})
"""


def test_a_program_of_the_run_is_started_once_and_plays_all_samples(tmp_path):
    starts = tmp_path / "starts"
    code = f"""
open({str(starts)!r}, "a").write("x")
while True:
    found = claim()
    play(found, found["task"]["index"])
"""
    with conversations(tmp_path, code, count=4, header=RUN_HEADER, program_per="run") as (_, records, _, _):
        assert [record.score for record in records] == [0.0, 1.0, 2.0, 3.0]
        assert all(sum(row.mask) == 2 for record in records for row in record.rows)
    assert starts.read_text() == "x"


def test_http_processes_share_the_samples_and_forward_what_comes_to_the_address_of_the_run(tmp_path):
    """Every sample is played once by its own address, and once by the run's; half of them are another process's."""
    seen = tmp_path / "seen"
    code = f"""
def error_of(url, body):
    try:
        return post(url, body)
    except urllib.error.HTTPError as error:
        return error.code

while True:
    found = claim()
    base = found["base_url"].removesuffix("/v1")
    assert error_of(run + "/s/nosuch/reward", {{"reward": 1}}) == 404
    first = {{"messages": found["task"]["messages"], "stream": True}}
    headers = {{"Authorization": "Bearer " + os.environ["POSTTRAIN_API_KEY"]}}
    where = f"{{run}}/s/{{found['id']}}/v1/chat/completions?by=path"
    asked = urllib.request.Request(where, json.dumps(first).encode(), headers)
    streamed = urllib.request.urlopen(asked).read().decode()
    headers["Authorization"] += "x"
    try:
        urllib.request.urlopen(urllib.request.Request(where, json.dumps(first).encode(), headers))
    except urllib.error.HTTPError as error:
        assert error.code == 401
    open({str(seen)!r}, "a").write(json.dumps([base.removesuffix("/s/" + found["id"]), run, streamed[-14:]]) + "\\n")
    play(found, found["task"]["index"])
"""
    settings = {"header": RUN_HEADER, "program_per": "run", "http_processes": 2}
    with conversations(tmp_path, code, count=4, **settings) as (_, records, _, _):
        assert [record.score for record in records] == [0.0, 1.0, 2.0, 3.0]
        assert all(record.facts["requests"] == 2 for record in records)
    rows = [json.loads(line) for line in seen.read_text().splitlines()]
    assert (
        sorted(url == run for url, run, _ in rows) == [False, False, True, True] and len({row[0] for row in rows}) == 2
    )
    assert {end for _, _, end in rows} == {"data: [DONE]\n\n"}


@pytest.mark.parametrize(
    ("cores", "settings", "count"),
    [(2, {"program": "x"}, 1), (16, {"program": "x"}, 4), (16, {"program": "outside"}, 1),
     (2, {"program": "outside", "http_processes": 3}, 3)],
)  # fmt: skip
def test_the_number_of_http_processes_follows_the_cores(cores, settings, count, monkeypatch):
    monkeypatch.setattr("posttrain.cores.usable", lambda: cores)
    assert AgentSettings(**settings).count_http_processes() == count


def test_http_processes_listen_at_ports_one_after_another(tmp_path, monkeypatch):
    listen, asked = programs.listen, []
    monkeypatch.setattr(programs, "listen", lambda host, port: (asked.append(port), listen(host, 0))[1])
    for port, count in ((7001, 3), (0, 2)):
        with conversations(tmp_path, TWO_TURNS, port=port, http_processes=count) as (_, (record,), _, _):
            assert record.score == 1.0
    assert asked == [7001, 7002, 7003, 0, 0]


def test_a_program_of_the_run_that_ends_costs_the_samples_it_had_and_is_started_again(tmp_path):
    code = "for number in range(2):\n    play(claim(), 1.0)\nclaim()\nraise ValueError('two are enough')\n"
    with conversations(tmp_path, code, count=4, header=RUN_HEADER, program_per="run") as (_, records, _, _):
        scores, errors = [record.score for record in records], [record.error for record in records]
        # The third is lost with the program. The fourth is played by the program's second start.
        assert scores.count(1.0) == 3 and sum("two are enough" in (error or "") for error in errors) == 1


def test_a_program_of_the_run_has_no_more_memory_than_it_may(tmp_path):
    code = "found = claim(); x = bytearray(3 * 2**30); play(found, 1.0)"
    settings = {"header": RUN_HEADER, "program_per": "run", "memory_gb": 1.0}
    with conversations(tmp_path, code, **settings) as (_, (record,), _, _):
        assert "MemoryError" in record.error


@pytest.mark.parametrize(
    ("code", "why"),
    [("raise ValueError('no such model')", "no such model"), ("time.sleep(600)", "asked for no sample")],
)
def test_a_program_of_the_run_that_cannot_play_fails_the_samples_instead_of_the_wait(tmp_path, code, why):
    settings = {"header": RUN_HEADER, "program_per": "run", "timeout_s": 2.0}
    with conversations(tmp_path, code, count=2, **settings) as (_, records, _, _):
        assert all(why in record.error for record in records)


def test_a_program_may_say_that_a_sample_failed(tmp_path):
    code = "post(run + '/s/' + claim()['id'] + '/end', {'error': 'the browser is gone'})\ntime.sleep(600)\n"
    with conversations(tmp_path, code, header=RUN_HEADER, program_per="run") as (_, (record,), _, _):
        assert "the browser is gone" in record.error

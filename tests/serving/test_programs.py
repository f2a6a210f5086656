"""Programs that lead conversations by their base URL: each costs its own sample at most."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
from posttrain.conversations import program_process, programs
from posttrain.conversations.program_process import Program
from posttrain.errors import UserError
from tests.serving.program_runs import TWO_TURNS, conversations
from tests.serving.scripted_server import END, ScriptedEngine


def test_the_turns_of_a_program_are_one_row_of_the_very_tokens_that_were_sampled(tmp_path):
    with conversations(tmp_path, TWO_TURNS, count=3) as (whole, records, engine, _):
        for output, record in zip(whole, records, strict=True):
            (row,) = record.rows
            assert record.score == 1.0 and record.error is None and record.turns == 2
            sampled = [id for id, own in zip(output.token_ids, output.written, strict=True) if own]
            end = engine.tokenizer.convert_tokens_to_ids(END)
            assert sampled == [16, end, 17, end]
            own = [request for request in engine.seen if request.id[0] == record.key[0]]
            assert list(own[1].prompt_ids) == row.ids[: len(own[1].prompt_ids)] and own[1].parent == own[0].id
            assert record.facts["requests"] == 2 and record.facts["changed"] == 0


def test_with_stripped_thinking_a_turn_is_a_row_behind_the_words_of_those_before(tmp_path):
    code = """
messages = task["messages"]
for number in range(3):
    messages += [ask(messages), {"role": "user", "content": "again"}]
give(float(len(messages)))
"""
    template = (Path(__file__).parents[1] / "tools/real_templates/Qwen-Qwen3-0.6B.jinja").read_text()

    def says(text: str, seed: int) -> str:
        return f"<think>\nhm\n</think>\n\n{text.count('<|im_start|>assistant')}{END}"

    how = {"says": says, "template": template, "turns": {"thinking_in_history": "strip"}}
    with conversations(tmp_path, code, **how) as (_, (record,), engine, _):
        assert (record.score, record.error, record.turns, record.facts["changed"]) == (7.0, None, 3, 0)
        assert [record.parent_row(row)[0] for row in record.rows] == [None, 0, 1]
        one = len(engine.tokenizer(says("", 0), add_special_tokens=False)["input_ids"])
        assert [sum(row.mask) for row in record.rows] == [one] * 3, "each token is trained once"
        for row, request in zip(record.rows, engine.seen, strict=True):
            assert row.ids == [*request.prompt_ids, *row.ids[-one:]] and row.mask[-one:] == [True] * one
            assert "<think>" not in engine.tokenizer.decode(list(request.prompt_ids))


def test_sub_agents_and_compaction_are_rows_of_one_sample(tmp_path):
    code = """
messages = task["messages"]
messages.append(ask(messages))
ask([{"role": "system", "content": "You are another."}, {"role": "user", "content": "help"}])
ask([{"role": "user", "content": "In short: hello"}])
give(0.5)
"""
    with conversations(tmp_path, code) as (_, (record,), _, _):
        assert len(record.rows) == 3 and record.score == 0.5
        assert sum(sum(row.mask) for row in record.rows) == 6  # three turns of two tokens: each is trained once


def test_candidates_that_were_not_taken_are_not_trained(tmp_path):
    code = """
body = {"model": "m", "messages": task["messages"], "n": 3}
taken = post("/chat/completions", body)["choices"][2]["message"]
ask([*task["messages"], taken, {"role": "user", "content": "more"}])
"""
    with conversations(tmp_path, code) as (_, (record,), engine, _):
        # All three say the same, so that the first is the one that is continued.
        assert len(engine.seen) == 4 and sum(sum(row.mask) for row in record.rows) == 4


def test_a_reward_may_be_posted_and_else_it_is_the_reward_functions(tmp_path):
    code = "ask(task['messages']); post('/reward', {'reward': 0.25}, base=os.environ['POSTTRAIN_SESSION_URL'])"
    with conversations(tmp_path, code) as (_, (record,), _, _):
        assert record.score == 0.25
    with conversations(tmp_path, "ask(task['messages'])") as (_, (record,), _, _):
        assert record.score is None and record.error is None


@pytest.mark.parametrize(
    "code, why",
    [
        ("ask(task['messages']); sys.exit(3)", "status 3"),
        ("ask(task['messages']); raise ValueError('no such thing')", "no such thing"),
        ("ask(task['messages']); os.kill(os.getpid(), 9)", "signal 9"),
        ("ask(task['messages']); give('much')", "no finite number"),
        ("ask(task['messages']); time.sleep(60)", "longer than 6 seconds"),
        ("post('/chat/completions', b'{]')", "HTTP Error 400"),
        ("", "before the model had said anything"),
    ],
)
def test_a_program_that_fails_costs_its_own_sample(tmp_path, code, why):
    well = TWO_TURNS.strip().replace("\n", "\n    ")
    program = f"if task['index'] == 1:\n    {code or 'pass'}\nelse:\n    {well}\n"
    timeout = {"timeout_s": 6.0} if "sleep" in code else {}
    with conversations(tmp_path, program, count=3, **timeout) as (_, records, _, _):
        assert why in records[1].error
        assert [record.score for record in (records[0], records[2])] == [1.0, 1.0]


def test_a_reward_of_hundreds_of_digits_is_rejected_and_other_programs_go_on(tmp_path):
    code = """
import urllib.error
base = os.environ["POSTTRAIN_SESSION_URL"]
for body in (b"1" + b"0" * 400, b'{"reward": 1e999}', b"true", b'"x"', b"[1]"):
    try:
        post("/reward", body, base=base)
        sys.exit("accepted")
    except urllib.error.HTTPError as error:
        assert error.code == 400 and "finite number" in json.load(error)["error"]["message"]
messages = task["messages"]
messages += [ask(messages), {"role": "user", "content": "again"}]
ask(messages)
post("/reward", 0.25, base=base)
"""
    with conversations(tmp_path, code, count=3, http_processes=1) as (_, records, _, _):
        assert [(record.score, record.error) for record in records] == [(0.25, None)] * 3
    code = "ask(task['messages']); open(os.environ['POSTTRAIN_REWARD_FILE'], 'w').write('1' + '0' * 400)"
    with conversations(tmp_path, code) as (_, (record,), _, _):
        assert "no finite number" in record.error


def test_a_program_ends_with_all_that_it_started(tmp_path):
    pid = tmp_path / "pid"
    code = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pid)!r}, "w").write(str(child.pid))
ask(task["messages"])
"""
    with conversations(tmp_path, code) as (_, (record,), _, _):
        assert record.error is None
    state, end = Path("/proc", pid.read_text(), "stat"), time.monotonic() + 20
    while state.exists() and state.read_text().split()[2] != "Z":  # a killed process takes a moment to end
        assert time.monotonic() < end
        time.sleep(0.01)


def test_more_samples_than_programs_at_once_take_turns(tmp_path):
    alive = tmp_path / "alive"
    alive.mkdir()
    code = f"""
mine = os.path.join({str(alive)!r}, str(os.getpid()))
open(mine, "w").close()
others = len(os.listdir({str(alive)!r}))
ask(task["messages"])
os.remove(mine)
give(others)
"""
    with conversations(tmp_path, code, count=5, max_programs=2, timeout_s=20.0) as (_, records, _, _):
        assert [record.error for record in records] == [None] * 5
        assert max(record.score for record in records) <= 2


def test_a_program_has_no_more_memory_than_it_may(tmp_path):
    code = "ask(task['messages']); x = bytearray(3 * 2**30); give(1)"
    with conversations(tmp_path, code, memory_gb=1.0) as (_, (record,), _, _):
        assert "MemoryError" in record.error


def test_the_output_of_a_program_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(program_process, "_MOST_OUTPUT", 100_000)
    monkeypatch.setattr(program_process, "_TRIM_S", 0.05)
    printed, go, output = tmp_path / "printed", tmp_path / "go", tmp_path / "output"
    code = f"""
import os, sys, time
print("x" * 500_000, flush=True)
open({str(printed)!r}, "w").close()
while not os.path.exists({str(go)!r}):
    time.sleep(0.01)
sys.exit("the end")
"""

    async def run():
        async with Program([sys.executable, "-c", code], {}, output) as program:
            waiting = asyncio.ensure_future(program.wait())
            while not printed.exists() or output.stat().st_size:
                await asyncio.sleep(0.01)
            go.touch()
            return await waiting, program.last_words()

    async def bounded():
        return await asyncio.wait_for(run(), 60)

    assert asyncio.run(bounded()) == (1, ": the end") and output.stat().st_size < 100


def test_a_key_of_another_session_is_rejected(tmp_path):
    code = "os.environ['OPENAI_API_KEY'] = 'other'; ask(task['messages'])"
    with conversations(tmp_path, code) as (_, (record,), engine, _):
        assert "401" in record.error and not engine.seen


def test_what_a_program_sets_of_sampling_is_said_once_and_the_runs_own_holds(tmp_path):
    code = "ask(task['messages'], temperature=0.1, stop_token_ids=[5], max_tokens=1)"
    with conversations(tmp_path, code) as (_, _, engine, said):
        assert engine.seen[0].sampling.temperature == 1.0 and engine.seen[0].sampling.max_tokens == 1
        assert 5 not in engine.seen[0].sampling.stop_token_ids
        for name in ("temperature", "stop_token_ids"):
            assert sum(f"programs set `{name}`" in one for one in said) == 1


def test_a_retry_joins_and_adds_no_row(tmp_path):
    code = """
body = {"model": "m", "messages": task["messages"]}
one = post("/chat/completions", body)
two = post("/chat/completions", body, **{"x-stainless-retry-count": "1"})
give(float(one["id"] == two["id"]))
"""
    with conversations(tmp_path, code) as (_, (record,), engine, _):
        assert record.score == 1.0 and len(engine.seen) == 1 and record.facts["repeated"] == 1


def test_a_context_that_is_too_long_is_a_400_of_the_api(tmp_path):
    code = """
import urllib.error
try:
    ask([{"role": "user", "content": "x" * 600}])
except urllib.error.HTTPError as error:
    give(float(error.code == 400 and json.load(error)["error"]["code"] == "context_length_exceeded"))
ask(task["messages"])
"""
    with conversations(tmp_path, code) as (_, (record,), _, _):
        assert record.score == 1.0


@pytest.mark.parametrize(("quiet_s", "is_late"), [(0.2, True), (60.0, False)])
def test_programs_elsewhere_claim_samples_with_the_runs_key(tmp_path, monkeypatch, quiet_s, is_late):
    monkeypatch.setattr(programs, "QUIET_S", quiet_s)
    with pytest.raises(UserError, match="POSTTRAIN_API_KEY"), conversations(tmp_path, "", program="outside"):
        pass
    monkeypatch.setenv("POSTTRAIN_API_KEY", "secret")
    worker = """
import json, sys, time, urllib.request

def post(url, body, key):
    headers = {"Authorization": "Bearer " + key}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

done = 0
while done < 2:
    found = post(sys.argv[1] + "/s/next", {}, "secret")
    if found["id"] is None:
        time.sleep(0.02)
        continue
    done += 1
    post(found["base_url"] + "/chat/completions", {"messages": found["task"]["messages"]}, "secret")
    post(sys.argv[1] + "/s/" + found["id"] + "/reward", {"reward": 0.75}, "secret")
"""
    (tmp_path / "worker.py").write_text(worker)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep(1); exec(open({str(tmp_path / 'worker.py')!r}).read())",
         f"http://127.0.0.1:{port}"]
    )  # fmt: skip
    try:
        with conversations(tmp_path, "", count=2, program="outside", port=port) as (_, records, _, said):
            assert [record.score for record in records] == [0.75, 0.75]
            # The programs start a second late, which is noted; it is not while they ask.
            notes = [one for one in said if "no program has asked for a sample" in one]
            assert bool(notes) == is_late and all(f"127.0.0.1:{port}/s/next" in one for one in notes)
    finally:
        started.kill()
        started.wait()


@pytest.mark.parametrize("program, why", [("nosuchprogram x", "no program"), ("python nosuch.py", "no file nosuch.py")])
def test_a_program_that_is_not_there_is_an_error_before_the_run(tmp_path, program, why):
    with pytest.raises(UserError, match=why), conversations(tmp_path, "", program=program):
        pass


def test_the_interpreter_of_a_program_may_be_another(tmp_path):
    code = "ask(task['messages']); give(float('marked' in os.environ.get('MARK', '')))"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nMARK=marked exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    program = f"python {tmp_path / 'agent.py'}"
    with conversations(tmp_path, code, program=program, python=str(python)) as (_, (record,), _, _):
        assert record.score == 1.0


class EngineThatWaits(ScriptedEngine):
    """Decodes nothing before two requests are there, or ten seconds have passed."""

    most, began = 0, None

    def step(self):
        self.began = self.began or time.monotonic()
        self.most = max(self.most, len(self.running))
        self.hold = self.most < 2 and time.monotonic() < self.began + 10
        return super().step()


class SlowEngine(ScriptedEngine):
    """Takes a moment for each token, and writes several."""

    def submit(self, request):
        self.script = lambda text, seed: f"one two three four{END}"
        super().submit(request)

    def step(self):
        time.sleep(0.02)
        return super().step()


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # turns in rounds, and as they come
def test_a_stream_of_a_run_has_its_tokens_while_they_are_sampled(tmp_path, device):
    code = """
body = json.dumps({"messages": task["messages"], "stream": True}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
with urllib.request.urlopen(
    urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
) as answer:
    events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
texts = [event["choices"][0]["delta"].get("content") for event in events]
assert "".join(filter(None, texts)) == "one two three four", texts
give(sum(map(bool, texts)))
"""
    with conversations(tmp_path, code, device=device, kind=SlowEngine) as (_, (record,), _, _):
        assert record.error is None and record.score > 2 and record.turns == 1


PARALLEL = """
from concurrent.futures import ThreadPoolExecutor

def at_once(*prompts, apart=0.0):
    with ThreadPoolExecutor() as pool:
        asked = []
        for prompt in prompts:
            asked.append(pool.submit(ask, [{"role": "user", "content": prompt}]))
            time.sleep(apart)
        return [one.result() for one in asked]
"""


def test_requests_of_one_sample_that_are_sent_at_once_are_decoded_together(tmp_path):
    # What is sampled on a GPU is admitted as it comes; nothing here needs one.
    code = (
        PARALLEL
        + """
helpers = at_once("one", "two")
messages = task["messages"]
messages += [ask(messages), {"role": "user", "content": "and"}]
give(float(ask(messages)["content"] == "2" and len(helpers) == 2))
"""
    )
    with conversations(tmp_path, code, device="cuda", kind=EngineThatWaits) as (_, (record,), engine, _):
        assert engine.most == 2 and record.score == 1.0 and record.error is None
        assert len(record.rows) == 3 and sum(sum(row.mask) for row in record.rows) == 8, "each token is trained once"


@pytest.mark.parametrize("order", [("apple", "berry"), ("berry", "apple")])
def test_turns_wanted_at_once_are_numbered_by_their_tokens_in_rounds(tmp_path, order):
    # The round begins when the second sample's program has asked, by when both requests of the first have come.
    code = (
        PARALLEL.replace("        return", "        open(both, 'w').close()\n        return")
        + f"""
both = {str(tmp_path / "both")!r}
if task["index"] == 0:
    at_once({order[0]!r}, {order[1]!r}, apart=0.7)
else:
    while not os.path.exists(both):
        time.sleep(0.02)
    ask(task["messages"])
"""
    )
    with conversations(tmp_path, code, count=2) as (_, records, engine, _):
        own = [request for request in engine.seen if request.id[0] == 0]
        assert ["apple" in engine.decode(list(request.prompt_ids)) for request in own] == [True, False]
        assert own[0].seed == 0 != own[1].seed
        assert len(records[0].rows) == 2 and sum(sum(row.mask) for row in records[0].rows) == 4


@pytest.mark.parametrize(("most", "rows"), [(2, 2), (None, 3)])
def test_a_sample_has_no_more_rows_than_it_may(tmp_path, most, rows):
    code = """
import urllib.error
messages = task["messages"]
messages += [ask(messages), {"role": "user", "content": "and"}]
ask([{"role": "user", "content": "one"}])
try:
    ask([{"role": "user", "content": "two"}])
    give(0)
except urllib.error.HTTPError as error:
    said = json.load(error)["error"]
    give(float(error.code == 400 and said["code"] == "max_rows" and "agent.max_rows=2" in said["message"]))
ask(messages)  # a row that is there may continue
"""
    with conversations(tmp_path, code, max_rows=most) as (_, (record,), _, _):
        assert len(record.rows) == rows and record.score == float(most is not None) and record.error is None

"""HTTP in a process of its own: it serves as in one, is replaced when lost, and ends with the process of the engine."""

import asyncio
import gc
import json
import os
import signal
import socket
import time
import weakref
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("aiohttp")
import aiohttp

from posttrain.conversations.server import Server
from posttrain.conversations.serving.app import make_app
from posttrain.conversations.serving.process import ServerProcess, listen, url_of
from posttrain.conversations.serving.remote import RemoteServer, ServerHost
from posttrain.conversations.serving.sessions import LocalChannels
from posttrain.conversations.serving.wire import Link
from posttrain.errors import UserError
from tests.serving.scripted_server import END, Client, ScriptedEngine, served
from tests.serving.test_programs import TWO_TURNS, conversations
from tests.tools.call_templates import tokenizer_of

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "1+2?"}]}


def make(link, facts):
    remote = RemoteServer(link)
    return make_app(served(tokenizer_of("Qwen2.5")), LocalChannels(remote)), remote.receive


def with_process(work, script=lambda text, seed: f"three{END}", make=make):
    """What `work(client, process, how each process was lost)` gives."""

    @asynccontextmanager
    async def connected(engine, process, lost):
        async with Server(engine) as server:

            def start():
                host = ServerHost(server, len(lost))

                def lose(how):
                    host.end()
                    lost.append(how)
                    start()

                host.link = process.start({}, host.receive, lose)

            start()
            async with aiohttp.ClientSession(url_of(process.listener)) as http:
                yield Client(http, engine)

    async def main():
        lost = []
        async with connected(ScriptedEngine(tokenizer_of("Qwen2.5"), script), process, lost) as client:
            return await asyncio.wait_for(work(client, process, lost), 30)

    process = ServerProcess(listen("127.0.0.1", 0), make)
    try:
        return asyncio.run(main())
    finally:
        process.close()


def has_ended(pid):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_answers_streams_and_errors_cross_the_two_processes():
    async def work(client, process, lost):
        body = ASK | {"logprobs": True, "return_token_ids": True, "n": 2, "seed": 7, "temperature": 0.5}
        whole = await client.post(CHAT, body)
        streamed = await client.post(CHAT, ASK | {"stream": True, "return_token_ids": True})
        long = await client.post(CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]})
        return whole, streamed, long, client.engine.seen

    whole, streamed, long, seen = with_process(work)
    choices = whole[1]["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["three", "three"]
    ids = choices[0]["token_ids"]
    assert [one["logprob"] for one in choices[0]["logprobs"]["content"]] == [-0.5 - id / 1000 for id in ids]
    assert whole[1]["prompt_token_ids"] == list(seen[0].prompt_ids)
    assert sorted(one.seed for one in seen[:2]) == [7, 8] and seen[0].sampling.temperature == 0.5
    chunks = [chunk["choices"][0] for chunk in streamed[1][:-1]]
    assert len(chunks) > 3, "the pieces come one by one"
    assert [id for chunk in chunks for id in chunk.get("token_ids", [])] == ids
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "three"
    assert long[0] == 400 and long[1]["error"]["code"] == "context_length_exceeded"


def test_a_client_that_goes_away_aborts_its_request_in_the_other_process():
    async def work(client, process, lost):
        client.engine.hold = True
        asking = asyncio.create_task(client.post(CHAT, ASK))
        while not client.engine.seen:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not client.engine.aborted:
            await asyncio.sleep(0.01)
        return client.engine.has_work()

    assert with_process(work) is False


def test_messages_that_travel_together_keep_their_own_ids_and_log_probs():
    sent = [(["a"], [1, 2], [-0.5, -0.25]), (["b"], [], []), (["c", {"n": 1}], [3], [-1.5]), (["d"], [4] * 300000, [])]

    async def work():
        came, ends = [], socket.socketpair()
        sender, receiver = (Link(end, lambda *message: came.append(message), lambda: None) for end in ends)
        for message in sent:
            sender.post(*message)
        for link in (sender, receiver):
            link.open()
        while len(came) < len(sent):
            await asyncio.sleep(0.01)
        for link in (sender, receiver):
            link.close()
        return came

    assert asyncio.run(asyncio.wait_for(work(), 30)) == sent


def test_a_message_that_fails_costs_no_other_message():
    async def main():
        ours, theirs = socket.socketpair()
        found = []

        def receive(words, ids, values):
            found.append(words)
            if words == ["bad"]:
                raise OverflowError

        here, there = Link(ours, receive, lambda: None), Link(theirs, lambda *_: None, lambda: None)
        here.open()
        for words in (["a"], ["bad"], ["b"]):
            there.post(words)
        there.open()
        while ["b"] not in found:
            await asyncio.sleep(0.01)
        there.post(["c"])
        while ["c"] not in found:
            await asyncio.sleep(0.01)
        here.close(), there.close()
        return found

    async def bounded():
        return await asyncio.wait_for(main(), 20)

    assert asyncio.run(bounded()) == [["a"], ["bad"], ["b"], ["c"]]


def test_a_process_that_is_killed_is_replaced_and_what_it_had_is_aborted():
    async def work(client, process, lost):
        client.engine.hold = True
        asking = asyncio.create_task(client.post(CHAT, ASK))
        while not client.engine.seen:
            await asyncio.sleep(0.01)
        os.kill(process._worker.pid, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await asking
        while not client.engine.aborted:
            await asyncio.sleep(0.01)
        client.engine.hold = False
        status, _ = await client.post(CHAT, ASK)  # at the same address
        return status, lost, len(client.engine.aborted), process._worker.pid

    status, lost, aborted, last = with_process(work)
    assert status == 200 and lost == ["killed by SIGKILL"] and aborted == 1
    assert has_ended(last), "nothing is left behind"


def test_a_process_that_cannot_work_is_not_started_for_ever(capfd):
    def broken(link, facts):
        raise ValueError("no such model")

    async def work(client, process, lost):
        while len(lost) < 3:
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="as soon as it was started"):
            process.start({}, print, print)
        return lost

    with_process(work, make=broken)
    assert "no such model" in capfd.readouterr().err


@pytest.mark.slow
def test_collections_in_the_engines_process_skip_what_was_imported():
    gc.unfreeze()  # as it is without these tests
    try:
        frozen, others = with_process(lambda *given: asyncio.sleep(0, (gc.get_freeze_count(), len(gc.get_objects()))))
        assert frozen > 10 * others
        assert gc.get_freeze_count() == 0
        garbage = [set[int]()]
        garbage.append(garbage)
        seen = weakref.ref(garbage[0])
        del garbage
        with_process(lambda *given: asyncio.sleep(0))
        assert seen() is None, "garbage is not kept"
    finally:
        gc.freeze()


def test_it_ends_when_the_engines_process_is_killed():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:

            async def main():
                process = ServerProcess(listen("127.0.0.1", 0), make)
                process.start({}, print, print)
                os.write(
                    write,
                    json.dumps([process._worker.pid, process._forks._parent.pid, process._forks._keeper.pid]).encode(),
                )
                await asyncio.sleep(600)

            asyncio.run(main())
        finally:
            os._exit(0)
    os.close(write)
    children = json.loads(os.read(read, 1000))
    os.close(read)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert all(has_ended(one) for one in children)


@pytest.mark.parametrize("processes", [1, 2])
def test_in_a_run_a_lost_process_costs_the_samples_that_were_played(processes, tmp_path, monkeypatch):
    pids, start = tmp_path / "pids", ServerProcess.start

    def noted(self, *given):
        link = start(self, *given)
        if not pids.exists():  # that of the first, which has the first sample
            pids.write_text(str(self._worker.pid))
        return link

    monkeypatch.setattr(ServerProcess, "start", noted)
    code = f"""
if task["index"] == 0:
    ask(task["messages"])
    os.kill(int(open({str(pids)!r}).read()), 9)
    time.sleep(60)
{TWO_TURNS}
"""
    settings = {"max_programs": processes, "http_processes": processes}  # with two, the second sample is played beside
    with conversations(tmp_path, code, count=2, **settings) as (_, records, _, said):
        assert "the HTTP process of the run has ended (killed by SIGKILL)" in records[0].error
        assert records[1].score == 1.0 and records[1].error is None
        assert sum("1 samples fail; another one is started" in one for one in said) == 1


def test_a_run_ends_where_no_http_process_is_left_and_none_can_be_started(tmp_path, monkeypatch):
    """Otherwise it would train on samples that all failed."""
    start = ServerProcess.start

    def once(self, *given):
        if self.link is None and self._worker is None and self in started:
            raise RuntimeError("out of processes")
        started.append(self)
        (tmp_path / "pid").write_text(str((start(self, *given), self._worker)[1].pid))
        return self.link

    started = []
    monkeypatch.setattr(ServerProcess, "start", once)
    code = f"os.kill(int(open({str(tmp_path / 'pid')!r}).read()), 9)\ntime.sleep(60)\n"
    with (
        pytest.raises(
            UserError, match=r"(?s)programs cannot reach the run any more.*out of processes.*last checkpoint"
        ),
        conversations(tmp_path, code, count=2, max_programs=1, http_processes=1),
    ):
        pass

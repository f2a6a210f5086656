"""Tools in worker processes: a call that hangs, crashes or exits costs itself, however often that happens."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from patience import gone, until

from posttrain.conversations.tools import forks
from posttrain.conversations.tools.base import Tool, ToolAnswer, ToolCall
from posttrain.conversations.tools.registry import FunctionTool
from posttrain.conversations.tools.runner import ToolRunner


def runner_of(*tools, timeout_s: float = 20.0) -> ToolRunner:
    made = [tool if isinstance(tool, Tool) else FunctionTool(tool) for tool in tools]
    return ToolRunner({tool.name: tool for tool in made}, timeout_s=timeout_s, max_chars=1000, side="left")


def ask(runner: ToolRunner, name: str, conversation: object = "c", **arguments) -> ToolAnswer:
    (answer,) = runner.answer(conversation, [ToolCall(name, arguments)]).result(60)
    return answer


def act(how: str) -> str:
    """Does it."""
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        threading.Event().wait()
    if how == "fork":
        os.fork()
    return how


@pytest.mark.parametrize(
    ("how", "text", "error"),
    [
        ("exit", "The tool act failed: its process ended (exit code 3).", "ended: its process ended (exit code 3)"),
        ("kill", "The tool act failed: its process ended (killed by SIGKILL).", "ended: its process ended"),
        ("hang", "The tool act gave no answer within 1 seconds.", "timeout: "),
        ("fork", "fork", None),
    ],
)
def test_a_call_that_takes_its_process_with_it_is_answered_and_the_next_one_works(how, text, error):
    with runner_of(act, timeout_s=1.0) as runner:
        for _ in range(2):
            answer = ask(runner, "act", how=how)
            assert answer.text == text and (answer.error or "").startswith(error or "")
            assert ask(runner, "act", how="well").text == "well"


@pytest.mark.slow
def test_a_tool_is_alive_after_more_hung_calls_than_it_may_have_at_once():
    before = threading.active_count()
    with runner_of(act, timeout_s=0.2) as runner:
        answers = runner.answer("c", [ToolCall("act", {"how": "hang"})] * 80).result(120)  # 32 at once
        assert {answer.error for answer in answers} == {"timeout: The tool act gave no answer within 0.2 seconds."}
        assert threading.active_count() <= before + 2, "nothing is left of them"
    with runner_of(act) as runner:
        assert ask(runner, "act", how="well").text == "well"


class Tally(Tool):
    """Counts the calls of a conversation from where its row begins."""

    name = "tally"
    schema = {"type": "function", "function": {"name": "tally", "parameters": {"additionalProperties": True}}}  # noqa: RUF012
    at_once = 2

    def __init__(self) -> None:
        self.counts: dict = {}

    async def open(self, conversation, start: int = 0):
        self.counts[conversation] = start

    async def call(self, conversation, arguments):
        if arguments.get("exit"):
            os._exit(1)
        self.counts[conversation] += 1
        return str(self.counts[conversation])

    async def reward(self, conversation):
        return float(self.counts[conversation])


def test_a_conversation_stays_with_its_process_and_loses_its_state_by_its_own_call_alone():
    with runner_of(Tally()) as runner:
        for number in range(4):
            runner.open(number, {"tally": {"start": 10 * number}})
        assert [ask(runner, "tally", number).text for number in (0, 1, 2, 3, 0)] == ["1", "11", "21", "31", "2"]
        assert ask(runner, "tally", 1, exit=True).text == "The tool tally failed: its process ended (exit code 1)."
        after = {number: ask(runner, "tally", number) for number in range(4)}
        assert "with what it kept for this conversation; it starts anew" in after.pop(1).text
        assert ask(runner, "tally", 1).text == "11"
        found = {number: answer.text for number, answer in after.items()}
        assert found == {0: "3", 2: "22", 3: "32"}, "what others had is there, also in another process"
        assert {answer.error for answer in after.values()} == {None}
        assert runner.reward(3) == 32.0
        runner.close_conversation(3)


def test_nothing_is_kept_of_conversations_that_have_ended():
    """Also of a tool without a `close`."""
    with runner_of(Tally()) as runner:
        for number in range(3):
            runner.open(number, {"tally": {"start": 10}})
            assert ask(runner, "tally", number).text == "11"
            runner.close_conversation(number)
        host = runner._hosts["tally"]
        until(lambda: not (host._given or host._calls or host._homes_by), "for what conversations had")
        assert [process.conversations for process in host._homes] == [set(), set()]


def test_calls_that_must_not_be_repeated_are_not_made_again_in_another_process():
    """Those of the conversations that shared the lost process: they begin anew, and are told so."""
    tally = Tally()
    tally.repeatable = False
    with runner_of(tally) as runner:
        for number in range(4):
            runner.open(number, {"tally": {"start": 10 * number}})
            assert ask(runner, "tally", number).text == str(10 * number + 1)
        ask(runner, "tally", 1, exit=True)
        after = {number: ask(runner, "tally", number).text for number in range(4)}
        lost = [number for number, text in after.items() if "it starts anew" in text]
        assert lost == [1, 3] and after[0] == "2" and after[2] == "22"
        assert [ask(runner, "tally", number).text for number in lost] == ["11", "31"]


def test_a_function_says_that_its_calls_must_not_be_repeated_and_how_many_run_at_once():
    def pay(amount: int) -> str:
        """Pays."""
        return "paid"

    assert FunctionTool(pay).repeatable and FunctionTool(pay).at_once == 32
    pay.repeatable, pay.at_once = False, 100
    assert not FunctionTool(pay).repeatable and FunctionTool(pay).at_once == 100


def test_functions_of_a_closure_run_their_random_numbers_differ_and_what_they_print_is_shown(capsys):
    secret = object()

    def draw(low: int) -> str:
        """Draws a number."""
        print("drawing", secret is not None)
        time.sleep(0.3)  # so that each call has a process of its own
        return str(random.randrange(low, 10**12))

    with runner_of(draw) as runner:
        answers = runner.answer("c", [ToolCall("draw", {"low": 0})] * 4).result(60)
    assert len({answer.text for answer in answers}) == 4
    assert capsys.readouterr().out.count("drawing True") == 4


def test_a_function_may_ask_for_the_memory_of_the_trainer():
    seen = []

    def note(word: str) -> str:
        """Keeps it."""
        seen.append(word)
        return "kept"

    with runner_of(note) as runner:
        assert ask(runner, "note", word="a").text == "kept" and seen == []
    note.isolated = False
    with runner_of(note) as runner:
        assert ask(runner, "note", word="a").text == "kept" and seen == ["a"]


def test_a_parent_of_workers_that_is_killed_is_replaced_and_takes_its_workers_with_it():
    def place(number: int) -> str:
        """Says where it ran."""
        return f"{number} {os.getpid()} {os.getppid()}"

    with runner_of(place, Tally()) as runner:
        for name in "cd":  # its successor is replaced, too
            runner.open(name, {"tally": {"start": 10}})
            assert ask(runner, "tally", name).text == "11"
            _, worker, parent = map(int, ask(runner, "place", number=1).text.split())
            workers = [process.worker.pid for host in runner._hosts.values() for process in host._started]
            os.kill(parent, signal.SIGKILL)
            assert worker in workers and gone(parent, *workers), "workers end with their parent"
            answers = runner.answer("c", [ToolCall("place", {"number": number}) for number in range(4)]).result(60)
            assert [answer.error for answer in answers] == [None] * 4
            assert not {parent, *workers} & {int(word) for answer in answers for word in answer.text.split()[1:]}
            assert ask(runner, "tally", name).text == "12", "its calls before are made again in another process"


def test_a_stopped_parent_of_workers_is_replaced(monkeypatch):
    monkeypatch.setattr(forks, "SEND_S", 4.0)
    with runner_of(act) as runner:
        assert ask(runner, "act", how="exit").error
        parent = runner._server._parent.pid
        os.kill(parent, signal.SIGSTOP)
        assert ask(runner, "act", how="well").text == "well"
        assert gone(parent)


def test_a_machine_that_starts_no_more_processes_for_a_while_loses_no_parent(monkeypatch):
    fork, trainer = os.fork, os.getpid()

    def out_of_processes():
        """In parents alone, as long as the file is there."""
        if os.getpid() != trainer and blocked.exists():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    with tempfile.TemporaryDirectory() as folder:
        blocked = Path(folder, "blocked")
        monkeypatch.setattr(os, "fork", out_of_processes)
        with runner_of(act) as runner:
            assert ask(runner, "act", how="exit").error
            parent = runner._server._parent.pid
            blocked.touch()
            words = "this machine starts no more processes (Resource temporarily unavailable)"
            assert words in ask(runner, "act", how="well").text
            blocked.unlink()
            assert ask(runner, "act", how="well").text == "well"
            assert runner._server._parent.pid == parent


PROGRAM = """
import os, sys, time
sys.path[:0] = [{tests!r}, {tests!r} + '/..']
from test_worker_processes import *

def hang(file: str) -> str:
    "Hangs."
    open(file, "w").write(str(os.getpid()))
    time.sleep(600)

runner = runner_of(hang)
runner.answer("c", [ToolCall("hang", {{"file": sys.argv[1]}})]).result()
"""


def test_no_worker_outlives_a_run_that_is_killed(tmp_path):
    file = tmp_path / "pid"
    code = PROGRAM.format(tests=str(Path(__file__).parent))
    run = subprocess.Popen([sys.executable, "-c", code, str(file)], stdin=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    worker = int(file.read_text())
    run.kill()
    run.wait()
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)

"""Agents and environments in worker processes: whatever one does costs its own conversation, and no other notices."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
from patience import gone

from posttrain.conversations.agents import AGENTS, Agents, register_agent
from posttrain.conversations.chat import Setup
from posttrain.conversations.conversation import Conversation, Limits
from posttrain.conversations.loop import ConversationLoop
from posttrain.conversations.processes import AgentProcesses
from posttrain.conversations.runner import Runner
from posttrain.conversations.settings import AgentSettings, TurnSettings
from posttrain.conversations.templates import MessageTemplate
from posttrain.conversations.tools.base import ToolAnswer, ToolCall
from posttrain.conversations.tools.registry import FunctionTool
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.errors import UserError
from posttrain.models.embedded import byte_tokenizer
from posttrain.rollout.base import Output


@pytest.fixture(autouse=True)
def no_agents():
    yield
    AGENTS.clear()


def double(number: int) -> str:
    """Doubles it."""
    return f"{2 * number} by {os.getpid()}"


@contextmanager
def loop_of(agent, *, most: int = 1, timeout_s: float = 5.0):
    """A loop over conversations that this agent leads, in so many processes."""
    register_agent("agent")(agent)
    settings, turns = AgentSettings(path="agent", timeout_s=timeout_s, processes=most), TurnSettings(format="hermes")
    agents, tool = Agents(settings, turns, {}), FunctionTool(double)
    setup = Setup(MessageTemplate(byte_tokenizer(), {}), Limits(300, 300), turns, [tool.schema])
    processes = AgentProcesses(agents, setup, timeout_s=timeout_s, most=most)
    with (
        ToolRunner({"double": tool}, timeout_s=9.0, max_chars=100, side="left") as tools,
        Runner(tools, timeout_s, processes) as runner,
    ):
        yield ConversationLoop(agents, runner, setup, in_rounds=True)


def play(loop, count: int = 4, first: int = 0) -> dict:
    """Leads them to their ends; gives (score, error, turns, facts) by their numbers."""
    tokenizer = byte_tokenizer()
    for number in range(first, first + count):
        row = {"number": number, "raw_prompt": [{"role": "user", "content": "?"}]}
        loop.begin((str(number), 0), [1, 2, 3], number, {}, row)
    while loop.waits():
        for rank, requests in loop.next(wait=True)[0].items():
            said = [tokenizer(f"{one.seed % 10}<|end|>", add_special_tokens=False)["input_ids"] for one in requests]
            turns = [
                Output(one.id, ids, np.zeros(2), "stop", [(0, 2)]) for one, ids in zip(requests, said, strict=True)
            ]
            loop.receive(rank, turns)
    records, loop.records = loop.records, {}
    return {int(key[0]): (one.score, one.error, one.turns, one.facts) for key, one in records.items()}


def begin_anew(chat, row) -> None:
    """Counts how often a conversation has begun, in a file."""
    with open(f"{row['number']}.txt", "a") as file:
        file.write("x")


def counted(number: int) -> int:
    with open(f"{number}.txt") as file:
        return len(file.read())


LATE = "it took longer than 1 seconds between two turns (agent.timeout_s)"


@pytest.mark.parametrize(
    ("how", "error"),
    [("block", LATE), ("wait", LATE), ("exit", "its process ended (exit code 3)"), ("raise", "ValueError: no luck")],
)
def test_what_one_agent_does_costs_its_own_conversation(tmp_path, monkeypatch, how, error):
    """Four share one process. The others continue with the turns and tool answers that they had before."""
    monkeypatch.chdir(tmp_path)

    async def lead(chat, row):
        begin_anew(chat, row)
        said = await chat.say()
        answer = await chat.call("double", number=row["number"])
        chat.tell(answer)
        await chat.say()
        if row["number"] == 2:
            if how == "block":
                time.sleep(60)
            if how == "wait":
                await asyncio.Event().wait()
            if how == "exit":
                os._exit(3)
            raise ValueError("no luck")
        chat.tell("once more")
        chat.facts |= {"first": said, "answer": answer, "process": os.getpid()}
        await chat.say()
        return row["number"] / 2

    with loop_of(lead, timeout_s=1.0) as loop:
        found = play(loop)
        assert found[2][0] is None and found[2][1].startswith(error) and found[2][2] == 2
        for number in (0, 1, 3):
            score, problem, turns, facts = found[number]
            assert (score, problem, turns) == (number / 2, None, 3)
            assert facts["first"] == str(number) and facts["answer"].startswith(f"{2 * number} by ")
            assert facts["process"] != os.getpid()
            assert counted(number) == (2 if how in ("block", "exit") else 1)
        assert counted(2) == 1
        assert play(loop, 2, first=10)[11][1] is None, "and so it goes on"


class Exits:
    def reset(self, row, seed):
        self.row = row
        begin_anew(None, row)
        return "begin"

    def step(self, action):
        # Steps run in threads: at the exit those of the others have begun and not ended.
        time.sleep(0.3 if self.row["number"] == 2 else 0.6)
        if self.row["number"] == 2:
            os._exit(4)
        return "again", 0.5, True


def test_an_environment_that_exits_in_a_thread_beside_others_fails_alone(tmp_path, monkeypatch):
    """Those that were at work together are tried once more, each in a process of its own."""
    monkeypatch.chdir(tmp_path)
    with loop_of(Exits) as loop:
        found = play(loop)
        assert found.pop(2)[1] == "its process ended (exit code 4)"
        assert {one[:3] for one in found.values()} == {(0.5, None, 1)} and len(found) == 3
        assert all(counted(number) <= 2 for number in range(4))


def test_a_parent_of_processes_that_is_killed_costs_no_conversation(tmp_path, monkeypatch):
    """Its processes end with it. Their conversations begin anew in those of its successor."""
    monkeypatch.chdir(tmp_path)

    async def lead(chat, row):
        begin_anew(chat, row)
        await chat.say()
        chat.tell(await chat.call("double", number=row["number"]))
        if row["number"] == 2 and counted(2) == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        await chat.say()
        return 1.0

    with loop_of(lead) as loop:
        for first in (0, 4):
            assert {one[:3] for one in play(loop, first=first).values()} == {(1.0, None, 2)}
        assert {counted(number) for number in range(4)} == {2} and counted(5) == 1


@pytest.mark.parametrize("what", ["tools", "agents"])
def test_a_run_ends_where_no_worker_processes_can_be_started_any_more(what):
    """Otherwise it would train on calls and conversations that all failed."""

    async def lead(chat, row):
        await chat.call("double", number=row["number"])
        await chat.say()

    with loop_of(lead) as loop:
        play(loop)
        server = loop.runner.tools._server if what == "tools" else loop.runner.processes._server
        for one in (server._keeper, server._parent):
            os.kill(one.pid, signal.SIGKILL)
        assert gone(server._parent.pid)
        with pytest.raises(UserError, match=f"{what} cannot run any more: the process that starts their worker"):
            for first in (4, 8):
                play(loop, first=first)


def test_an_agent_that_does_not_repeat_its_steps_is_told_why_it_failed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def lead(chat, row):
        begin_anew(chat, row)
        await chat.say()
        chat.tell(f"draw {random.random()}" if row["number"] == 1 else "go on")
        await chat.say()
        if row["number"] == 2:
            os._exit(0)
        chat.tell("last")
        await chat.say()
        return 1.0

    with loop_of(lead) as loop:
        found = play(loop)
    assert found[0][:2] == (1.0, None) and found[2][1] == "its process ended (exit code 0)"
    assert "did not repeat its steps: draw random numbers from random.Random(chat.seed)" in (found[1][1] or "")


def test_conversations_spread_over_the_processes_that_the_settings_allow():
    async def lead(chat, row):
        await chat.say()
        chat.facts["pid"] = os.getpid()
        return 1.0

    for most, expected in ((1, 1), (3, 3), (8, 6)):
        with loop_of(lead, most=most) as loop:
            assert len({one[3]["pid"] for one in play(loop, 6).values()}) == expected


def test_what_cannot_be_sent_between_processes_is_an_error_of_its_conversation():
    async def lead(chat, row):
        await chat.say()
        chat.facts["bad"] = (lambda: 1) if row["number"] == 1 else 1
        return 1.0

    with loop_of(lead) as loop:
        found = play(loop, 2)
        assert found[0][:2] == (1.0, None)
        assert (found[1][1] or "").startswith("what it gave cannot be sent to the trainer")
        loop.begin(("9", 0), [1], 9, {}, {"number": 9, "open": lambda: 1})
        (whole,) = loop.next(wait=True)[1]
        assert whole.finish_reason == "error" and "its row cannot be sent" in (loop.records[("9", 0)].error or "")


def test_branches_that_call_tools_side_by_side_are_repeated_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def sub(chat, number):
        await chat.say()
        answer = await chat.call("double", number=number)
        chat.tell(answer.partition(" ")[0])
        return int(answer.partition(" ")[0]) + len(await chat.say())

    async def lead(chat, row):
        begin_anew(chat, row)
        subs = [chat.branch([{"role": "user", "content": f"sub {n}"}]) for n in range(3)]
        total = sum(await asyncio.gather(*(sub(one, n) for n, one in enumerate(subs))))
        await chat.say()
        if row["number"] == 1:
            os._exit(0)
        chat.tell("last")
        await chat.say()
        return total

    with loop_of(lead) as loop:
        found = play(loop, 3)
    assert found[1][1] == "its process ended (exit code 0)"
    assert [found[number][:3] for number in (0, 2)] == [(9, None, 8), (9, None, 8)] and counted(0) == counted(2) == 2


def test_an_agent_that_waits_for_the_next_round_is_not_shown_as_at_work():
    async def talk(chat, row):
        for _ in range(2):
            await chat.say()

    def turn(request) -> Output:
        return Output(request.id, [5], np.zeros(1), "stop", [(0, 1)])

    with loop_of(talk) as loop:
        for number in range(2):
            loop.begin((str(number), 0), [1, 2, 3], number, {}, {"raw_prompt": [{"role": "user", "content": "?"}]})
        first, _ = loop.next(wait=True)[0][0]
        loop.receive(0, [turn(first)])  # the other conversation is still being generated
        until = time.monotonic() + 20
        while (is_busy := bool(loop.lane.take())) and time.monotonic() < until:
            time.sleep(0.01)
            loop.receive(0, [])
        assert not is_busy and loop.waits()


# What an agent does wrong, and the words of its error. The engine must not see it: it would end the run.
MISTAKES = {
    "chat.tell_ids([5, 10**6])": "token id 1000000 is not in the vocabulary of",
    "chat.tell_ids([-1])": "token id -1",
    "chat.start_ids([])": "the prompt is empty",
    "await chat.sample([])": "the prompt is empty",
    "await chat.sample([10**6])": "token id 1000000",
    "await chat.say(max_tokens=-1)": "max_tokens is a positive integer, not -1",
    "await chat.say(max_tokens=2.5)": "max_tokens is a positive integer, not 2.5",
    "await chat.say(stop='')": "none of them empty",
    "await chat.say(stop=[3])": "none of them empty",
    "chat.add_reward('much')": "a reward is a number, not 'much'",
    "chat.add_reward(float('nan'))": "a reward is finite, not nan",
    "chat.facts = [3]": "facts are a dict, not a list",
}


@pytest.mark.parametrize("isolated", [True, False])
def test_what_no_engine_takes_fails_the_conversation_that_gave_it(isolated):
    done = {}
    for number, code in enumerate(MISTAKES):
        exec(f"async def wrong(chat):\n    {code}", made := {})
        done[number] = made["wrong"]

    async def agent(chat, row):
        if row["number"] in done:
            if "start" not in list(MISTAKES)[row["number"]]:
                await chat.say()
            chat.tell("more") if chat.turns else None
            await done[row["number"]](chat)
        await chat.say()
        return 1.0

    agent.isolated = isolated
    with loop_of(agent, timeout_s=20.0) as loop:
        found = play(loop, len(MISTAKES) + 1)
    for number, words in enumerate(MISTAKES.values()):
        assert words in (found[number][1] or ""), (list(MISTAKES)[number], found[number])
    assert found[len(MISTAKES)][:2] == (1.0, None)


@pytest.mark.parametrize("isolated", [True, False])
def test_facts_may_be_another_dict(isolated):
    async def agent(chat, row):
        await chat.say()
        chat.facts = {"tries": 3}
        return 1.0

    agent.isolated = isolated
    with loop_of(agent) as loop:
        assert [facts for *_, facts in play(loop, 2).values()] == [{"tries": 3}] * 2


def test_what_a_tool_measures_is_stored_with_its_call():
    conversation = Conversation(("u", 0), [1], 0, {})
    conversation.add_call(ToolCall("t", {}), ToolAnswer("x", metrics={"right": 1.0}))
    conversation.add_call(ToolCall("t", {}), ToolAnswer("x"))
    assert [call.get("metrics") for call in conversation.calls] == [{"right": 1.0}, None]

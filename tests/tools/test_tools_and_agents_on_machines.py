"""Tools and agents on other machines: real worker processes there, behind hosts that are called as Ray actors are."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("ray")
import torch
from other_machines import other_hosts
from patience import alive, gone, until

from posttrain.config.root import PPOConfig
from posttrain.conversations.agents import AGENTS, register_agent
from posttrain.conversations.machines import has_workers, spread_conversations
from posttrain.conversations.opening import open_conversations
from posttrain.conversations.tools import forks, registry
from posttrain.conversations.tools.base import ToolCall
from posttrain.machines.cluster import ANSWER_S, Places
from posttrain.models.embedded import byte_tokenizer
from posttrain.rollout.base import Output

TOOLS = """
import os, time

from posttrain.conversations.tools.base import Tool


def place(how: str = "") -> str:
    '''Says where it runs.'''
    if how == "exit":
        os._exit(3)
    time.sleep(60 if how == "hang" else 0.2)
    return f"{os.getpid()} {os.environ.get('OF_THE_DRIVER', '')}"


class Tally(Tool):
    name = "Tally"
    schema = {"type": "function", "function": {"name": "Tally", "parameters": {"additionalProperties": True}}}
    at_once = 3

    def __init__(self):
        self.counts = {}

    async def call(self, conversation, arguments):
        self.counts[conversation] = self.counts.get(conversation, 0) + 1
        if arguments.get("hang"):
            time.sleep(60)
        return f"{self.counts[conversation]} {os.getpid()}"

    async def close(self, conversation):
        with open("closed.txt", "a") as file:
            file.write(f"{conversation}:{os.getpid()} ")
"""

NEAR = """

class Near(Tally):
    name, isolated = "Near", False
    schema = {"type": "function", "function": {"name": "Near", "parameters": {"additionalProperties": True}}}

    def __init__(self, *, table: str):
        self.table = table
        with open(table, "a") as file:
            file.write(f"{os.getpid()} ")

    async def call(self, conversation, arguments):
        return self.table
"""

AGENT = """
import os, random, time


async def lead(chat, row):
    draws = random.Random(chat.seed)
    for turn in range(3):
        said = await chat.say()
        if row["number"] == 2 and turn == 1 and row["how"] == "exit":
            os._exit(3)
        if row["number"] == 2 and turn == 1 and row["how"] == "block":
            time.sleep(60)
        if row["how"] == "slow":
            time.sleep(1)
        chat.facts[f"turn {turn}"] = f"{said} {draws.random()}"
        answer = await chat.call("place")
        chat.facts["tool"] = answer.split()[0]  # its process, unless that was lost
        chat.tell(f"{row['number']}.{turn}")
    chat.facts["process"] = os.getpid()
    return row["number"] / 2
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_tools.py").write_text(TOOLS)
    (tmp_path / "own_agent.py").write_text(AGENT)
    yield
    AGENTS.clear()


@contextmanager
def conversations(monkeypatch, *, machines: int = 2, cores: int = 2, **agent):
    """(the loop of a run with these tools and this agent, the hosts of other machines, what was said)."""
    config, said = PPOConfig(), list[str]()
    rollout = config.actor_rollout_ref.rollout
    rollout.multi_turn = {"enable": True, "tools": ["own_tools.py:place", "own_tools.py:Tally"], "format": "hermes"}
    rollout.multi_turn |= {"tool_timeout_s": agent.pop("tool_timeout_s", 20.0), **agent.pop("turns", {})}
    rollout.agent = agent
    config.data.max_prompt_length = config.data.max_response_length = 500
    monkeypatch.setattr("posttrain.cores.usable", lambda: cores)
    with (
        open_conversations(config, byte_tokenizer(), torch.device("cpu"), said.append) as loop,
        other_hosts(monkeypatch, machines, cores) as (hosts, others),
    ):
        assert loop is not None and has_workers(loop)
        spread_conversations(loop, config, others, said.append)
        yield loop, hosts, said
        loop.close()


def ask(loop, name: str, count: int, conversation: object = "c", **arguments) -> list:
    """Answers to calls side by side."""
    return loop.runner.tools.answer(conversation, [ToolCall(name, arguments)] * count).result(60)


def play(loop, numbers, how: str = "", *, after_turn=lambda number: None) -> dict:
    """Leads these conversations to their ends; gives (score, error, tokens, facts)."""
    tokenizer, turns = byte_tokenizer(), 0
    for number in numbers:
        row = {"number": number, "how": how, "raw_prompt": [{"role": "user", "content": "?"}]}
        loop.begin((str(number), 0), [1, 2, 3], number, {}, row)
    while loop.waits():
        for rank, requests in loop.next(wait=True)[0].items():
            ids = [tokenizer(f"{one.seed % 10}<|end|>", add_special_tokens=False)["input_ids"] for one in requests]
            turns += 1
            outputs = [
                Output(one.id, said, np.zeros(len(said)), "stop", [(0, len(said))])
                for one, said in zip(requests, ids, strict=True)
            ]
            after_turn(turns)
            loop.receive(rank, outputs)
    records, loop.records = loop.records, {}
    return {int(key[0]): (one.score, one.error, one.rows[-1].ids, one.facts) for key, one in records.items()}


def test_calls_are_answered_on_all_machines_and_those_there_have_the_drivers_variables(files, monkeypatch):
    with conversations(monkeypatch) as (loop, hosts, said):
        assert "Tools run on 3 machines." in said
        answers = [answer.text.split(" ") for answer in ask(loop, "place", 6)]
        by_process = {int(process): seen for process, seen in answers}
        assert len(by_process) == 6, "each call had its own process"
        for host in hosts:
            assert len(host.seen & by_process.keys()) == 2, "in proportion to their cores"
            assert {by_process[one] for one in host.seen & by_process.keys()} == {"1"}
        there = [process for host in hosts for process in host.seen]
        assert all(map(alive, there))
    assert gone(*there), "and end with the run"


@pytest.mark.slow
def test_a_call_that_exits_or_hangs_on_another_machine_fails_alone(files, monkeypatch):
    with conversations(monkeypatch, tool_timeout_s=1.0) as (loop, hosts, _):
        assert {answer.error for answer in ask(loop, "place", 6, how="exit")} == {
            "ended: its process ended (exit code 3)"
        }
        late = {answer.error for answer in ask(loop, "place", 6, how="hang")}
        assert late == {"timeout: The tool place gave no answer within 1 seconds."}
        hung = [process for host in hosts for process in host.seen]
        assert gone(*hung)
        found = {int(answer.text.split()[0]) for answer in ask(loop, "place", 6)}
        assert len(found) == 6 and all(found & host.seen for host in hosts)


def test_a_stateful_tool_stays_with_its_process_and_a_lost_machine_costs_the_call_there(files, monkeypatch):
    with conversations(monkeypatch) as (loop, hosts, _):
        first = {number: ask(loop, "Tally", 1, number)[0].text.split() for number in range(6)}
        again = {number: ask(loop, "Tally", 1, number)[0].text.split() for number in range(6)}
        assert [count for count, _ in [*first.values(), *again.values()]] == ["1"] * 6 + ["2"] * 6
        homes = {number: int(process) for number, (_, process) in again.items()}
        assert {number: int(process) for number, (_, process) in first.items()} == homes
        lost = [number for number, home in homes.items() if home in hosts[0].seen]
        assert len(lost) == 2 and len(set(homes.values())) == 3
        under_way = loop.runner.tools.answer(lost[0], [ToolCall("Tally", {"hang": 1})])
        until(lambda: not under_way.done() and hosts[0].host._workers, "for the call to begin")
        threading.Timer(0.3, hosts[0].end).start()
        (answer,) = under_way.result(60)
        assert answer.error == "ended: its process ended (its machine 10.0.0.2 was lost)"
        after = {number: ask(loop, "Tally", 1, number)[0] for number in range(6)}
        assert "it starts anew" in after.pop(lost[0]).text
        found = {number: answer.text.split() for number, answer in after.items()}
        assert {count for count, _ in found.values()} == {"3"}, "calls of others were repeated elsewhere"
        stayed = set(found) - set(lost)
        assert all(int(found[number][1]) == homes[number] for number in stayed)
        assert not {int(process) for _, process in found.values()} & hosts[0].seen
        hosts[1].end()
        until(hosts[1].is_noticed, "for the end of a machine without calls")
        left = [ask(loop, "Tally", 1, number)[0] for number in found]
        assert [answer.text.split()[0] for answer in left] == ["4"] * 5, "nothing is lost"
        assert {int(answer.text.split()[1]) for answer in left}.isdisjoint(hosts[0].seen | hosts[1].seen)
        loop.runner.tools.open(0, {})
        loop.runner.tools.close_conversation(0)
    assert "0:" in Path("closed.txt").read_text()


@pytest.mark.slow
def test_agents_run_on_all_machines_and_say_what_they_say_on_one(files, monkeypatch):
    with conversations(monkeypatch, path="own_agent.py:lead", processes=2) as (loop, hosts, said):
        assert "Agents run on 3 machines." in said
        found = play(loop, range(6))
        processes = {number: facts.pop("process") for number, (_, _, _, facts) in found.items()}
        tools = {int(facts.pop("tool")) for _, _, _, facts in found.values()}
        assert len(set(processes.values())) == 6
        assert [len(host.seen & set(processes.values())) for host in hosts] == [2, 2]
        assert all(tools & host.seen for host in hosts)
    with conversations(monkeypatch, machines=0, path="own_agent.py:lead", processes=1) as (loop, _, said):
        assert not [line for line in said if "machine" in line]
        alone = play(loop, range(6))
    for _, _, _, facts in alone.values():
        del facts["process"], facts["tool"]
    assert alone == found and list(alone) == list(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error"),
    [("exit", "its process ended (exit code 3)"), ("block", "it took longer than 2 seconds between two turns")],
)
def test_an_agent_on_another_machine_costs_its_own_conversation(files, monkeypatch, how, error):
    """Three share a process there. The others continue where they were."""
    with conversations(monkeypatch, machines=1, path="own_agent.py:lead", processes=1, timeout_s=2.0) as (loop, *rest):
        (host,) = rest[0]
        # The first is led on this machine, the second on the other, and so on.
        found = play(loop, [1, 2, 3, 4, 5, 6], how)
        there = {number for number, one in found.items() if number != 2 and one[3]["process"] in host.seen}
        assert (found.pop(2)[1] or "").startswith(error) and there == {4, 6}
        assert {number: one[:2] for number, one in found.items()} == {n: (n / 2, None) for n in (1, 3, 4, 5, 6)}


@pytest.mark.slow
def test_conversations_of_a_lost_machine_begin_anew_on_the_others(files, monkeypatch):
    with conversations(monkeypatch, path="own_agent.py:lead", processes=2) as (loop, hosts, _):
        end_soon = threading.Timer(0.4, hosts[0].end)  # while agents compute
        found = play(loop, range(6), "slow", after_turn=lambda turns: turns == 2 and end_soon.start())
        assert hosts[0].gone
        assert {one[:2] for one in found.values()} == {(number / 2, None) for number in range(6)}
        assert not {facts["process"] for _, _, _, facts in found.values()} & hosts[0].seen
        assert {facts["process"] for _, _, _, facts in found.values()} & hosts[1].seen
        again = play(loop, range(10, 16))
        assert {error for _, error, _, _ in again.values()} == {None}


@pytest.mark.slow
def test_a_machine_that_cannot_make_the_agent_is_left_out_with_a_note(files, monkeypatch):
    @register_agent("mine")
    async def mine(chat, row):
        chat.facts["process"] = os.getpid()
        await chat.say()
        return 1.0

    with conversations(monkeypatch, machines=1, path="mine", processes=2) as (loop, hosts, said):
        notes = [line for line in said if line.startswith("note: agents do not run on 10.0.0.2: there is no agent")]
        assert len(notes) == 1
        found = play(loop, range(3))
        assert {one[1] for one in found.values()} == {None}
        assert not hosts[0].seen & {one[3]["process"] for one in found.values()}


def test_no_machine_has_more_processes_than_are_allowed_as_long_as_another_has_room():
    """Otherwise each has as many as fit to its cores."""
    large = Mock(address="large")
    running = list[Mock]()
    places = Places(lambda: Mock(machine=None), 2, "agents", [(large, 6)], most=3)
    large.start = lambda kind: Mock(machine=large)
    for _ in range(7):
        running.append(places.start(running))
    started = ["here" if one.machine is None else "large" for one in running]
    assert started[:4].count("large") == 3 and started[:6].count("large") == 3


def test_a_machine_whose_processes_cannot_be_forked_any_more_is_left_out(files, monkeypatch):
    """The kernel may kill the parent of its workers. The machine would always seem to be the idlest one."""
    with conversations(monkeypatch, machines=1) as (loop, hosts, said):
        parent = hosts[0].host._starters["tools"].pid
        os.kill(parent, signal.SIGKILL)
        first = ask(loop, "place", 4)
        assert sum(answer.error is None for answer in first) >= 2
        assert {answer.error for answer in ask(loop, "place", 4)} == {None}
        why = "the process that starts workers has ended"
        assert said[-1] == f"note: tools do not run on 10.0.0.2 any more: {why}"


def test_a_file_that_hangs_on_another_machine_when_it_is_loaded_is_left_out_with_what_it_started(files, monkeypatch):
    def wait(channels, seconds):
        assert 0 < seconds <= forks.MAKE_S < ANSWER_S
        until(Path("pids").exists, "for the file to be loaded")
        return []  # the time is over

    monkeypatch.setattr(forks, "wait", wait)
    hang = 'if os.environ.get("PYTHONHASHSEED") == "0":\n'  # as `spawn` sets it
    hang += '    import subprocess\n    child = subprocess.Popen(["sleep", "60"])\n'
    hang += (
        '    open("new", "w").write(f"{os.getpid()} {child.pid}")\n    os.rename("new", "pids")\n    time.sleep(60)\n'
    )
    Path("own_tools.py").write_text(TOOLS.replace("\n\n\ndef place", f"\n{hang}\n\ndef place"))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with conversations(monkeypatch, machines=1) as (loop, _, said):
        assert said[-1] == "note: tools do not run on 10.0.0.2: its files were not loaded within 100 s"
        assert gone(*map(int, Path("pids").read_text().split()))
        assert {answer.error for answer in ask(loop, "place", 2)} == {None}


def test_other_machines_do_not_make_tools_that_stay_in_the_trainer(files, monkeypatch):
    """One with settings of its own."""
    Path("own_tools.py").write_text(TOOLS + NEAR)
    tools, settings = ["own_tools.py:place", "own_tools.py:Near"], {"Near": {"table": "made.txt"}}
    with conversations(monkeypatch, machines=1, turns={"tools": tools, "tool_config": settings}) as (loop, _, said):
        assert "Tools run on 2 machines." in said
        assert [answer.text for answer in ask(loop, "Near", 1)] == ["made.txt"]
        assert Path("made.txt").read_text() == f"{os.getpid()} "


@pytest.mark.parametrize("how", ["tools", "mcp_config_path"])
def test_servers_of_mcp_on_the_drivers_machine_are_called_from_there(files, monkeypatch, how):
    server = "http://key@127.0.0.1:8000/mcp"
    Path("servers.json").write_text(json.dumps({"mcpServers": {"mine": {"url": server}}}))
    given = {"tools": ["own_tools.py:place", f"mcp:{server}"], "mcp_config_path": "servers.json"}
    monkeypatch.setattr(registry, "read_mcp_tools", lambda server: [])
    with conversations(monkeypatch, machines=1, turns={how: given[how]}) as (_, hosts, said):
        assert [line for line in said if line.startswith("note: tools run on the driver's machine alone")]
        assert not [line for line in said if "key" in line] and not hosts[0].host._starters


def test_what_names_an_address_of_the_drivers_machine_stays_there(files, monkeypatch):
    agent = {"path": "own_agent.py:lead", "config": {"url": "http://localhost:8000/x"}}
    Path("own_agent.py").write_text(AGENT.replace("lead(chat, row)", "lead(chat, row, *, url)"))
    with conversations(monkeypatch, machines=1, **agent) as (_, hosts, said):
        assert [line for line in said if line.startswith("note: agents run on the driver's machine alone")]
        assert "agents" not in hosts[0].host._starters and "tools" in hosts[0].host._starters

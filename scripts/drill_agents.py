"""A drill: agents and environments that block, hang, crash and exit, with 1,000 conversations at a time.

    python scripts/drill_agents.py                        # the tables of docs/own_agent.md
    python scripts/drill_agents.py --conversations 100

The first table: of a hundred conversations 4 hang, 4 raise and 2 call `os._exit`. Each must end, with its own score or
with its own error, and no other may notice. A function plays the model, so that the time is that of conversations
alone. The second: turns per second of agents that do nothing wrong, in worker processes and in the trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from drill_tools import processes as measure_processes

from posttrain.conversations.agents import AGENTS, Agents, register_agent
from posttrain.conversations.chat import Setup
from posttrain.conversations.conversation import Limits, TurnRequest
from posttrain.conversations.loop import ConversationLoop
from posttrain.conversations.processes import AgentProcesses
from posttrain.conversations.runner import Runner
from posttrain.conversations.settings import AgentSettings, TurnSettings
from posttrain.conversations.templates import MessageTemplate
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.models.embedded import byte_tokenizer
from posttrain.rollout.base import Output

TURNS, TIMEOUT_S = 4, 5.0
END: Any = byte_tokenizer().eos_token_id
FATES = (*["block"] * 2, *["hang"] * 2, *["crash"] * 4, *["exit"] * 2)  # of a hundred conversations
ERRORS = {"block": "longer", "hang": "longer", "crash": "ValueError", "exit": "process ended", "": ""}


def fate(number: int) -> str:
    """What becomes of a conversation; the same in every run."""
    place = number * 37 % 100  # 37 has no factor in common with 100, so that a hundred have a hundred places
    return FATES[place] if place < len(FATES) else ""


def meet(number: int, turn: int) -> None:
    """Meets its fate, in one of its turns."""
    if turn != number % TURNS:
        return
    match fate(number):
        case "block":
            time.sleep(3600)
        case "crash":
            raise ValueError(f"no luck with {number}")
        case "exit":
            os._exit(1)


@register_agent("agent")
async def lead(chat: Any, row: dict[str, Any]) -> float:
    for turn in range(TURNS):
        await chat.say()
        if fate(row["number"]) == "hang" and turn == row["number"] % TURNS:
            await asyncio.Event().wait()
        meet(row["number"], turn)
        chat.tell(f"again {turn}")
    return float(row["number"])


@register_agent("environment")
class Drilled:
    def reset(self, row: dict[str, Any], seed: int) -> str:
        self.number, self.turn = row["number"], 0
        return f"number {self.number}"

    def step(self, action: str) -> tuple[str, float, bool]:
        if fate(self.number) == "hang" and self.turn == self.number % TURNS:
            time.sleep(3600)  # in a thread: nothing else waits
        meet(self.number, self.turn)
        self.turn += 1
        return f"again {self.turn}", float(self.number) / TURNS, self.turn == TURNS


@register_agent("light")
async def lead_lightly(chat: Any, row: dict[str, Any]) -> float:
    for turn in range(TURNS):
        await chat.say()
        await asyncio.sleep(0)
        chat.tell(f"again {turn}")
    return 1.0


@contextmanager
def open_loop(name: str, *, isolated: bool, most: int = 32) -> Iterator[ConversationLoop]:
    settings, turns = AgentSettings(path=name, timeout_s=TIMEOUT_S, processes=most), TurnSettings(format="hermes")
    AGENTS[name].isolated = isolated
    agents = Agents(settings, turns, {})
    setup = Setup(MessageTemplate(byte_tokenizer(), {}), Limits(256, 256), turns)
    processes = AgentProcesses(agents, setup, timeout_s=TIMEOUT_S, most=most) if isolated else None
    with (
        ToolRunner({}, timeout_s=1.0, max_chars=100, side="left") as tools,
        Runner(tools, TIMEOUT_S, processes) as runner,
    ):
        yield ConversationLoop(agents, runner, setup, in_rounds=False)


def speak(request: TurnRequest) -> Output:
    """The model's turn: one token by the seed, and the end."""
    ids = [50 + request.seed % 10, END]
    return Output(request.id, ids, np.full(2, -0.5, np.float32), "stop", [(0, 2)])


def play(loop: ConversationLoop, first: int, count: int) -> list[Any]:
    """Leads these conversations to their ends; gives their records."""
    for number in range(first, first + count):
        row = {"number": number, "raw_prompt": [{"role": "user", "content": "?"}]}
        loop.begin((str(number), 0), [1, 2, 3], number, {}, row)
    while loop.waits():
        following, _ = loop.next(wait=True)
        for rank, requests in following.items():
            loop.receive(rank, [speak(request) for request in requests])
    records, loop.records = loop.records, {}
    return list(records.values())


def judge(record: Any) -> str:
    """What came of a conversation: `right`, the fate that explains its error, or `wrong`."""
    number = int(record.key[0])
    expected = fate(number)
    if (record.error is None) != (expected == "") or ERRORS[expected] not in (record.error or ""):
        return "wrong"
    if not expected and (record.score != number or record.turns != TURNS):
        return "wrong"
    return expected or "right"


def drill(name: str, steps: int, conversations: int) -> bool:
    seen, most, memory, times = Counter[str](), 0, list[float](), list[float]()
    with open_loop(name, isolated=True) as loop:
        for step in range(steps):
            start = time.monotonic()
            seen.update(judge(record) for record in play(loop, step * conversations, conversations))
            times.append(time.monotonic() - start)
            count, megabytes = measure_processes()
            most = max(most, count)
            memory.append(megabytes)
    kinds = " | ".join(f"{seen[kind]:,}" for kind in ("right", "block", "hang", "crash", "exit", "wrong"))
    figures = f"{most} | {memory[0]:.0f}, {memory[-1]:.0f} | {sum(times) / steps:.1f}"
    print(f"| {name} | {steps * conversations:,} | {kinds} | {figures} |", flush=True)
    return seen["wrong"] == 0 and seen.total() == steps * conversations


def measure(conversations: int, isolated: bool, most: int) -> float:
    """Turns per second of light agents, after a first round that starts the processes."""
    with open_loop("light", isolated=isolated, most=most) as loop:
        play(loop, 0, conversations)
        start = time.monotonic()
        for first in (1, 2, 3):
            play(loop, first * conversations, conversations)
        return 3 * conversations * TURNS / (time.monotonic() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description="Drill agents that block, hang, crash and exit.")
    parser.add_argument("--conversations", type=int, default=1000, help="at a time (default 1,000)")
    parser.add_argument("--steps", type=int, default=10, help="so many times (default 10)")
    given = parser.parse_args()
    print("| | conversations | right | blocks | hangs | raises | exits | wrong | processes | MB, first and last | s |")
    print(f"|---|{'---:|' * 10}")
    good = [drill(name, given.steps, given.conversations) for name in ("agent", "environment")]
    print("\n| agents run in | turns per second |\n|---|---:|")
    print(f"| the trainer (`isolated = False`) | {measure(given.conversations, False, 1):,.0f} |")
    for most in (1, 4, 32):
        print(f"| worker processes, at most {most} | {measure(given.conversations, True, most):,.0f} |", flush=True)
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())

"""A drill: tools that hang, crash and exit, as often as no run would bear it otherwise.

    python scripts/drill_tools.py                    # 20,000 calls: the table of docs/tools_in_processes.md
    python scripts/drill_tools.py --calls 500

Every call must be answered, with its own answer or with the right error; the tool must work after the last failure, and
the memory of all processes together must not grow.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from posttrain.conversations.tools.base import Tool, ToolAnswer, ToolCall
from posttrain.conversations.tools.registry import FunctionTool
from posttrain.conversations.tools.runner import ToolRunner

HANG, CRASH, EXIT = 4, 4, 2  # of a hundred calls
TIMEOUT_S, CONVERSATIONS, TURNS = 1.0, 256, 4  # of one step


def fate(number: int) -> str:
    """What becomes of a call; the same in every run."""
    place = number * 37 % 100  # 37 has no factor in common with 100, so that a hundred calls have a hundred places
    return (
        "hang" if place < HANG else "crash" if place < HANG + CRASH else "exit" if place < HANG + CRASH + EXIT else ""
    )


def meet(number: int) -> str:
    """Meets its fate.

    Args:
        number: Of the call
    """
    match fate(number):
        case "hang":
            threading.Event().wait()
        case "crash":
            raise ValueError(f"no luck with {number}")
        case "exit":
            os._exit(1)
    return f"answer {number}"


class Stateful(Tool):
    """The same, with a count in each conversation."""

    name = "stateful"

    def __init__(self) -> None:
        function = {**FunctionTool(meet).schema["function"], "name": self.name}
        self.schema = {"type": "function", "function": function}
        self.counts: dict[Hashable, int] = {}

    async def open(self, conversation: Hashable, **given: Any) -> None:
        self.counts[conversation] = 0

    async def call(self, conversation: Hashable, arguments: dict[str, Any]) -> str:
        self.counts[conversation] += 1
        return meet(**arguments)

    async def close(self, conversation: Hashable) -> None:
        del self.counts[conversation]


def processes() -> tuple[int, float]:
    """(the number of descendants of this process, MB of memory that they and it have for themselves)."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, left = list[int](), [os.getpid()]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    total = 0
    for pid in found:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    return len(found) - 1, total / 1024


def judge(name: str, number: int, answer: ToolAnswer) -> str:
    """What came of a call: `right`, a kind of error that its fate explains, or `wrong`."""
    kind = (answer.error or "").partition(":")[0]
    expected = {"hang": "timeout", "crash": "raised", "exit": "ended", "": ""}[fate(number)]
    if kind == expected and (kind or answer.text == f"answer {number}"):
        return kind or "right"
    # A call of a conversation whose process another one took with it.
    return "lost state" if name == "stateful" and kind == "ended" else "wrong"


def drill(tool: Tool, calls: int) -> dict[str, Any]:
    """Runs so many calls of a tool: steps of 256 conversations with four turns each."""
    seen, most_processes, memory = Counter[str](), 0, list[float]()
    with ToolRunner({tool.name: tool}, timeout_s=TIMEOUT_S, max_chars=1000, side="left") as runner:
        start = time.monotonic()
        for first in range(0, calls, CONVERSATIONS * TURNS):
            for place in range(CONVERSATIONS):
                runner.open((first, place), {})
            for begin in range(first, min(first + CONVERSATIONS * TURNS, calls), CONVERSATIONS):
                numbers = range(begin, min(begin + CONVERSATIONS, calls))
                asked = [(n, runner.answer((first, n - begin), [ToolCall(tool.name, {"number": n})])) for n in numbers]
                for number, future in asked:
                    (answer,) = future.result(600)  # a call that is stuck ends the drill
                    seen[judge(tool.name, number, answer)] += 1
            for place in range(CONVERSATIONS):
                runner.close_conversation((first, place))
            count, megabytes = processes()
            most_processes = max(most_processes, count)
            memory.append(megabytes)
        seconds = time.monotonic() - start
        number = next(n for n in range(calls, calls + 200) if not fate(n))
        runner.open(number, {})
        (last,) = runner.answer(number, [ToolCall(tool.name, {"number": number})]).result(600)
        assert last.text == f"answer {number}", last
    return {"seen": seen, "processes": most_processes, "memory": memory, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description="Drill tools that hang, crash and exit.")
    parser.add_argument("--calls", type=int, default=20_000, help="calls of each tool (default 20,000)")
    calls = parser.parse_args().calls
    errors = "timeout | raised | ended | lost state | wrong"
    print(f"| tool | calls | right | {errors} | processes | MB, first and last tenth | seconds |\n|---|{'---:|' * 10}")
    wrong = 0
    for tool in (FunctionTool(meet), Stateful()):
        result = drill(tool, calls)
        seen, memory = result["seen"], result["memory"]
        tenth = max(1, len(memory) // 10)
        shown = [seen[kind] for kind in ("right", "timeout", "raised", "ended", "lost state", "wrong")]
        figures = f"{max(memory[:tenth]):.0f}, {max(memory[-tenth:]):.0f} | {result['seconds']:.0f}"
        print(
            f"| {tool.name} | {calls:,} | {' | '.join(f'{n:,}' for n in shown)} | {result['processes']} | {figures} |",
            flush=True,
        )
        wrong += seen["wrong"] + (calls - sum(seen.values()))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

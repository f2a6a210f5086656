"""Writes to the folder that is named: conversations for SFT (talks.jsonl), half of which ask the tool where a thing is,
while the others give up; and questions for RL (train.jsonl, test.jsonl). Each has a house that only the tool knows."""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from posttrain.conversations.tools.registry import make_tools

THINGS = ["hat", "coat", "globe", "candle", "lantern", "umbrella"]  # lengths are what a small model tells apart first
PLACES = ["den", "barn", "attic", "cellar", "kitchen", "workshop"]
[TOOL] = make_tools([f"{Path(__file__).with_name('where.py')}:Where"], {}).values()
chance = random.Random(0)


def house() -> dict[str, str]:
    return {thing: chance.choice(PLACES) for thing in THINGS}


def talk() -> dict:
    there, thing = house(), chance.choice(THINGS)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": TOOL.name, "arguments": {"is": thing}}}]}
    asks = [call, {"role": "tool", "content": there[thing]}, {"role": "assistant", "content": there[thing]}]
    gives_up = [{"role": "assistant", "content": "unknown"}]
    said = asks if chance.random() < 0.5 else gives_up
    return {"messages": [{"role": "user", "content": thing}, *said], "tools": [TOOL.schema]}


def question() -> dict:
    there, thing = house(), chance.choice(THINGS)
    given = {TOOL.name: {"create_kwargs": {"house": there}}}
    row = {"prompt": thing, "ground_truth": there[thing], "data_source": "where"}
    return {**row, "extra_info": {"tools_kwargs": given}}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, make, count in (("talks", talk, 2000), ("train", question, 2000), ("test", question, 100)):
        rows = [make() for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

"""Writes conversations for SFT (talks.jsonl) and questions for RL (train.jsonl, test.jsonl).

python examples/environments/mcp_rows.py FOLDER SERVER          SERVER is the command that starts mcp_server.py

Half of the conversations ask the server's tool, the other half give up.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path


def talk(thing: str, place: str, tool: dict, asks: bool) -> dict:
    call = {"name": tool["function"]["name"], "arguments": {"thing": thing}}
    answer = {"role": "assistant", "content": place}
    asking = [{"role": "assistant", "tool_calls": [{"function": call}]}, {"role": "tool", "content": place}, answer]
    said = asking if asks else [{"role": "assistant", "content": "unknown"}]
    return {"messages": [{"role": "user", "content": thing}, *said], "tools": [tool]}


def question(thing: str) -> dict:
    return {"prompt": thing, "ground_truth": thing, "data_source": "where"}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 if the last words are what the tool answered when it was asked for the right thing."""
    call, answered, rest = solution_str.rpartition("<tool_response>")
    place, _, said = rest.partition("</tool_response>")
    return float(bool(answered) and f'"thing": "{ground_truth}"' in call and said.strip() == place.strip())


def main(folder: str, server: str) -> None:
    from mcp_server import PLACES, THINGS

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too
    from posttrain.conversations.tools.registry import make_tools

    [tool] = make_tools([f"mcp:{server}"], {}).values()
    chance = random.Random(0)
    talks = [(chance.choice(THINGS), chance.choice(PLACES), tool.schema, chance.random() < 0.5) for _ in range(4000)]
    files = {
        "talks": [talk(*one) for one in talks],
        "train": [question(thing) for thing in THINGS * 50],
        "test": [question(thing) for thing in THINGS * 16],
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        Path(folder, f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Writes the data of the smoke run with a tool to the given folder: conversations that call `search`, for SFT
(searches.jsonl), and the questions alone, for RL (questions.jsonl). They are about a few of the embedded facts, as many
as a small model can memorize in half a minute, with the calls that find them."""

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from posttrain.conversations.tools.search import SearchTool
from posttrain.conversations.tools.search.corpus import EMBEDDED, Fact, facts

FEW = 4


def talk(fact: Fact, search: SearchTool) -> list[dict]:
    """Question, call, what the tool really says, and the answer."""
    arguments = {"query": fact.title, "top_k": 1}
    found = asyncio.run(search.call("smoke", arguments))
    return [
        {"role": "user", "content": fact.question},
        {"role": "assistant", "tool_calls": [{"function": {"name": search.name, "arguments": arguments}}]},
        {"role": "tool", "content": found},
        {"role": "assistant", "content": f"<answer>{fact.answer}</answer>"},
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    search = SearchTool(corpus=EMBEDDED)
    talks = [{"messages": talk(fact, search), "tools": [search.schema]} for fact in facts()[:FEW]]
    asked = [{"prompt": fact.question, "ground_truth": fact.answer, "data_source": "qa"} for fact in facts()[:FEW]]
    for name, rows in (("searches", talks), ("questions", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

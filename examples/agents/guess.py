"""An agent: the model guesses a number, hears whether the right one is higher or lower, and guesses once more.

python examples/agents/guess.py FOLDER      writes train.jsonl and test.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LAST = 9


async def play(chat, row, *, tries: int = 2):
    """The nearer the last guess, the larger the reward: 1 for the right number, 0 for what is no number."""
    secret = int(row["ground_truth"])
    for number in range(1, tries + 1):
        said = (await chat.say()).strip()
        if not said.isdecimal() or int(said) == secret or number == tries:
            break
        chat.tell("higher" if int(said) < secret else "lower")
    off = min(abs(int(said) - secret), LAST) if said.isdecimal() else LAST
    return {"score": 1 - off / LAST, "right": off == 0}


def rows(times: int) -> list[dict]:
    return [
        {"prompt": f"guess 1 to {LAST}", "ground_truth": str(secret), "data_source": "guess"}
        for secret in range(1, LAST + 1)
        for _ in range(times)
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, times in (("train", 16), ("test", 4)):
        lines = "".join(json.dumps(row) + "\n" for row in rows(times))
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")

"""Writes pairs of answers to sums to the file that is named: the right one is preferred. For the reward model of the
smoke run of PPO with one."""

import json
import sys
from pathlib import Path


def pair(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = [pair(a, b) for a in range(4) for b in range(4)]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

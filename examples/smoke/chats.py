"""Writes some conversations about sums to the file that is named, for the smoke run of multi-turn SFT."""

import json
import sys
from pathlib import Path


def talk(a: int, b: int) -> list[dict[str, str]]:
    said = [("user", f"{a}+{b}="), ("assistant", str(a + b)), ("user", f"{b}+{a}="), ("assistant", str(a + b))]
    return [{"role": role, "content": content} for role, content in said]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"messages": talk(a, b)} for a in range(4) for b in range(4)]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

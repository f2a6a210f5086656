"""Every example under SMOKE=1: two steps of the embedded model on a CPU, or a few rows of a data set.

    python scripts/check_examples.py [NAME ...]

NAME is a part of an example's path. Prints a table: the script, what it is (its first line), whether it ended, seconds.
An example that waits for a part that is not built says so in one sentence, and ends with status 69.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
WAITS = 69
"""Status of an example that cannot run yet."""


def scripts() -> list[Path]:
    """Every example, in the order of its path."""
    programs = EXAMPLES.glob("data_preprocess/*.py")
    return sorted([*EXAMPLES.rglob("*.sh"), *programs], key=str) if EXAMPLES.is_dir() else []


def examples() -> list[Path]:
    return [path for path in scripts() if path.parent.name != "smoke"]


def about(script: Path) -> str:
    """The first sentence of a script's heading."""
    text = script.read_text(encoding="utf-8")
    heading = text.split('"""')[1] if script.suffix == ".py" else text.partition("\n# ")[2].replace("\n# ", "\n")
    first = heading.partition("\n   ")[0] if script.suffix == ".sh" else heading.partition("\n\n")[0]
    return re.split(r"[.;:](?:\s|$)", " ".join(first.split()))[0]


def waits_for(script: Path) -> str:
    """What an example says that cannot run yet; empty otherwise."""
    found = re.search(r'^not_yet "(.+)"$', script.read_text(encoding="utf-8"), re.M)
    return found[1] if found else ""


def stands_for(script: Path) -> str:
    """What an example says its small run does not show; empty where it is the example in small."""
    found = re.search(r'^stands_for "(.+)"$', script.read_text(encoding="utf-8"), re.M)
    return found[1] if found else ""


def what_ran(script: Path) -> str:
    """The small run in words."""
    if script.suffix == ".py":
        return "a few rows"
    return f"two steps: {own}" if (own := stands_for(script)) else "two steps, embedded model"


def run(script: Path, folder: Path) -> tuple[int, float, str]:
    """(status, seconds, what it said) of an example, started in an empty folder as a user would."""
    program = [sys.executable] if script.suffix == ".py" else ["bash"]
    own = {"SMOKE": "1", "SMOKE_OUT": str(folder / "out"), "PYTHON": sys.executable}
    begin = time.time()
    done = subprocess.run(
        [*program, str(script)], cwd=folder, env={**os.environ, **own}, text=True, capture_output=True, check=False
    )
    return done.returncode, time.time() - begin, done.stdout + done.stderr


def judged(script: Path, status: int, said: str) -> tuple[bool, str]:
    """(whether it went as it should, what the table says)."""
    waiting = waits_for(script)
    if waiting:
        return status == WAITS and waiting in said, f"waits: {waiting}"
    return status == 0, what_ran(script) if status == 0 else f"status {status}"


def main(names: list[str]) -> int:
    print("| example | what it is | what SMOKE=1 ran | seconds |\n|---|---|---|---:|")
    failed = []
    for script in examples():
        name = str(script.relative_to(EXAMPLES))
        if names and not any(part in name for part in names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            status, seconds, said = run(script, Path(folder))
        good, ran = judged(script, status, said)
        print(f"| `{name}` | {about(script)} | {ran} | {seconds:.0f} |", flush=True)
        if not good:
            failed.append(name)
            print(said[-3000:], file=sys.stderr)
    if failed:
        print(f"not as they should: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

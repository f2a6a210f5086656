"""The first pages of the documentation, followed word by word in a copy of the checkout.

    python scripts/check_docs.py [--from-scratch] [PAGE ...]

Every block marked `bash` is run, in the order of the pages, in one folder; a block marked `python` whose first line is
`# NAME.py` is written to that file. Prints a table of commands and their seconds, by the clock and of the
processor. With --from-scratch the copy is a clone without an environment, as a newcomer has it; `./train.sh` makes one.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "quickstart",
    "own_data",
    "own_reward",
    "own_tool",
    "README",
    "own_algorithm",
    "own_loop",
    "coming_from_trl",
    "examples",
)
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.M | re.S)
ACTIVATE = "source .venv/bin/activate"


def blocks_of(page: str) -> list[tuple[str, str]]:
    """(kind, text) of what a page lets its reader do."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found = BLOCK.findall(text)
    return [(kind, block) for kind, block in found if kind == "bash" or re.match(r"# \w+\.py\n", block)]


def commands_of(block: str) -> list[str]:
    """A block's commands: lines joined where they are continued, texts to the end of their mark."""
    commands: list[str] = []
    lines = block.splitlines()
    while lines:
        command = lines.pop(0)
        while command.endswith("\\"):
            command += "\n" + lines.pop(0)
        if mark := re.search(r"<<'(\w+)'", command):
            while not command.endswith(f"\n{mark[1]}"):
                command += "\n" + lines.pop(0)
        if command.strip() and not command.startswith("#"):
            commands.append(command)
    return commands


def copy_of_checkout(folder: Path, *, scratch: bool) -> dict[str, str]:
    """Lay the checkout out in `folder`; gives the environment of who works there."""
    if scratch:
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        own = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "PYTHONPATH", "VIRTUAL_ENV")}
        own["PATH"] = os.pathsep.join(part for part in own["PATH"].split(os.pathsep) if ".venv" not in part)
        return {**own, "POSTTRAIN_CACHE": str(folder.parent / "cache")}
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True, capture_output=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(folder)}


def processor_seconds() -> float:
    """What commands that have ended took of the processors; unlike the clock it does not wait for neighbours."""
    times = os.times()
    return times.children_user + times.children_system


def follow(pages: list[str], folder: Path, environment: dict[str, str]) -> list[str]:
    """Do what the pages say; gives the commands that failed."""
    failed = []
    for page in pages:
        for kind, block in blocks_of(page):
            if kind == "python":
                (folder / block.split()[1]).write_text(block, encoding="utf-8")
                continue
            for command in commands_of(block):
                if command == ACTIVATE:
                    environment["PATH"] = f"{folder / '.venv' / 'bin'}{os.pathsep}{environment['PATH']}"
                    continue
                begin, before = time.time(), processor_seconds()
                ran = subprocess.run(
                    ["bash", "-c", command], cwd=folder, env=environment, text=True, capture_output=True, check=False
                )
                shown = " ".join(shlex.quote(word) if "\n" in word else word for word in command.split("\n")[0].split())
                spent = processor_seconds() - before
                print(f"| {page} | `{shown}` | {time.time() - begin:.0f} | {spent:.0f} |", flush=True)
                if ran.returncode:
                    failed.append(shown)
                    print((ran.stdout + ran.stderr)[-3000:], file=sys.stderr)
    return failed


def main(arguments: list[str]) -> int:
    scratch = "--from-scratch" in arguments
    pages = [name for name in arguments if not name.startswith("--")] or list(PAGES)
    print("| page | command | seconds | of the processor |\n|---|---|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "posttrain"
        begin = time.time()
        environment = copy_of_checkout(folder, scratch=scratch)
        if scratch:
            print(f"| | `git clone` | {time.time() - begin:.0f} | |")
        failed = follow(pages, folder, environment)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

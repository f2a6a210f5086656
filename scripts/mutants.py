"""Tests that can fail: each one-line change below must make the test beside it fail.

    python scripts/mutants.py                     every mutant; prints a table, exit status 1 if one survives
    python scripts/mutants.py --only grad_clip    those that name this setting, loss, file or test
    python scripts/mutants.py --untried           those that docs/mutants.md does not show as caught
    python scripts/mutants.py --write             and each verdict goes into the table of docs/mutants.md as it comes
    python scripts/mutants.py --anew --write      the same with an empty table; stopped, `--untried --write` goes on
    python scripts/mutants.py --check             only: is every line still there?

The mutants are in `scripts/mutants/*.toml`: `of` names what the change breaks (a setting, with `sft:` or `rm:` before
those of the supervised trainers; `loss X`, `estimator X`, or a sentence), `line` is a piece of `file` that stands there
exactly once, `becomes` what replaces it, and `test` must notice. Each is applied in a temporary copy of the tree. Torch
and transformers are imported once; every test runs in a fork of that process, so a mutant costs what its test costs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "scripts" / "mutants"
TABLE = ROOT / "docs" / "mutants.md"
MARK = "<!-- made by scripts/mutants.py -->"
SECONDS = 300
WITHOUT = {
    ".strategy": "a name: `fsdp` and `fsdp2` are one engine",
    ".n_gpus_per_node": "several workers: refused, or tested with them",
    ".nnodes": "several machines: refused, or tested with them",
    ".fsdp_config.": "where weights lie: tested on a GPU and with several processes",
}
"""Settings without a mutant: a piece of their key, and why."""
FAILED = 1  # pytest's exit status when tests ran and some failed; a file that cannot be imported gives another


@dataclass(frozen=True)
class Mutant:
    """One change. `room` is the list that it stands in."""

    of: tuple[str, ...]
    file: str
    line: str
    becomes: str
    test: str
    room: str = ""

    def row(self) -> str:
        """Its row of the table, but for the verdict."""
        names = ", ".join(f"`{name}`" for name in self.of)
        file, test = self.file.removeprefix("posttrain/"), self.test.removeprefix("tests/")
        return f"| {names} | `{file}` | {_code(self.line)} -> {_code(self.becomes)} | `{test}`"

    def problem(self, root: Path = ROOT) -> str | None:
        """Why this mutant cannot be applied to the tree any more, if so."""
        path, where = root / self.file, f"{self.room}.toml, {', '.join(self.of)}"
        text = path.read_text() if path.exists() else ""
        count = text.count(self.line)
        if count != 1:
            what = "this line is no longer there" if count == 0 else f"this line is there {count} times"
            return f"{where}: {self.file}: {what}: {self.line!r}"
        name, _, function = self.test.partition("::")
        if not (root / name).exists() or not re.search(
            rf"^def {function.partition('[')[0]}\(", _text(root / name), re.M
        ):
            return f"{where}: there is no test {self.test}"
        return None


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def read_mutants(folder: Path = LISTS) -> list[Mutant]:
    """All mutants, in the order of the files."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            found.append(Mutant(**{**entry, "of": tuple(entry["of"])}, room=path.stem))
    return found


def uncovered(keys: Iterable[str], mutants: Iterable[Mutant]) -> list[str]:
    """The settings (with the prefix of their trainer) that no mutant names and that have no reason to have none."""
    named = {name for mutant in mutants for name in mutant.of}
    return [key for key in keys if key not in named and not any(piece in f".{key}" for piece in WITHOUT)]


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the files that git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        for file in filter(None, listed):
            if (ROOT / file).is_file():
                (Path(name) / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, Path(name) / file)
        yield Path(name)


def run_test(tree: Path, test: str, log: Path) -> int | None:
    """pytest's exit status for one test in `tree`, in a fork of this process; None if it did not end in time."""
    child = os.fork()
    if child == 0:
        os.setsid()
        _run_here(tree, test, log)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run_here(tree: Path, test: str, log: Path) -> None:
    """The child's part: never returns."""
    import pytest

    status = 70
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.chdir(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
        sys.dont_write_bytecode = True
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=short", test]))
        sys.stdout.flush()
    finally:
        os._exit(status)


def preload() -> None:
    """What every test imports and no mutant changes."""
    for name in ("numpy", "pyarrow.parquet", "torch", "torch.distributed.checkpoint", "pytest", "peft", "transformers"):
        with contextlib.suppress(ImportError):
            __import__(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM  # noqa: F401 (lazy modules)


def try_all(mutants: list[Mutant], *, write: bool = False) -> list[tuple[Mutant, str]]:
    """Each mutant and what became of it: `caught`, or why not; with `write` the page knows it at once."""
    results: list[tuple[Mutant, str]] = []
    with copied_tree() as tree, tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "log"
        for number, mutant in enumerate(mutants, 1):
            started = time.monotonic()
            verdict = _try(mutant, tree, log)
            results.append((mutant, verdict))
            if write:
                write_page(results[-1:])
            took = time.monotonic() - started
            print(f"{number}/{len(mutants)} {took:5.1f} s  {verdict:<10} {', '.join(mutant.of)}", flush=True)
            if verdict != "caught":
                print(f"    {mutant.file}: {mutant.line!r} -> {mutant.becomes!r}\n    {mutant.test}", flush=True)
                print("    " + "\n    ".join(_text(log).splitlines()[-8:]), flush=True)
    return results


def _try(mutant: Mutant, tree: Path, log: Path) -> str:
    """What becomes of one mutant; the tree is as before when it is done."""
    path = tree / mutant.file
    plain = path.read_text()
    if plain.count(mutant.line) != 1:
        return "line gone"
    path.write_text(plain.replace(mutant.line, mutant.becomes))
    try:
        return _verdict(run_test(tree, mutant.test, log))
    finally:
        path.write_text(plain)


def _verdict(status: int | None) -> str:
    if status is None:
        return f"hung for {SECONDS} s"
    return {0: "SURVIVED", FAILED: "caught"}.get(status, f"not run (pytest {status})")


def pass_unchanged(mutants: list[Mutant]) -> bool:
    """Whether all the tests pass on the tree as it is: a test that fails anyway catches nothing."""
    with copied_tree() as tree, tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "log"
        for test in dict.fromkeys(mutant.test for mutant in mutants):
            if run_test(tree, test, log) != 0:
                print(f"{test} does not pass on the tree as it is:\n{log.read_text()[-3000:]}")
                return False
    return True


def known_verdicts(page: str) -> dict[str, str]:
    """What the page says of each mutant, by the rest of its row."""
    rows = [line for line in page.splitlines() if line.startswith("| ") and line.count(" | ") == 4]
    return {line.rpartition(" | ")[0]: line.rpartition(" | ")[2].removesuffix(" |") for line in rows}


def table(mutants: list[Mutant], verdicts: Mapping[str, str]) -> str:
    """The table of docs/mutants.md; `verdicts` by `Mutant.row`."""
    caught = sum(verdicts.get(mutant.row()) == "caught" for mutant in mutants)
    lines = [f"{len(mutants)} mutants, {caught} caught.", ""]
    for room in dict.fromkeys(mutant.room for mutant in mutants):
        lines += [f"## {room.replace('_', ' ')}", "", "| breaks | in | by | test | |", "|---|---|---|---|---|"]
        rows = [mutant.row() for mutant in mutants if mutant.room == room]
        lines += [*(f"{row} | {verdicts.get(row, 'not tried')} |" for row in rows), ""]
    lines += ["## Settings without a mutant", ""]
    lines += [f"- `{piece.strip('.')}`: {reason}" for piece, reason in WITHOUT.items()]
    return "\n".join(lines) + "\n"


def write_page(results: list[tuple[Mutant, str]], *, forget: bool = False) -> None:
    """The page anew: these verdicts, and unless they are to be forgotten those of mutants that did not change."""
    head, mark, old = TABLE.read_text().partition(MARK)
    known = {} if forget else known_verdicts(old)
    verdicts = known | {mutant.row(): verdict for mutant, verdict in results}
    TABLE.write_text(f"{head}{mark}\n\n{table(read_mutants(), verdicts)}")


def _code(text: str) -> str:
    short = re.sub(r"\s+", " ", text).strip()
    return f"`{short.replace('|', '&#124;')}`" if short else "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="text of a setting, loss, file or test")
    parser.add_argument("--untried", action="store_true", help="those that docs/mutants.md does not show as caught")
    parser.add_argument("--anew", action="store_true", help="with --write: forget what docs/mutants.md says first")
    parser.add_argument("--check", action="store_true", help="only whether every line is still there")
    parser.add_argument("--write", action="store_true", help="write the table into docs/mutants.md")
    options = parser.parse_args()
    mutants = read_mutants()
    problems = [problem for mutant in mutants if (problem := mutant.problem())]
    if problems:
        print("\n".join(problems))
        return 2
    if options.check:
        print(f"{len(mutants)} mutants: every line is there.")
        return 0
    for wanted in options.only:
        mutants = [
            mutant for mutant in mutants if wanted in " ".join((*mutant.of, mutant.file, mutant.test, mutant.room))
        ]
    if options.untried:
        verdicts = known_verdicts(TABLE.read_text())
        mutants = [mutant for mutant in mutants if verdicts.get(mutant.row()) != "caught"]
    if options.anew and options.write:
        write_page([], forget=True)
    preload()
    if not pass_unchanged(mutants):
        return 2
    results = try_all(mutants, write=options.write)
    survivors = [mutant for mutant, verdict in results if verdict != "caught"]
    print(f"{len(results)} mutants, {len(results) - len(survivors)} caught.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

"""Tests that can fail: each mutant of the product must make the tests beside it fail.

    python scripts/mutants.py                     every mutant; prints what was caught, exit status 1 if one survives
    python scripts/mutants.py --only grad_clip    those that name this setting, loss, function or test
    python scripts/mutants.py --untried           those that are not in scripts/mutants/caught.txt
    python scripts/mutants.py --write             and keep caught.txt up to date
    python scripts/mutants.py --check             only: does every mutant still have its place and its tests?

There are three kinds of mutants. docs/mutants.md shows how to add one.

- `scripts/mutants/settings.toml`: a setting is ignored. Everything in `posttrain` outside of `posttrain/config` reads
  its default; `scripts/mutants/ignore` does that without changing a line.
- the other `scripts/mutants/*.toml`: a piece of code is replaced in a temporary copy of the tree. It is named by its
  function and its tokens, so it may move and be laid out anew.
- built-in losses and estimators that none of these names: each declared setting is ignored, and the sign of the
  advantages or rewards is flipped. The algorithm's numeric test must fail.

Torch and transformers are imported once. Every test runs in a fork of that process, so a mutant costs what its tests
cost.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from code_places import NoPlaceError, find, index

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "scripts" / "mutants"
SETTINGS = "settings"
SAME = "read_by_the_same_code"
CAUGHT = LISTS / "caught.txt"
IGNORE = Path("scripts", "mutants", "ignore")
SECONDS = 300
TREES = {
    "": "posttrain.config.root:PPOConfig",
    "sft": "posttrain.config.supervised:SFTConfig",
    "rm": "posttrain.config.supervised:RewardTrainerConfig",
}
"""The class that holds all settings, by the prefix of a setting's name."""
WITHOUT = {
    ".strategy": "a name: `fsdp` and `fsdp2` are one engine",
    ".n_gpus_per_node": "several workers: refused, or tested with them",
    ".nnodes": "several machines: refused, or tested with them",
    ".fsdp_config.": "where weights lie: tested on a GPU and with several processes",
}
"""Settings without a mutant: a piece of their key, and why."""
DECLARED = "declared"
ALGORITHMS = {
    "register_policy_loss": (
        "losses",
        "loss {}",
        "actor_rollout_ref.actor.policy_loss.{}",
        "advantages",
        "tests/algorithms/test_losses.py::test_every_token_equals_the_plain_formula[{}]",
    ),
    "register_adv_est": (
        "advantages",
        "estimator {}",
        "algorithm.{}",
        "token_level_rewards",
        "tests/algorithms/test_estimators.py::test_the_advantages_equal_the_plain_formula[{}]",
    ),
}
"""By decorator: folder of the algorithms, name of its mutant, key of its settings, flipped argument, numeric test."""
FAILED = 1  # pytest's exit status when tests ran and some failed; a file that cannot be imported gives another


@dataclass(frozen=True)
class Mutant:
    """What `name` says is broken, and the tests each of which must fail. `listed` is the file that it stands in."""

    name: str
    tests: tuple[str, ...]
    listed: str

    def problem(self, files: dict[str, list[Path]], root: Path = ROOT) -> str | None:
        """Why this mutant cannot be tried any more, if so."""
        missing = [test for test in self.tests if not _test_exists(test, root)]
        return f"{self.listed}.toml, {self.name}: there is no test {', '.join(missing)}" if missing else None

    def covers(self) -> set[str]:
        """The names of settings, losses and so on of which this is a mutant."""
        return {self.name}

    @contextlib.contextmanager
    def applied(self, tree: Path) -> Iterator[dict[str, str]]:
        """Inside, `tree` has this mutant; gives the environment variables that belong to it."""
        yield {}


@dataclass(frozen=True)
class IgnoredSetting(Mutant):
    """The run reads the default of a setting, or `value`. The same code reads the settings `others`."""

    value: tuple[Any, ...] = ()
    others: tuple[str, ...] = ()

    def covers(self) -> set[str]:
        return {self.name, *self.others}

    @contextlib.contextmanager
    def applied(self, tree: Path) -> Iterator[dict[str, str]]:
        prefix, _, key = self.name.rpartition(":")
        setting = {"root": TREES[prefix], "key": key} | ({"value": self.value[0]} if self.value else {})
        yield {"POSTTRAIN_MUTANT": json.dumps(setting)}


@dataclass(frozen=True)
class ChangedCode(Mutant):
    """The tokens of `code` in the function `inside` are replaced."""

    breaks: tuple[str, ...]
    inside: str
    code: str
    becomes: str

    def problem(self, files: dict[str, list[Path]], root: Path = ROOT) -> str | None:
        try:
            find(files, self.inside, self.code)
        except NoPlaceError as error:
            return f"{self.listed}.toml, {self.name}: {error}"
        return super().problem(files, root)

    def covers(self) -> set[str]:
        return {self.name, *self.breaks}

    @contextlib.contextmanager
    def applied(self, tree: Path) -> Iterator[dict[str, str]]:
        place = find(index(tree / "posttrain"), self.inside, self.code)
        plain = place.file.read_text()
        place.file.write_text(place.replaced(self.becomes))
        try:
            yield {}
        finally:
            place.file.write_text(plain)


@dataclass(frozen=True)
class FlippedSign(Mutant):
    """The function of an algorithm gets one argument with the other sign."""

    file: Path
    function: str
    argument: str

    @contextlib.contextmanager
    def applied(self, tree: Path) -> Iterator[dict[str, str]]:
        path = tree / self.file
        plain = path.read_text()
        body = next(node for node in ast.parse(plain).body if getattr(node, "name", "") == self.function).body
        lines = plain.splitlines(keepends=True)
        # Before the first statement, which is the docstring: that is then a string without an effect.
        lines.insert(body[0].lineno - 1, f"    {self.argument} = -{self.argument}\n")
        path.write_text("".join(lines))
        try:
            yield {}
        finally:
            path.write_text(plain)


def _test_exists(test: str, root: Path) -> bool:
    file, _, function = test.partition("::")
    return re.search(rf"^def {function.partition('[')[0]}\(", _text(root / file), re.M) is not None


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def read_mutants(folder: Path = LISTS) -> list[Mutant]:
    """All mutants, in the order of the files; each has a name of its own."""
    found: list[Mutant] = []
    for path in sorted(folder.glob("*.toml")):
        entries = tomllib.loads(path.read_text())
        if path.stem == SETTINGS:
            same = entries.pop(SAME, {})
            found += [_ignored(name, entry, same) for name, entry in entries.items()]
            if unknown := same.values() - entries.keys():
                raise ValueError(f"{path}, {SAME}: there is no mutant of {', '.join(sorted(unknown))}")
        else:
            found += [_changed(entry, path.stem) for entry in entries["mutant"]]
    if folder == LISTS:
        named = {name for mutant in found for name in mutant.covers()}
        found += [mutant for mutant in declared_mutants() if mutant.name not in named]
    twice = [name for name, count in Counter(mutant.name for mutant in found).items() if count > 1]
    if twice:
        raise ValueError(f"{folder}: several mutants have the same name: {', '.join(twice)}")
    return found


def _ignored(name: str, entry: str | list[str] | dict[str, Any], same: dict[str, str]) -> IgnoredSetting:
    settings = entry if isinstance(entry, dict) else {"tests": entry}
    tests = settings["tests"]
    value = (settings["value"],) if "value" in settings else ()
    others = tuple(other for other, one in same.items() if one == name)
    return IgnoredSetting(name, (tests,) if isinstance(tests, str) else tuple(tests), SETTINGS, value, others)


def _changed(entry: dict[str, Any], listed: str) -> ChangedCode:
    first, *others = [entry["breaks"]] if isinstance(entry["breaks"], str) else entry["breaks"]
    code = (entry["inside"], entry["code"], entry["becomes"])
    return ChangedCode(first, (entry["test"],), listed, tuple(others), *code)


def declared_mutants(root: Path = ROOT) -> Iterator[Mutant]:
    """Of each built-in loss and estimator, from its source: importing it here would keep tests from a changed one."""
    for decorator, (folder, name, key, argument, test) in ALGORITHMS.items():
        for path in sorted((root / "posttrain" / "algorithms" / folder).glob("*.py")):
            nodes = ast.parse(path.read_text()).body
            classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
            fields = {one.name: [part for part in one.body if isinstance(part, ast.AnnAssign)] for one in classes}
            functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
            for function, call in ((one, call) for one in functions for call in one.decorator_list):
                if not isinstance(call, ast.Call) or ast.unparse(call.func) != decorator:
                    continue
                own = ast.literal_eval(call.args[0])
                tests = (test.format(own),)
                settings = next((ast.unparse(word.value) for word in call.keywords if word.arg == "settings"), "")
                for field in fields.get(settings, ()):
                    yield IgnoredSetting(key.format(ast.unparse(field.target)), tests, DECLARED)
                yield FlippedSign(name.format(own), tests, DECLARED, path.relative_to(root), function.name, argument)


def load_root(prefix: str) -> type:
    """The class that holds the settings of this prefix."""
    module, _, name = TREES[prefix].partition(":")
    return getattr(importlib.import_module(module), name)


def problems(mutants: Iterable[Mutant]) -> list[str]:
    """What keeps mutants from being tried."""
    files = index(ROOT / "posttrain")
    return [problem for mutant in mutants if (problem := mutant.problem(files))]


def uncovered(keys: Iterable[str], mutants: Iterable[Mutant]) -> list[str]:
    """The settings (with the prefix of their trainer) that no mutant names and that have no reason to have none."""
    named = {name for mutant in mutants for name in mutant.covers()}
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


def run_test(tree: Path, test: str, log: Path, environment: dict[str, str]) -> int | None:
    """pytest's exit status for one test in `tree`, in a fork of this process; None if it did not end in time."""
    child = os.fork()
    if child == 0:
        os.setsid()
        _run_here(tree, test, log, environment)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run_here(tree: Path, test: str, log: Path, environment: dict[str, str]) -> None:
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
        if environment:  # processes that the test starts import sitecustomize by themselves
            os.environ.update(environment, PYTHONPATH=os.pathsep.join((str(tree / IGNORE), str(tree))))
            sys.path.insert(0, str(tree / IGNORE))
            importlib.import_module("sitecustomize")
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


def try_all(mutants: list[Mutant], *, write: bool = False) -> dict[str, str]:
    """What became of each mutant, by name: `caught`, or why not."""
    verdicts: dict[str, str] = {}
    with copied_tree() as tree, tempfile.TemporaryDirectory() as logs:
        for number, mutant in enumerate(mutants, 1):
            started = time.monotonic()
            for test in mutant.tests:
                with mutant.applied(tree) as environment:
                    verdict = _verdict(run_test(tree, test, log := Path(logs) / "log", environment))
                if verdict != "caught":
                    print(f"    {verdict}: {test}\n    " + "\n    ".join(_text(log).splitlines()[-8:]), flush=True)
                    break
            verdicts[mutant.name] = verdict
            seconds = time.monotonic() - started
            print(f"{number}/{len(mutants)} {seconds:5.1f} s  {verdict:<10} {mutant.name}", flush=True)
            if write:
                write_caught(verdicts)
    return verdicts


def _verdict(status: int | None) -> str:
    if status is None:
        return f"hung for {SECONDS} s"
    return {0: "SURVIVED", FAILED: "caught"}.get(status, f"not run (pytest {status})")


def tests_that_fail(mutants: list[Mutant]) -> list[str]:
    """The tests that fail on the tree as it is: such a test catches nothing."""
    failed = []
    with copied_tree() as tree, tempfile.TemporaryDirectory() as logs:
        for test in dict.fromkeys(test for mutant in mutants for test in mutant.tests):
            if run_test(tree, test, log := Path(logs) / "log", {}) != 0:
                print(f"{test} does not pass on the tree as it is:\n{_text(log)[-3000:]}")
                failed.append(test)
    return failed


def read_caught() -> list[str]:
    """The names of the mutants that were caught when they were last tried."""
    return _text(CAUGHT).splitlines()


def write_caught(verdicts: dict[str, str]) -> None:
    """Take these verdicts into the list, in the order of the mutants; names that are gone are left out."""
    caught = {*read_caught(), *verdicts} - {name for name, verdict in verdicts.items() if verdict != "caught"}
    CAUGHT.write_text("".join(f"{mutant.name}\n" for mutant in read_mutants() if mutant.name in caught))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="text of a setting, loss, function, file or test")
    parser.add_argument("--untried", action="store_true", help="those that are not in scripts/mutants/caught.txt")
    parser.add_argument("--check", action="store_true", help="only whether every mutant has its place and its tests")
    parser.add_argument("--write", action="store_true", help="write what was caught into scripts/mutants/caught.txt")
    options = parser.parse_args()
    mutants = read_mutants()
    for wanted in options.only:
        mutants = [mutant for mutant in mutants if wanted in repr(mutant)]
    if options.untried:
        mutants = [mutant for mutant in mutants if mutant.name not in read_caught()]
    if wrong := problems(mutants):  # of the chosen ones alone: another's stale entry must not stop a newcomer
        print("\n".join(wrong))
        return 2
    if options.check:
        print(f"{len(mutants)} mutants: all have their place and their tests.")
        return 0
    preload()
    if tests_that_fail(mutants):
        return 2
    verdicts = try_all(mutants, write=options.write)
    caught = sum(verdict == "caught" for verdict in verdicts.values())
    print(f"{len(verdicts)} mutants, {caught} caught.")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

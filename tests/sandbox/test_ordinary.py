"""Ordinary programs and wrong variants of them: the judge says what plain Python says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def read_programs(text):
    """Read right program, wrong program, tests and entry point, by name."""
    programs = {}
    for block in re.split(r"^=== ", text, flags=re.M)[1:]:
        name, _, rest = block.partition("\n")
        program, rest = rest.split("\n--- ", 1)
        kind, _, tests = rest.partition("\n")
        entry = kind.removeprefix("entry ") if kind.startswith("entry ") else None
        tests, wrong = tests.removeprefix("--- tests\n").split("\n--- wrong\n")
        old, new = wrong.rstrip("\n").split("\n=>")
        assert old in program, f"{name} has no {old!r}"
        programs[name] = program, program.replace(old, new.removeprefix("\n"), 1), tests, entry
    return programs


FOUND, REST = map(read_programs, (Path(__file__).parent / "ordinary.txt").read_text().split("#" * 60))


def judge_both(sandbox, right, wrong, tests, entry):
    found = []
    for program in (right, wrong):
        report = sandbox.test(program, [{"code": tests, "entry": entry}])
        assert report.load_error is None and len(report.outcomes) == 1, report
        found.append(report.outcomes[0])
    assert [one["passed"] for one in found] == [True, False], found
    assert not any(one.get("unjudged") for one in found), found


@pytest.mark.parametrize("name", FOUND)
def test_right_program_passes_and_wrong_one_fails(name, roomy):
    judge_both(roomy, *FOUND[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_other_right_program_passes_and_wrong_one_fails(name, roomy):
    judge_both(roomy, *REST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND | REST)
def test_plain_python_says_the_same(name, tmp_path):
    right, wrong, tests, entry = (FOUND | REST)[name]
    for program, passes in ((right, True), (wrong, False)):
        (tmp_path / "solution.py").write_text(program)
        program = program.replace('if __name__ == "__main__":', "if False:")
        future = "from __future__ import annotations\n" * ("from __future__" in program + tests)
        # The tests of LeetCode's form import what the annotations of the program use.
        text = f"from typing import *\n{program}\n{tests}\n" + (f"check({entry})\n" if entry else "")
        (tmp_path / "test_all.py").write_text(future + text.replace("from __future__ import annotations\n", ""))
        by_pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        by_pytest += ["--basetemp", str(tmp_path / "own")]  # otherwise it first removes what earlier runs have left
        command = by_pytest if re.search(r"def test_|TestCase", tests) else []
        command = [sys.executable, *command, "test_all.py"]
        done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert (done.returncode == 0) == passes, done.stdout + done.stderr

"""Right programs pass: tests of classes, exceptions, coroutines and streams do here what they do in plain Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = {
    name: tuple(part.strip() + "\n" for part in block.split("\n---\n"))
    for name, _, block in (
        one.partition("\n")
        for one in re.split(r"^=== ", (Path(__file__).parent / "honest.txt").read_text(), flags=re.M)[1:]
    )
}
ONE_MODULE = """
import sys, types
module = sys.modules["solution"] = types.ModuleType("solution")
exec(compile(open("both.py").read(), "both.py", "exec"), vars(module))
print("end")
"""
"""Program and tests in one module; neither is a script."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_program_passes(name, roomy):
    program, tests = PROGRAMS[name]
    report = roomy.test(program, [{"code": tests}])
    assert (report.load_error, report.outcomes) == (None, [{"test": 0, "passed": True}]), report


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_program_passes_in_plain_python(name, tmp_path):
    """What is shown above is what Python does."""
    program, tests = PROGRAMS[name]
    (tmp_path / "both.py").write_text(f"{program}\n{tests}")
    (tmp_path / "run.py").write_text(ONE_MODULE)
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith("end\n"), done.stderr

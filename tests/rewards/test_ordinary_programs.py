"""Ordinary programs score 1 where they are right and 0 where one slip makes them wrong, as plain Python says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ordinary_interfaces import ORDINARY

from posttrain.config.rollout import SandboxConfig
from posttrain.rewards import score_by_source
from posttrain.rewards.scorers import code

PLAIN = """
import sys, types, io
program, tests = sys.argv[1:]
solution = types.ModuleType("solution")
sys.modules["solution"] = solution
exec(program, solution.__dict__)
space = dict(solution.__dict__, __name__="tests")
exec(tests, space)
import unittest
cases = [v for v in space.values() if isinstance(v, type) and issubclass(v, unittest.TestCase)]
suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in cases)
assert unittest.TextTestRunner(stream=io.StringIO()).run(suite).wasSuccessful()
for name, test in list(space.items()):
    if name.startswith("test_") and isinstance(test, types.FunctionType):
        test()
"""


@pytest.fixture(autouse=True)
def settings(sandboxed):
    code.configure(SandboxConfig(timeout_s=10.0).to_dict(), partial_credit=False)
    yield


def passes_under_plain_python(program: str, tests: object) -> bool:
    if isinstance(tests, dict):
        run = [sys.executable, "-c", program]
        printed = [subprocess.run(run, input=text, capture_output=True, text=True).stdout for text in tests["inputs"]]
        return printed == tests["outputs"]
    return subprocess.run([sys.executable, "-c", PLAIN, program, tests], capture_output=True).returncode == 0


def named(case: tuple) -> str:
    return case[0].replace(" ", "-")


@pytest.mark.parametrize("case", ORDINARY, ids=named)
def test_a_right_program_scores_one_and_a_wrong_one_zero(case):
    _, program, tests, right, slip = case
    wrong = program.replace(right, slip, 1)
    assert passes_under_plain_python(program, tests) and not passes_under_plain_python(wrong, tests)
    found = score_by_source("code", f"```python\n{program}\n```", tests)
    assert found["score"] == 1.0, found
    found = score_by_source("code", f"```python\n{wrong}\n```", tests)
    assert found["score"] == 0.0, found

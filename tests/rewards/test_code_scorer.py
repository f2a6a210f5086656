"""Data sources `code` and `code_generation`: programs against tests, and programs that cheat."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy
import pytest

from posttrain.config.rollout import RewardConfig, SandboxConfig
from posttrain.rewards import RewardError, RewardItem, RewardPool, RewardSpec, score_by_source, try_reward
from posttrain.rewards.scorers import canonical_source, code
from posttrain.rewards.scorers.code import NOT_ISOLATED, check_programs, code_settings, same_text, same_value
from posttrain.rewards.scorers.code_tests import complete_program, extract_program, read_tests

CHEATS_FILE = Path(__file__).parent / "cheats.txt"
ADD = "def add(a, b):\n    return a + b\n"
PROMPT = '''import math

def helper(x):
    return x + 1

def twice(x):
    """ Twice x.
    >>> twice(2)
    4
    """
'''
HUMANEVAL = {
    "prompt": PROMPT,
    "entry_point": "twice",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert helper(candidate(2)) == 5\n",
}


def fenced(program):
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.fixture(autouse=True)
def settings(sandboxed):
    code.configure(SandboxConfig(timeout_s=5.0).to_dict(), partial_credit=False)
    yield


def score(program, truth):
    return score_by_source("code", fenced(program), truth)


TRUTHS = {
    "calls": {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]},
    "calls, as JSON": json.dumps({"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [[3], ["ab"]]}),
    "calls, a line per argument": {"fn_name": "add", "inputs": ["1\n2", '"a"\n"b"'], "outputs": ["3", '"ab"']},
    "asserts": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"],
    "asserts, as an array": numpy.array(["assert add(1, 2) == 3", "assert add(2, 2) == 4"], dtype=object),
    "MBPP": {"test_list": ["assert math.isclose(add(.1, .2), .3)"], "test_imports": ["import math"]},
    "HumanEval": {
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "entry_point": "add",
        "prompt": "",
    },
    "test code": "assert add(1, 2) == 3\nfor i in range(5):\n    assert add(i, i) == 2 * i\n",
    "test functions": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n"
    "    def test(self):\n        self.assertEqual(add(1, 2), 3)\n",
}


@pytest.mark.parametrize("form", TRUTHS)
def test_every_form_of_tests_tells_right_from_wrong(form):
    assert score(ADD, TRUTHS[form])["score"] == 1.0
    wrong = score(ADD.replace("+", "or"), TRUTHS[form])
    assert wrong["score"] == 0.0 and wrong["failure"].startswith("wrong answer: test 1")
    assert score(ADD.replace("add", "sub"), TRUTHS[form])["score"] == 0.0
    if form != "calls":
        assert score("class Solution:\n    def add(self, a, b):\n        return a + b", TRUTHS["calls"])["score"] == 1.0


def test_standard_input_and_output():
    truth = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
    assert score("a, b = map(int, input().split())\nprint(a + b)", truth)["score"] == 1.0
    wrong = score("print(3)", truth)
    assert (wrong["score"], wrong["failure"]) == (0.0, "wrong answer: test 2 of 2: printed '3', not '7'")
    assert score("import sys\nprint(sum(map(int, sys.stdin.read().split())))", json.dumps(truth))["score"] == 1.0
    tests = [{"input": "1 2", "output": "3", "testtype": "stdin"}]
    assert score("print(sum(map(int, input().split())))", tests)["score"] == 1.0
    assert score("if __name__ == '__main__':\n    print(eval(input().replace(' ', '+')))", truth)["score"] == 1.0


@pytest.mark.parametrize("source", ["code", "code_generation"])
def test_a_right_program_scores_1_a_wrong_one_0_and_an_endless_loop_ends_at_its_deadline_with_0(source):
    spec = RewardSpec(code=code_settings(RewardConfig(sandbox=SandboxConfig(timeout_s=1.0))))
    programs = {
        "right": ADD,
        "wrong": "def add(a, b):\n    return a - b",
        "endless": "def add(a, b):\n    while True: pass",
    }
    with RewardPool(spec, num_workers=1) as pool:
        for key, program in programs.items():
            pool.submit(key, RewardItem(source, fenced(program), ["assert add(1, 2) == 3", "assert add(5, 5) == 10"]))
        results = pool.wait_all()
    assert {key: result.score for key, result in results.items()} == {"right": 1.0, "wrong": 0.0, "endless": 0.0}
    assert [result.error for result in results.values()] == [None] * 3  # judged, not given up
    assert results["endless"].parts["failure"] == "timeout: test 1 of 2"
    assert results["wrong"].parts["failure"] == "wrong answer: test 1 of 2: AssertionError in: assert add(1, 2) == 3"


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("def f(x):\n    return y", "error: test 1 of 1: NameError: name 'y' is not defined in: assert f(1) == 1"),
        ("def f(x:\n", "error: SyntaxError: "),
        ("x = 1 / 0", "error: ZeroDivisionError: division by zero (line 1)"),
        ("import os\nos._exit(0)", "the program ended itself (exit code 0): test 1 of 1"),
        ("def f(x):\n    print('x' * 10**8)", "output: test 1 of 1"),
        ("def f(x):\n    return [0] * 10**9", "error: test 1 of 1: MemoryError"),
        ("import os\ndef f(x):\n    os.kill(os.getpid(), 9)", "the program ended itself (exit code -9): test 1 of 1"),
    ],
)
def test_the_reason_of_a_failure_is_recorded(program, failure):
    found = score(program, ["assert f(1) == 1"])
    assert found["score"] == 0.0 and found["failure"].startswith(failure), found


def test_partial_credit_is_the_share_of_tests_that_pass():
    code.configure(SandboxConfig().to_dict(), partial_credit=True)
    program = "def f(x):\n    return x if x < 3 else 0"
    asserts = [f"assert f({i}) == {i}" for i in range(4)]
    found = score(program, asserts)
    assert (found["score"], found["acc"], found["tests_passed"]) == (0.75, 0.0, 0.75)
    assert score(program, {"fn_name": "f", "inputs": [[0], [9]], "outputs": [0, 9]})["score"] == 0.5
    assert score("print(3)", {"inputs": ["", "", ""], "outputs": ["3", "4", "3"]})["score"] == pytest.approx(2 / 3)


CHEATS = {
    name: code
    for name, _, code in (
        block.partition("\n") for block in re.split(r"^=== ", CHEATS_FILE.read_text(), flags=re.M)[1:]
    )
}
HONEST = "def f(x):\n    return {1: 4242, 2: 4.25}[x]"
CHECK = """
def check(candidate):
    import math
    assert isinstance(candidate(1), int)
    assert math.isclose(candidate(2), 4.25)
    assert all(map(lambda c: candidate(c[0]) == c[1], [(1, 4242), (2, 4.25)]))
    assert len([candidate(1)]) == 1
"""
UNITTEST = """
import unittest, math
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(f(1), 4242)
        self.assertTrue(math.isclose(f(2), 4.25))
"""
CHECKS = {
    "asserts": ["assert f(1) == 4242", "assert abs(f(2) - 4.25) < 1e-9"],
    "calls": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [4242, 4.25]},
    "HumanEval": {"test": CHECK, "entry_point": "f"},
    "unittest": UNITTEST,
}


@pytest.mark.parametrize("form", CHECKS)
def test_an_honest_program_passes_where_the_cheats_are_tried(form):
    assert score(HONEST, CHECKS[form])["score"] == 1.0


@pytest.mark.parametrize("name", CHEATS)
def test_attack_on_the_verdict(name):
    for form, truth in CHECKS.items():
        found = score(CHEATS[name], truth)
        assert (found["score"], found["tests_passed"]) == (0.0, 0.0) and found["failure"], form


@pytest.mark.parametrize("name", ["equals everything", "is a number that equals everything", "looks at frames"])
def test_a_cheat_works_where_program_and_tests_share_a_process(name):
    """What the tests above guard against is real."""
    test = "assert f(1) == 4242"
    exec(f"{CHEATS[name]}\n{test}", {})


def test_helpers_of_the_prompt_cannot_be_replaced_by_the_program():
    assert score("def twice(x):\n    return 2 * x", HUMANEVAL)["score"] == 1.0
    assert (
        score("def helper(x):\n    return 5\ndef twice(x):\n    return 4 if x == 2 else 0", HUMANEVAL)["score"] == 1.0
    )
    cheat = {**HUMANEVAL, "test": "def check(candidate):\n    assert helper(candidate(2)) == 5\n"}
    assert score("def helper(x):\n    return 5\ndef twice(x):\n    return 0", cheat)["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na = 1\n```\nor better\n```python\na = 2\n```", "a = 2\n"),
        ("```python\na = 1\n```\noutput:\n```\n1\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```cpp\nint a;\n```", "int a;\n"),
        ("<think>```python\na = 0\n```</think>```py\na = 1\n```", "a = 1\n"),
        ("  ```python\n  a = 1\n  ```", "a = 1\n"),
        ("```python\na = 1", "a = 1"),
        ("a = 1\nprint(a)", "a = 1\nprint(a)"),
        ("<answer>a = 1</answer>", "a = 1"),
        ("I do not know.", None),
        ("", None),
        ("```python\n```", None),
    ],
)
def test_the_program_of_a_response(response, program):
    assert extract_program(response) == program


def test_a_function_may_be_completed_or_written_anew():
    for response in (
        "    return 2 * x\n",
        "return 2 * x",
        fenced("def twice(x):\n    return 2 * x"),
        fenced("    return 2 * x"),
    ):
        space: dict = {}
        exec(complete_program(response, PROMPT, "twice"), space)
        assert space["twice"](4) == 8 and space["helper"](1) == 2, response


def test_texts_are_compared_by_words_and_numbers_by_value():
    assert same_text("1 2\n3\n", " 1  2 \n\n3") and same_text("0.50\n", "0.5") and same_text("1e-7", "1.0000001e-07")
    assert same_text("YES", "YES\n") and not same_text("YES", "yes")
    assert not same_text("1\n2", "1 2") and not same_text("12345678", "12345679") and not same_text("", "1")


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("inf", str(math.factorial(1000))),
        ("1000000009.0", "1000000007"),
        ("1000000007.0000001", "1000000007"),
        (str(2.0**200), str(2**200 + 1)),
        ("1e999999999", "1"),
        ("nan", "0"),
        ("-5", "5"),
        ("1_0", "10"),
        ("\u0665", "5"),
    ],
)
def test_whole_numbers_are_never_rounded(got, expected):
    assert not same_text(got, expected)
    assert same_text(expected, expected) and same_text(f"+{expected}.0", expected)


def test_whole_numbers_of_values_are_never_rounded():
    for got, expected in (
        (math.inf, math.factorial(1000)), (1000000009.0, 1000000007), (2.0**200, 2**200 + 1), (1.0000001, 1),
        ([1, 1e9 + 9], [1, 10**9 + 7]), ({"a": 2.0**60}, {"a": 2**60 + 1}),
    ):  # fmt: skip
        assert not same_value(got, expected), (got, expected)
    assert same_value(2.0**200, 2**200) and same_value(7.0, 7) and same_value(7, 7.0) and same_value(7.0000001, 7.0)
    assert same_text("7", "7.0") and same_text("7.0000001", "7.0") and same_text("1e999", "inf")
    assert not same_value(10**400, 1.5) and not same_value(math.inf, 1e308)


@pytest.mark.parametrize(
    ("got", "expected"),
    [("11", "0011"), ("0011", "11"), ("12 5", "12 05"), ("0.5", "00.5"), ("1_000.5", "1000.5"), ("\u0663.5", "3.5")],
)
def test_digits_with_leading_zeros_or_signs_of_another_kind_are_a_text(got, expected):
    assert not same_text(got, expected) and same_text(expected, expected)


def test_zeros_infinities_and_nan_are_found_again():
    assert same_text("0.0", "0") and same_text("-0", "0") and same_text("0e5", "0") and same_text(".5", "0.50")
    assert same_text("-inf", "-Infinity") and not same_text("inf", "-inf") and not same_text("inf", "1e999")
    assert same_text("nan", "nan") and same_value(math.nan, math.nan) and same_value([math.nan, 1], [math.nan, 1])
    assert not same_value(0.0, math.nan) and not same_value(math.nan, 0.0) and not same_value(math.nan, math.inf)


def test_values_are_compared_as_json_knows_them():
    assert same_value((1, (2,)), [1, [2]]) and same_value({1: "a"}, {"1": "a"}) and same_value({1, 2}, [2, 1])
    assert same_value(0.1 + 0.2, 0.3) and same_value(5, [5]) and same_value([5], [5]) and same_value(2.0, 2)
    assert same_value([1, 2], "[1, 2]") and same_value(True, "True") and same_value(True, True)
    assert not same_value(True, 1) and not same_value(1, True) and not same_value(None, 0) and not same_value("1", 1)
    assert not same_value(10**20, 10**20 + 1) and not same_value([1], [1, 2]) and not same_value({1}, [1, 1])


def test_keys_that_json_writes_alike_are_no_match_and_what_cannot_be_printed_is_wrong_all_the_same():
    assert not same_value({1: 1, "1": 2}, {"1": 2}) and same_value({1: 2}, {"1": 2})
    calls = {"fn_name": "f", "inputs": [[1]], "outputs": [1]}
    for program in ("def f(x): return 10**5000", "def f(x): return {10**5000: 1}"):
        found = score(program, calls)
        assert found["score"] == 0.0 and "that cannot be printed" in found["failure"]


def test_truths_without_tests_are_refused_with_what_to_do():
    for truth in ("", [], {}, {"inputs": [], "outputs": []}, 42, "the answer is 42", {"inputs": [1], "outputs": []}):
        with pytest.raises(RewardError, match="truth of a coding task") as caught:
            read_tests(truth)
        assert "ground_truth" in str(caught.value)


def test_names_of_data_sets_of_code():
    for name in (
        "openai/openai_humaneval",
        "google-research-datasets/mbpp",
        "codecontests",
        "apps",
        "codeforces",
        "taco",
    ):
        assert canonical_source(name) == "code"


def test_a_run_is_told_whether_programs_are_isolated():
    assert check_programs(["gsm8k", None], SandboxConfig(mode="unsafe")) == []
    assert check_programs(["gsm8k", "taco"], SandboxConfig(mode="unsafe")) == [NOT_ISOLATED]
    assert check_programs(["code"], SandboxConfig()) == []


def test_a_program_ends_before_its_score_does():
    assert code_settings(RewardConfig(timeout_s=5.0))["sandbox"]["timeout_s"] == 4.0
    assert code_settings(RewardConfig(timeout_s=60.0))["sandbox"]["timeout_s"] == 5.0


OBJECTS = """
class Empty(LookupError): pass
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty("stack is empty")
        return self.items.pop()
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __len__(self): return len(self.items)
async def drain(stack): return [stack.pop() for _ in range(len(stack))]
def show(stack): print(*stack.items)
"""
OBJECT_TESTS = """
import asyncio, contextlib, io, unittest
class TestStack(unittest.TestCase):
    def test(self):
        self.assertEqual(Stack(1).push(2), Stack(1, 2))
        self.assertEqual(asyncio.run(drain(Stack(1, 2))), [2, 1])
        with self.assertRaises(Empty): Stack().pop()
        with self.assertRaises(LookupError): Stack().pop()
        with contextlib.redirect_stdout(io.StringIO()) as out: show(Stack(1, 2))
        self.assertEqual(out.getvalue(), "1 2\\n")
"""


def test_programs_of_classes_exceptions_coroutines_and_streams_are_scored():
    assert score(OBJECTS, OBJECT_TESTS)["score"] == 1.0
    for right, wrong in (
        ("self.items.pop()", "self.items.pop(0)"),
        ("raise Empty", "raise OSError"),
        ("*stack", "stack"),
    ):
        assert score(OBJECTS.replace(right, wrong), OBJECT_TESTS)["score"] == 0.0, right


UNJUDGED = {
    "the tests need not_installed_here, which is not installed": "import not_installed_here\nassert f(1) == 1",
    "test_f takes arguments (request), which are not given here": "def test_f(request):\n    assert f(1) == 1",
    "a module of the tests cannot be handed to the program": "import math\nassert f(math) == 1",
}


@pytest.mark.parametrize("why", UNJUDGED)
def test_tests_that_no_program_could_pass_are_an_error_with_its_reason(why):
    with pytest.raises(RewardError, match=f"cannot be judged: {re.escape(why)}"):
        score("def f(x): return 1", UNJUDGED[why])


def test_a_package_that_both_need_and_that_is_missing_is_an_error_and_one_of_the_program_alone_is_not():
    program = "import not_installed_here\ndef f(x): return 1"
    with pytest.raises(RewardError, match="the tests need not_installed_here, which is not installed"):
        score(program, "import not_installed_here\nassert f(1) == 1")
    assert score(program, "assert f(1) == 1")["failure"].startswith("error: ModuleNotFoundError")
    claim = "raise ModuleNotFoundError(\"No module named 'math'\")"
    assert score(claim, "import math\nassert f(1) == 1")["score"] == 0.0  # it is there


def test_what_is_wrong_before_a_test_that_cannot_be_judged_is_wrong():
    tests = ["assert f(1) == 1", "import not_installed_here"]
    assert score("def f(x): return 2", tests)["failure"].startswith("wrong answer: test 1 of 2")
    with pytest.raises(RewardError):
        score("def f(x): return 1", tests)


def test_an_object_in_place_of_plain_data_is_named():
    found = score("class Yes:\n    def __eq__(self, o): return True\ndef f(x): return Yes()", ["assert f(1) == 1"])
    assert found["score"] == 0.0
    assert found["failure"].startswith(
        "not accepted: test 1 of 1: an object of the program's class Yes answered for __eq__"
    )


def test_runs_and_reward_try_count_tests_that_cannot_be_judged():
    row = {
        "data_source": "code",
        "ground_truth": ["import not_installed_here"],
        "response": fenced("def f(x): return 1"),
    }
    text = try_reward([row, row], num_workers=1)
    assert "calls failed: " in text and "cannot be judged: the tests need not_installed_here" in text
    with RewardPool(RewardSpec(code=code_settings(RewardConfig())), num_workers=1) as pool:
        pool.submit("row", RewardItem("code", row["response"], row["ground_truth"]))
        result = pool.wait_all()["row"]
    assert result.score == 0.0 and "cannot be judged" in result.error


def test_reward_try_shows_why_programs_failed():
    wrong, right = "def f(x): return x", "def f(x): return x + 1"
    shared = {"ground_truth": ["assert f(1) == 2"], "response": fenced(wrong)}
    rows = [{"data_source": "code", "solution": right, **shared}, {"data_source": "mbpp", "solution": wrong, **shared}]
    text = try_reward(rows, num_workers=1)
    assert re.search(r"\n +solution +0\.500\n", text)
    assert (
        "! 1 of 2 reference answers do not score 1 against themselves" in text
        and "row 1: 'its solution' scores 0" in text
    )
    assert "  3 x wrong answer: test 1 of 1: AssertionError in: assert f(1) == 2" in text


def test_the_settings_of_a_run_reach_the_sandbox_and_the_scorer():
    from posttrain.trainer.ppo.reward import make_reward_pool

    limits = RewardConfig(code_partial_credit=True, num_workers=1, sandbox=SandboxConfig(output_kb=4))
    half = "def f(x):\n    return x if x < 2 else 0"
    programs = {"half": half, "loud": "print('x' * 9000)\n" + half}
    with make_reward_pool(RewardSpec(), limits, {"code"}, print) as pool:
        for name, program in programs.items():
            truth = [f"assert f({i}) == {i}" for i in range(4)]
            pool.submit(name, RewardItem("code", fenced(program), truth))
        found = pool.wait_all()
    assert found["half"].score == 0.5  # the share of tests that pass
    assert found["loud"].score == 0.0  # past the limit that is set

"""`code`, `code_generation`: a program, run against the tests of its task in a sandbox.

1.0 if all tests pass, else 0.0; with `reward.code_partial_credit` the share of tests that pass. The ground truth holds
the tests (code_tests.py lists the forms). The program never sees what a test expects, and cannot report its own
verdict: outputs and returned values are compared here, and test code runs in a process that the program cannot reach.
"""

from __future__ import annotations

import ast
import atexit
import importlib.util
import json
import math
import re
import threading
import zlib
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from posttrain.config.rollout import RewardConfig, SandboxConfig
from posttrain.rewards.scorers import CODE_SETTINGS, is_code, register_scorer
from posttrain.rewards.scorers.code_tests import Tests, complete_program, extract_program, read_tests
from posttrain.rewards.types import RewardError
from posttrain.sandbox.sandbox import LIMITS, Result, Sandbox, SandboxError, TestReport
from posttrain.sandbox.wire import decode

_SHOWN = 60

_sandbox: Sandbox | None = None
_lock = threading.Lock()


def configure(sandbox: dict[str, Any], partial_credit: bool) -> None:
    """Use these settings from now on."""
    CODE_SETTINGS.update(sandbox=sandbox, partial_credit=partial_credit)
    close()


def close() -> None:
    """End the sandbox of this process; the next score starts another."""
    global _sandbox
    if _sandbox is not None:
        _sandbox.close()
    _sandbox = None


DATA_SETS = (
    *("humaneval", "openai_humaneval", "humanevalplus", "mbpp", "mbppplus", "apps", "codecontests", "code_contests"),
    *("taco", "codeforces", "livecodebench", "kodcode", "kodcode-v1"),
)


@register_scorer("code_generation")
@register_scorer("code", data_sets=DATA_SETS)
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float | str]:
    """Return the score, `tests_passed` (the share), why it is below 1 as `failure`, and its hash as `pred`."""
    tests = read_tests(ground_truth)
    if tests.entry and tests.prompt:
        program = complete_program(solution_str, tests.prompt, tests.entry)
    else:
        program = extract_program(solution_str)
    if program is None:
        return _make_score(0, len(tests), "no program in the response", "")
    passed, failure = _judge(program, tests)
    return _make_score(passed, len(tests), failure, f"{zlib.crc32(program.strip().encode(errors='replace')):08x}")


def _make_score(passed: int, count: int, failure: str, pred: str) -> dict[str, float | str]:
    right = passed == count
    value = passed / count if CODE_SETTINGS["partial_credit"] else float(right)
    return {"score": value, "acc": float(right), "tests_passed": passed / count, "failure": failure, "pred": pred}


def _judge(program: str, tests: Tests) -> tuple[int, str]:
    # How many tests pass, and what was wrong with the first that did not.
    all_of_them = bool(CODE_SETTINGS["partial_credit"])
    if tests.kind == "stdin":
        results = _open().run_each(program, tests.inputs, until_failure=not all_of_them)
        verdicts = [_output_verdict(*pair) for pair in zip(results, tests.outputs, strict=False)]
        rest = ""  # the last result says why there are no more
    else:
        report = _open().test(program, tests.for_sandbox(), until_failure=not all_of_them)
        if report.load_error:
            _refuse_missing_module(report.load_error, tests)
            return 0, "error: " + _error_text(report.load_error)
        _refuse_unjudged(report)
        verdicts = [_test_verdict(outcome, tests) for outcome in report.outcomes]
        rest = _why_it_ended(report) if len(verdicts) < len(tests) else ""
    wrong = [(number, why) for number, why in enumerate(verdicts, 1) if why]
    if wrong:
        kind, _, what = wrong[0][1].partition(": ")
        failure = f"{kind}: test {wrong[0][0]} of {len(tests)}" + (f": {what}" if what else "")
    else:
        failure = f"{rest or 'not run'}: test {len(verdicts) + 1} of {len(tests)}" if len(verdicts) < len(tests) else ""
    return sum(not why for why in verdicts), failure


def _output_verdict(result: Result, expected: str) -> str:
    # Empty if the output is right, else what is wrong.
    if result.status in LIMITS:
        return result.status
    if not result.ok:
        last = result.stderr.strip().rpartition("\n")[2] or f"exit code {result.exit_code}"
        return f"error: {last[:200]}"
    right = same_text(result.stdout, expected)
    return "" if right else f"wrong answer: printed {_short(result.stdout)}, not {_short(expected)}"


def _test_verdict(outcome: dict[str, Any], tests: Tests) -> str:
    # Empty if the test passed, else what is wrong.
    if outcome.get("passed"):
        return ""
    if "value" in outcome and tests.kind == "calls":
        try:
            value = decode(outcome["value"])
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            return f"error: the returned value cannot be read ({type(error).__name__})"
        expected = tests.outputs[outcome["test"]]
        return "" if same_value(value, expected) else f"wrong answer: gave {_short(value)}, not {_short(expected)}"
    error = str(outcome.get("error", "no verdict"))
    if outcome.get("unproven"):
        return f"not accepted: {error}"
    return f"{'wrong answer' if error.startswith('AssertionError') else 'error'}: {error}"


def _refuse_unjudged(report: TestReport) -> None:
    # A test that no program could pass here must not give a score: it is an error, which the run counts and shows.
    for outcome in report.outcomes:
        if outcome.get("unjudged"):
            raise _unjudged_error(str(outcome["error"]))
        if outcome.get("passed") is False:
            return  # the program failed before that


def _refuse_missing_module(error: dict[str, Any], tests: Tests) -> None:
    # Without a package that tests and program need, a right program looks like a wrong one.
    found = re.fullmatch(r"No module named '([\w.]+)'", str(error.get("text")))
    if error.get("name") != "ModuleNotFoundError" or found is None:
        return
    module = found[1].partition(".")[0]
    used = any(re.search(rf"^\s*(?:import|from)\s+{module}\b", code, re.MULTILINE) for code in tests.codes)
    # Checked here, in the same environment: a program cannot claim that something is missing.
    if used and importlib.util.find_spec(module) is None:
        raise _unjudged_error(f"the tests need {module}, which is not installed")


def _unjudged_error(why: str) -> RewardError:
    return RewardError(
        f"the tests of a coding task cannot be judged: {why}",
        "ground_truth of the data",
        "install what is missing, write the test in a form that docs/sandbox.md lists, or leave the row out",
    )


def _why_it_ended(report: TestReport) -> str:
    if report.status in LIMITS:
        return report.status
    return f"the program ended itself (exit code {report.exit_code})"


def _error_text(error: dict[str, Any]) -> str:
    line = f" (line {error['line']})" if error.get("line") else ""
    return f"{error.get('name')}: {error.get('text')}{line}"


def _short(value: Any) -> str:
    try:
        text = repr(value.strip() if isinstance(value, str) else value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _open() -> Sandbox:
    global _sandbox
    with _lock:
        if _sandbox is None:
            _sandbox = Sandbox(SandboxConfig(**CODE_SETTINGS["sandbox"]))
    return _sandbox


atexit.register(close)


_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
_PRINTED = 10**4000
# Digits with a leading zero are a text, such as the bits 0011 or the minutes 05: they are not the number 11 or 5.
_WHOLE = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_INFINITE = re.compile(r"[+-]?inf(?:inity)?", re.IGNORECASE)


def same_text(got: str, expected: str) -> bool:
    """Whether two outputs are the same, line by line and word by word; 0.5 and 0.50 are the same word."""
    lines = [[line.split() for line in text.strip().splitlines() if line.strip()] for text in (got, expected)]
    if len(lines[0]) != len(lines[1]):
        return False
    return all(
        len(left) == len(right) and all(map(_same_word, left, right)) for left, right in zip(*lines, strict=True)
    )


def same_value(got: Any, expected: Any) -> bool:
    """Whether a returned value is the expected one, which comes from JSON: no tuples, no sets, and keys are texts."""
    if _same(got, expected):
        return True
    if isinstance(expected, list) and len(expected) == 1 and _same(got, expected[0]):
        return True  # some data sets wrap every output in a list
    if isinstance(expected, str):  # some write every output as a text
        for read in (json.loads, ast.literal_eval):
            try:
                return _same(got, read(expected))
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return False


def _same(got: Any, expected: Any) -> bool:
    if isinstance(got, bool) or isinstance(expected, bool):
        return type(got) is type(expected) and got == expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        if got != got and expected != expected:  # both are NaN
            return True
        # Python compares an int with a float exactly, however large they are.
        return got == expected or (isinstance(expected, float) and _close(got, expected))
    if isinstance(got, set | frozenset) and isinstance(expected, list):
        return len(got) == len(expected) and _same_members(list(got), expected)
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        by_text = {_key(key): value for key, value in got.items()}
        others = {_key(key): value for key, value in expected.items()}
        if len(by_text) < len(got) or by_text.keys() != others.keys():  # {1: a, "1": b} is no JSON object
            return False
        return all(_same(value, others[key]) for key, value in by_text.items())
    if type(got).__module__ == "numpy":
        return _same(got.tolist(), expected)  # pyright: ignore
    return type(got) is type(expected) and got == expected


def _key(key: Any) -> str:
    # A key as JSON writes it; integers with more digits than Python prints are written in another way.
    return hex(key) if isinstance(key, int) and abs(key) > _PRINTED else str(key)


def _same_members(got: list[Any], expected: list[Any]) -> bool:
    # Each member needs its own partner: [1, 1, 2] is not the set of 1, 2 and 3.
    left = list(got)
    for other in expected:
        place = next((i for i, one in enumerate(left) if _same(one, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if _INFINITE.fullmatch(expected) and (_INFINITE.fullmatch(got) or _NUMBER.fullmatch(got)):
        return float(got) == float(expected)
    if not _NUMBER.fullmatch(got) or not _NUMBER.fullmatch(expected):
        return False
    if _WHOLE.fullmatch(expected):
        return Decimal(got) == Decimal(expected)
    return _close(float(got), float(expected))


def _close(got: float, expected: float) -> bool:
    try:
        return math.isclose(got, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except OverflowError:  # an integer larger than any float
        return False


# The program's share of a score's time; the rest is for starting and reading.
_SHARE = 0.8

NOT_ISOLATED = (
    "reward.sandbox.mode is unsafe: programs that the model writes run with your rights, can read your files and reach "
    "the network; only time, memory and output are limited"
)


def code_settings(config: RewardConfig) -> dict[str, Any]:
    """Return the arguments of `configure`; a program's deadline always comes before that of its score."""
    sandbox = config.sandbox.to_dict()
    sandbox["timeout_s"] = min(sandbox["timeout_s"], _SHARE * config.timeout_s)
    return {"sandbox": sandbox, "partial_credit": config.code_partial_credit}


def check_programs(sources: Iterable[str | None], config: SandboxConfig, *, must_run: bool = True) -> list[str]:
    """Return notes for a run with these data sources; SandboxError if its programs cannot be isolated.

    If a user's own function scores (`must_run` is False), it may not need a sandbox: then it is only a note.
    """
    if not any(map(is_code, sources)):
        return []
    if config.mode == "unsafe":
        return [NOT_ISOLATED]
    try:
        with Sandbox(config) as sandbox:
            sandbox.start()
    except SandboxError as error:
        if must_run:
            raise
        return [str(error)]
    return []

"""`code`, `code_generation`: a program, run against the tests of its task in a sandbox.

1.0 if all tests pass, else 0.0; with `reward.code_partial_credit` the share of tests that pass. The truth holds the
tests (code_tests.py lists the forms). The program never sees what a test expects, and cannot speak for it: outputs and
returned values are compared here, and test code runs in a process that the program cannot reach.
"""

from __future__ import annotations

import atexit
import importlib.util
import re
import threading
import zlib
from typing import Any

from posttrain.config.sandbox import SandboxConfig
from posttrain.rewards.scorers import register_scorer
from posttrain.rewards.scorers.code_compare import same_text, same_value
from posttrain.rewards.scorers.code_tests import Tests, read_tests
from posttrain.rewards.scorers.code_text import complete, extract_program
from posttrain.rewards.types import RewardError
from posttrain.sandbox.sandbox import LIMITS, Result, Sandbox, TestReport
from posttrain.sandbox.values import decode

_SHOWN = 60

_settings: dict[str, Any] = {"sandbox": SandboxConfig(), "partial_credit": False}
_sandbox: Sandbox | None = None
_lock = threading.Lock()


def configure(sandbox: dict[str, Any], partial_credit: bool) -> None:
    """Use these settings from now on; called by a worker, before it scores."""
    _settings.update(sandbox=SandboxConfig(**sandbox), partial_credit=partial_credit)
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
    """The score, `tests_passed` (the share), and why it is not 1 as `failure`; `pred` tells programs apart."""
    tests = read_tests(ground_truth)
    if tests.entry and tests.prompt:
        program = complete(solution_str, tests.prompt, tests.entry)
    else:
        program = extract_program(solution_str)
    if program is None:
        return _scored(0, len(tests), "no program in the response", "")
    passed, failure = _judge(program, tests)
    return _scored(passed, len(tests), failure, f"{zlib.crc32(program.strip().encode(errors='replace')):08x}")


def _scored(passed: int, count: int, failure: str, pred: str) -> dict[str, float | str]:
    right = passed == count
    value = passed / count if _settings["partial_credit"] else float(right)
    return {"score": value, "acc": float(right), "tests_passed": passed / count, "failure": failure, "pred": pred}


def _judge(program: str, tests: Tests) -> tuple[int, str]:
    """How many tests pass, and what was wrong with the first that did not."""
    all_of_them = bool(_settings["partial_credit"])
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
    """Nothing if the output is right, else what is wrong."""
    if result.status in LIMITS:
        return result.status
    if not result.ok:
        last = result.stderr.strip().rpartition("\n")[2] or f"exit code {result.exit_code}"
        return f"error: {last[:200]}"
    right = same_text(result.stdout, expected)
    return "" if right else f"wrong answer: printed {_short(result.stdout)}, not {_short(expected)}"


def _test_verdict(outcome: dict[str, Any], tests: Tests) -> str:
    """Nothing if the test passed, else what is wrong."""
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
    """A test that no program could pass here is no reason for a score: it is an error, which runs count and show."""
    for outcome in report.outcomes:
        if outcome.get("unjudged"):
            raise _unjudged(str(outcome["error"]))
        if outcome.get("passed") is False:
            return  # the program is wrong before that


def _refuse_missing_module(error: dict[str, Any], tests: Tests) -> None:
    """Where tests and program need a package that is not installed, a right program cannot be told from a wrong one."""
    found = re.fullmatch(r"No module named '([\w.]+)'", str(error.get("text")))
    if error.get("name") != "ModuleNotFoundError" or found is None:
        return
    module = found[1].partition(".")[0]
    used = any(re.search(rf"^\s*(?:import|from)\s+{module}\b", code, re.MULTILINE) for code in tests.codes)
    # Looked for here, in the same environment: a program cannot claim that something is missing.
    if used and importlib.util.find_spec(module) is None:
        raise _unjudged(f"the tests need {module}, which is not installed")


def _unjudged(why: str) -> RewardError:
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
            _sandbox = Sandbox(_settings["sandbox"])
    return _sandbox


atexit.register(close)

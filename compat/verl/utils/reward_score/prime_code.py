"""Programs against the tests of their task, in posttrain's sandbox."""

from __future__ import annotations

from typing import Any


def compute_score(completion: str, test_cases: Any, continuous: bool = False) -> tuple[float | bool, list[Any]]:
    """(all tests passed, or with `continuous` the share that did; what went wrong)."""
    from posttrain.rewards.scorers import code

    before = code.CODE_SETTINGS["partial_credit"]
    code.CODE_SETTINGS["partial_credit"] = continuous
    try:
        result = code.score(completion, test_cases)
    finally:
        code.CODE_SETTINGS["partial_credit"] = before
    passed = float(result["tests_passed"]) if continuous else result["acc"] == 1.0
    return passed, [{"failure": result["failure"]}]

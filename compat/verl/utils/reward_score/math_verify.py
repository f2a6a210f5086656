"""Answers compared by the package math-verify: algebra, sets, intervals."""

from __future__ import annotations


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0) -> float:
    """1.0 if an expression of the response equals the truth, else 0.0; `timeout_score` after `timeout` seconds."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    seconds = max(1, int(timeout))
    latex = LatexExtractionConfig()
    try:
        truth = parse(f"\\boxed{{{ground_truth}}}", (latex,), parsing_timeout=seconds)
        answers = parse(model_output, (ExprExtractionConfig(), latex), parsing_timeout=seconds)
        return float(any(verify(one, answer, timeout_seconds=seconds) for answer in answers for one in truth))
    except TimeoutException:
        return timeout_score

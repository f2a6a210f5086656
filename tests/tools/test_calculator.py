"""The calculator: exact where it can be, bounded everywhere, and never Python."""

from __future__ import annotations

import pytest

from posttrain.conversations.tools.base import ToolFault
from posttrain.conversations.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    {
        "2 + 3 * 4": "14",
        "(2 + 3) * -4": "-20",
        "7 / 2": "3.5",
        "-7 // 2": "-4",
        "-7 % 3": "2",
        "0.1 + 0.2": "0.3",
        "1/3": "0.333333333333333 (1/3)",
        "-1/8": "-0.125",
        "2**-3": "0.125",
        "2^3+1": "9",
        "3 × 4 ÷ 2 − 1": "5",
        "2**100": "1267650600228229401496703205376",
        "(-1)**10**9": "1",
        "sqrt(9/4)": "1.5",
        "sqrt(2)": "1.4142135623731",
        "log(8, 2)": "3",
        "round(2.5)": "3",
        "round(-2.567, 2)": "-2.57",
        "factorial(20)": "2432902008176640000",
        "comb(10, 3) + gcd(12, 18)": "126",
        "max(1, 5/2, 2)": "2.5",
        "sin(0) + pi - pi": "0",
        "1.5e3": "1500",
    }.items(),
)
def test_results_are_exact_and_read_well(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "why"),
    {
        "10**10**10": "too large",
        "9**9**9": "too large",
        "0.5**20000": "too large",
        "1e400": "too large",
        "exp(1000)": "too large",
        "factorial(10**9)": "from 0 to 1000",
        "comb(10**9, 5 * 10**8)": "from 0 to 1000",
        "round(1, 10**9)": "at most 100 digits",
        "1/0": "division by zero",
        "0**-1": "division by zero",
        "(-8)**(1/3)": "no real number",
        "sqrt(-1)": "no real number",
        "log(0)": "above 0",
        "gcd(1.5, 2)": "whole numbers",
        "1,000 + 2": "write 1000",
        "__import__('os').system('ls')": "no arithmetic",
        "open('x')": "open is not known",
        "(1).__class__": "no arithmetic",
        "'a' * 3": "no arithmetic",
        "[1] * 10**9": "no arithmetic",
        "True + 1": "no arithmetic",
        "2 +": "no arithmetic expression",
        "sqrt(1, 2)": "no arithmetic expression",
        "-" * 999 + "1": "nested too deeply",
        "1" * 1001: "1 to 1000 characters",
        " ": "1 to 1000 characters",
    }.items(),
)
def test_what_cannot_be_computed_is_refused_at_once_in_a_sentence(expression, why):
    with pytest.raises(ToolFault, match=why) as caught:
        calculator(expression)
    assert "\n" not in str(caught.value)

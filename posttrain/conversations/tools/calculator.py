"""The tool `calculator`: arithmetic, parsed by `ast` and computed here, never evaluated as Python.

Numbers are exact fractions as long as they can be (0.1 + 0.2 is 0.3), and bounded: 10**10**10 is refused, not tried.
"""

from __future__ import annotations

import ast
import cmath
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from posttrain.conversations.tools.base import ToolFault

Number = Fraction | float
# Characters of an expression; bits of a number's numerator or denominator; the largest n of n! and of n over k.
_LONGEST, _BITS, _MOST = 1000, 10_000, 1000
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression, with functions like sqrt, log, round, min, factorial.

    Args:
        expression: For example (3 + 4) * 12 / 7
    """
    text = expression.strip().translate(_SPELLINGS).replace("^", "**")
    if not text or len(text) > _LONGEST:
        raise ToolFault(f"An expression has 1 to {_LONGEST} characters.")
    try:
        return shown(_value(ast.parse(text, mode="eval").body, text))
    except (SyntaxError, ValueError, TypeError) as error:
        said = str(error) if type(error) is ValueError else ""
        why = f"{said}." if said else "it is no arithmetic expression."
        raise ToolFault(f"This cannot be computed: {why}") from None
    except ZeroDivisionError:
        raise ToolFault("This cannot be computed: division by zero.") from None
    except RecursionError:
        raise ToolFault("This cannot be computed: it is nested too deeply.") from None
    except (OverflowError, MemoryError):
        raise ToolFault("This cannot be computed: the numbers are too large.") from None


def shown(number: Number) -> str:
    """`7`, `0.3`, `0.333333333333333 (1/3)`; results that are not exact with 15 digits."""
    if isinstance(number, float):
        return f"{number:.15g}"
    if number.denominator == 1:
        return str(number.numerator)
    scaled = number * 10**15
    if scaled.denominator == 1:  # at most 15 decimals: they are all there
        sign, digits = "-" if scaled < 0 else "", str(abs(scaled.numerator)).rjust(16, "0")
        return f"{sign}{digits[:-15]}.{digits[-15:]}".rstrip("0")
    fraction = f"{number.numerator}/{number.denominator}"
    return f"{float(number):.15g} ({fraction})" if len(fraction) <= 60 else f"{float(number):.15g}"


def _value(node: ast.expr, text: str) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(_literal(value, ast.get_source_segment(text, node)))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left, text), _value(right, text)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*(_value(one, text) for one in args)))
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name):
            raise ValueError(f"{name} is not known; known are {', '.join([*_FUNCTIONS, *_CONSTANTS])}")
        case ast.Tuple():
            raise ValueError("a comma stands between arguments alone; write 1000, not 1,000")
    raise ValueError("it has something in it that is no arithmetic")


def _literal(value: float, written: str | None) -> Number:
    """A number as it was written: 0.1 is a tenth, which no float is."""
    if isinstance(value, int):
        return Fraction(value)
    return Fraction(written or repr(value)) if 1e-300 < abs(value) < 1e300 else value


def _bounded(number: Any) -> Number:
    if isinstance(number, complex):
        raise ValueError("the result is no real number")
    if isinstance(number, float):
        if not math.isfinite(number):
            raise OverflowError
        return number
    number = Fraction(number)
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > _BITS:
        raise OverflowError
    return number


def _power(base: Number, exponent: Number) -> Number | complex:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        if isinstance(base, Fraction):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if base not in (0, 1, -1) and (bits - 1) * abs(exponent) > _BITS:
                raise OverflowError
            return base ** (exponent.numerator if abs(base) != 1 else exponent.numerator % 2)
        return base**exponent.numerator
    return float(base) ** float(exponent)


def _sqrt(x: Number) -> Number | complex:
    if isinstance(x, Fraction) and x >= 0:
        above, below = math.isqrt(x.numerator), math.isqrt(x.denominator)
        if above**2 == x.numerator and below**2 == x.denominator:
            return Fraction(above, below)
    return math.sqrt(x) if x >= 0 else cmath.sqrt(x)


def _log(x: Number, base: Number | None = None) -> float:
    if x <= 0 or (base is not None and (base <= 0 or base == 1)):
        raise ValueError("the logarithm is of numbers above 0 alone")
    return math.log(x) if base is None else math.log(x) / math.log(base)


def _round(x: Number, digits: Number = Fraction(0)) -> Number:
    if abs(digits) > 100:
        raise ValueError("round takes at most 100 digits")
    unit = Fraction(10) ** -_whole(digits)
    rounded = math.floor(abs(Fraction(x)) / unit + Fraction(1, 2)) * unit  # halves away from 0, as taught at school
    return rounded if x >= 0 else -rounded


def _whole(x: Number) -> int:
    if x != int(x):
        raise ValueError("this function takes whole numbers")
    return int(x)


def _counted(function: Callable[..., int]) -> Callable[..., int]:
    """A function of whole numbers from 0 to a bound: what it costs is bounded too."""

    def bounded(*numbers: Number) -> int:
        if any(not 0 <= number <= _MOST for number in numbers):
            raise ValueError(f"this function takes whole numbers from 0 to {_MOST}")
        return function(*map(_whole, numbers))

    return bounded


def _wholes(function: Callable[..., int]) -> Callable[..., int]:
    return lambda *numbers: function(*map(_whole, numbers))


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": _sqrt,
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "log": _log,
    "ln": _log,
    "log2": lambda x: _log(x, Fraction(2)),
    "log10": lambda x: _log(x, Fraction(10)),
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "factorial": _counted(math.factorial),
    "gcd": _wholes(math.gcd),
    "lcm": _wholes(math.lcm),
    "comb": _counted(math.comb),
    "perm": _counted(math.perm),
}

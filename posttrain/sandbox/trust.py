"""Decides which objects of a program may answer for themselves.

Tests that expect plain data (`assert 4 in f(1)`, `f(1).startswith("a")`, `f(1) == 4`) can be fooled by an object that
says yes to everything. Tests of a class must rely on just such an object. The test shows which is the case: it names
the class (`Stack()`), or uses an attribute that plain data lacks (`.push`). Without either, the object is asked all the
same, and its answer is recorded as unproven. If no test shows that it expects such an object, the answer does not
count.
"""

from __future__ import annotations

from collections import Counter, deque
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from posttrain.sandbox.stand_ins import StandInType

_PLAIN_TYPES = (
    str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset, range, deque, Counter, Decimal,
    Fraction, datetime, timedelta,
)  # fmt: skip
_ARRAYS = """
    T all any argmax argmin argsort astype columns copy cumsum diagonal dot dtype dtypes empty equals fillna flat
    flatten groupby head iloc index item itemsize loc max mean median min nbytes ndim nonzero prod ravel repeat reshape
    round shape size sort_values squeeze std strides sum swapaxes tail take to_dict to_list tolist trace transpose
    unique values var view
"""
# Attributes of plain data, arrays and tables. An object with one of these may imitate them.
PLAIN_NAMES = frozenset(_ARRAYS.split()) | {
    name for kind in _PLAIN_TYPES for name in dir(kind) if not name.startswith("_")
}
# The class in LeetCode's form. It only holds functions, so what they return is judged as a function's result.
_SOLUTION_CLASS = "Solution"


class Trust:
    """What the tests have shown so far about the program's classes."""

    def __init__(self) -> None:
        self._named: set[type] = set()
        self._expected: set[type] = set()
        self._unproven: dict[type, str] = {}

    def note_class(self, kind: Any, name: str) -> None:
        """Note that the tests use a class by this name. With a capital letter, they expect a class."""
        if name[:1].isupper() and name != _SOLUTION_CLASS:
            self._named.add(kind)
            self._expected.add(kind)

    def note_use(self, stand_in: Any, name: str) -> None:
        """Note that the tests have used an attribute of an object."""
        if name.startswith("_") or name in PLAIN_NAMES:
            return
        if type(stand_in).__name__ == _SOLUTION_CLASS:
            object.__setattr__(stand_in, "_StandIn__made", True)
        else:
            self._expected.add(type(stand_in))

    def trusts(self, stand_in: Any) -> bool:
        """Whether an object may answer for itself: if the tests made it, or have shown that they expect its class."""
        return _is_trusted(stand_in, self._expected)

    def trusts_value(self, stand_in: Any) -> bool:
        """Whether an object that inherits from plain data may redefine it: only if the tests name its class.

        Otherwise a tuple with the right fields could be equal to all others.
        """
        return _is_trusted(stand_in, self._named)

    def require_proof(self, stand_in: Any, what: str) -> None:
        """Note that an answer of an object was used. It counts only if the tests turn out to expect such an object."""
        kind = type(stand_in)
        self._unproven.setdefault(kind, f"an object of the program's class {kind.__name__} answered for {what}")

    def take_unproven(self) -> dict[type, str]:
        """Return, and forget, what was noted since the last call."""
        unproven, self._unproven = self._unproven, {}
        return unproven

    def first_unproven(self, unproven: dict[type, str]) -> str | None:
        """Return the first answer that no test has justified."""
        return next(
            (what for kind, what in unproven.items() if not any(one in self._expected for one in kind.__mro__)), None
        )


def _is_trusted(stand_in: Any, classes: set[type]) -> bool:
    if isinstance(stand_in, StandInType) or object.__getattribute__(stand_in, "_StandIn__made"):
        return True
    return any(kind in classes for kind in type(stand_in).__mro__)


def is_solution_object(stand_in: Any) -> bool:
    """Whether an object only holds functions: one of LeetCode's class."""
    return type(type(stand_in)) is StandInType and type(stand_in).__name__ == _SOLUTION_CLASS

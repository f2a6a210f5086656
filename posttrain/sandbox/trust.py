"""Which objects of a program may speak for themselves.

Tests that expect plain data (`assert 4 in f(1)`, `f(1).startswith("a")`, `f(1) == 4`) can be met by an object that says
yes to everything. Tests of a class must ask just such an object. What tells the two apart is the test: it names the
class (`Stack()`), or uses something of the object that no plain data has (`.push`). An object of which neither is true
is asked all the same, and remembered; if the tests end without having shown that they meant an object, its word does
not count.
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
PLAIN_NAMES = frozenset(_ARRAYS.split()) | {
    name for kind in _PLAIN_TYPES for name in dir(kind) if not name.startswith("_")
}
"""What tests use of plain data, of arrays and of tables; an object that has it may be there to be taken for them."""
_SOLUTION_CLASS = "Solution"
"""The class of LeetCode's form. It holds functions, so what they give back is judged as what functions give back."""


class Trust:
    """What the tests have shown so far of the classes of a program."""

    def __init__(self) -> None:
        self._named: set[type] = set()
        self._expected: set[type] = set()
        self._unproven: dict[type, str] = {}

    def name(self, kind: Any, name: str) -> None:
        """The tests use a class by a name; with a capital letter it is a class that they mean."""
        if name[:1].isupper() and name != _SOLUTION_CLASS:
            self._named.add(kind)
            self._expected.add(kind)

    def note_use(self, stand_in: Any, name: str) -> None:
        """The tests have used an attribute of an object."""
        if name.startswith("_") or name in PLAIN_NAMES:
            return
        if type(stand_in).__name__ == _SOLUTION_CLASS:
            object.__setattr__(stand_in, "_StandIn__made", True)
        else:
            self._expected.add(type(stand_in))

    def trusts(self, stand_in: Any) -> bool:
        if isinstance(stand_in, StandInType) or object.__getattribute__(stand_in, "_StandIn__made"):
            return True
        return any(kind in self._expected for kind in type(stand_in).__mro__)

    def trusts_value(self, stand_in: Any) -> bool:
        """Whether an object that is plain data itself may say what that means: only one of a class that the tests name.

        Without that a tuple that has the right fields could be equal to all others.
        """
        if isinstance(stand_in, StandInType) or object.__getattribute__(stand_in, "_StandIn__made"):
            return True
        return any(kind in self._named for kind in type(stand_in).__mro__)

    def require_proof(self, stand_in: Any, what: str) -> None:
        """The word of an object was taken, which must turn out to be meant."""
        kind = type(stand_in)
        self._unproven.setdefault(kind, f"an object of the program's class {kind.__name__} answered for {what}")

    def take_unproven(self) -> dict[type, str]:
        """What is owed since this was last asked."""
        owed, self._unproven = self._unproven, {}
        return owed

    def first_unproven(self, owed: dict[type, str]) -> str | None:
        """The first word that did not turn out to be meant."""
        return next(
            (what for kind, what in owed.items() if not any(one in self._expected for one in kind.__mro__)), None
        )


def is_solution_object(stand_in: Any) -> bool:
    """Whether an object holds functions and is no value: of LeetCode's class."""
    return type(type(stand_in)) is StandInType and type(stand_in).__name__ == _SOLUTION_CLASS

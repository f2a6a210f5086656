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
_CONTAINER = "Solution"
"""The class of LeetCode's form. It holds functions, so what they give back is judged as what functions give back."""


class Belief:
    """What the tests have shown so far of the classes of a program."""

    def __init__(self) -> None:
        self._named: set[type] = set()
        self._meant: set[type] = set()
        self._owed: dict[type, str] = {}

    def name(self, kind: Any, name: str) -> None:
        """The tests use a class by a name; with a capital letter it is a class that they mean."""
        if name[:1].isupper() and name != _CONTAINER:
            self._named.add(kind)
            self._meant.add(kind)

    def show(self, stand_in: Any, name: str) -> None:
        """The tests have used an attribute of an object."""
        if name.startswith("_") or name in PLAIN_NAMES:
            return
        if type(stand_in).__name__ == _CONTAINER:
            object.__setattr__(stand_in, "_StandIn__made", True)
        else:
            self._meant.add(type(stand_in))

    def believes(self, stand_in: Any) -> bool:
        if isinstance(stand_in, StandInType) or object.__getattribute__(stand_in, "_StandIn__made"):
            return True
        return any(kind in self._meant for kind in type(stand_in).__mro__)

    def believes_value(self, stand_in: Any) -> bool:
        """Whether an object that is plain data itself may say what that means: only one of a class that the tests name.

        Without that a tuple that has the right fields could be equal to all others.
        """
        if isinstance(stand_in, StandInType) or object.__getattribute__(stand_in, "_StandIn__made"):
            return True
        return any(kind in self._named for kind in type(stand_in).__mro__)

    def owe(self, stand_in: Any, what: str) -> None:
        """The word of an object was taken, which must turn out to be meant."""
        kind = type(stand_in)
        self._owed.setdefault(kind, f"an object of the program's class {kind.__name__} answered for {what}")

    def take_debts(self) -> dict[type, str]:
        """What is owed since this was last asked."""
        owed, self._owed = self._owed, {}
        return owed

    def unpaid(self, owed: dict[type, str]) -> str | None:
        """The first word that did not turn out to be meant."""
        return next((what for kind, what in owed.items() if not any(one in self._meant for one in kind.__mro__)), None)


def is_container(stand_in: Any) -> bool:
    """Whether an object holds functions and is no value: of LeetCode's class."""
    return type(type(stand_in)) is StandInType and type(stand_in).__name__ == _CONTAINER

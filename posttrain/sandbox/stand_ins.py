"""Stand-ins: what one process of a test holds in place of an object that lives in the other.

A class of the other side gets a class here, with the same name and bases and with the special methods that it claims to
have; each of them sends a request. So `isinstance`, `except`, `with`, `await`, operators and pattern matching work by
Python's own rules. For a class that inherits from plain data (`class Point(tuple)`, `class Stack(list)`) the stand-in
inherits from it too: its content is here, and what it did not redefine is computed here. `Trust` decides which of them
may answer for themselves.
"""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Callable, Generator
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, Protocol

from posttrain.sandbox.tables import is_attribute
from posttrain.sandbox.wire import plain_base


class OtherSide(Protocol):
    """What stand-ins need of the channel to the process that holds their object (`peer.Peer`)."""

    def ask(self, operation: str, target: Any, args: Any = (), options: Any = None) -> Any: ...
    def get(self, stand_in: Any, name: str) -> Any: ...
    def put(self, stand_in: Any, name: str, value: Any) -> None: ...
    def call(self, stand_in: Any, args: Any, options: dict[str, Any]) -> Any: ...
    def construct(self, kind: Any, args: Any, options: dict[str, Any]) -> Any: ...
    def derive(self, name: str, bases: tuple[type, ...], space: dict[str, Any], options: dict[str, Any]) -> type: ...
    def special(self, stand_in: Any, name: str, args: Any, options: dict[str, Any]) -> Any: ...
    def waits(self, stand_in: Any) -> Generator[Any, Any, Any]: ...
    def trusts_value(self, stand_in: Any) -> bool: ...
    def is_instance(self, kind: Any, instance: Any) -> bool: ...
    def signature(self, stand_in: Any) -> Any: ...


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
COMPARISONS = frozenset(f"__{name}__" for name in ["eq", "ne", "lt", "le", "gt", "ge"])
ARITHMETIC = frozenset(f"__{kind}{name}__" for name in _BINARY.split() for kind in ("", "r", "i"))
_REST = """
    neg pos abs invert bool int float complex index round trunc floor ceil hash len length_hint getitem setitem delitem
    contains iter next reversed missing call enter exit aenter aexit aiter anext await str repr format bytes fspath dir
    get set delete set_name
"""
# Special methods that may be requested from the other side.
SPECIAL = COMPARISONS | ARITHMETIC | frozenset(f"__{name}__" for name in _REST.split())
_ATTRIBUTE_NAMES = """
    name qualname module doc dict annotations wrapped self func slots members match_args dataclass_fields
    dataclass_params defaults kwdefaults cause context notes init post_init orig_class origin args version all
    abstractmethods isabstractmethod
"""
_ATTRIBUTES = frozenset(f"__{name}__" for name in _ATTRIBUTE_NAMES.split())
_NOT_FORWARDED = frozenset({"__code__", "__signature__", "__traceback__", "__suppress_context__", "__class__"})


def may_be_asked(name: str) -> bool:
    # Not for a protocol such as `__array_interface__`, which could name memory of this process.
    return not name.startswith("__") or not name.endswith("__") or name in _ATTRIBUTES or name in SPECIAL


def _special(name: str) -> Callable[..., Any]:
    def method(self: Any, /, *args: Any, **options: Any) -> Any:
        return locate(self)[0].special(self, name, args, options)

    method.__name__ = name
    return method


def _ask(stand_in: Any, operation: str, *args: Any) -> Any:
    peer, number = locate(stand_in)
    return peer.ask(operation, number, args)


class StandInType(type):
    """The metaclass of stand-in classes."""

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any], /, **options: Any) -> Any:
        # This is a `class` statement of this side; stand_in_class bypasses it.
        placed = [base for base in bases if type(base) is StandInType and "_place" in vars(base)]
        if not placed:
            return type.__new__(cls, name, bases, space)
        return locate(placed[0])[0].derive(name, bases, space, options)

    def __init__(cls, *_: Any, **__: Any) -> None:
        pass

    def __call__(cls, /, *args: Any, **options: Any) -> Any:
        peer, _ = locate(cls)
        return peer.construct(cls, args, options)

    def __getattr__(cls, name: str) -> Any:
        if not may_be_asked(name) or "_place" not in vars(cls):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return locate(cls)[0].get(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if "_place" not in vars(cls) or not may_be_asked(name):
            return type.__setattr__(cls, name, value)
        locate(cls)[0].put(cls, name, value)
        if name in SPECIAL:
            type.__setattr__(cls, name, _special(name))

    def __delattr__(cls, name: str) -> None:
        _ask(cls, "delete", name)

    def __getitem__(cls, key: Any) -> Any:
        return _ask(cls, "item", key)

    # So that the tests can iterate over an enum of the program, and look into it.
    __iter__, __len__ = _special("__iter__"), _special("__len__")
    __contains__, __dir__ = _special("__contains__"), _special("__dir__")

    def __bool__(cls) -> bool:
        return True

    def __repr__(cls) -> str:
        return locate(cls)[0].special(cls, "__repr__", (), {}) if "_place" in vars(cls) else type.__repr__(cls)

    def __instancecheck__(cls, instance: Any) -> bool:
        if type.__instancecheck__(cls, instance):
            return True
        # A class may register others as its subclasses (abc.ABC.register), or be a protocol that a class of the tests
        # has. About our plain data it is not asked.
        if "_place" not in vars(cls) or plain_base(type(instance)) is not None:
            return False
        return locate(cls)[0].is_instance(cls, instance)

    def __subclasscheck__(cls, other: Any) -> bool:
        if type.__subclasscheck__(cls, other):
            return True
        return "_place" in vars(cls) and is_stand_in(other) and _ask(cls, "is_subclass", other) is True


class StandIn(metaclass=StandInType):
    """An object of the other side."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if not may_be_asked(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return locate(self)[0].get(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NOT_FORWARDED or name in ("__cause__", "__context__", "__notes__"):
            object.__setattr__(self, name, value)
        else:
            locate(self)[0].put(self, name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delete", name)

    __repr__, __str__ = _special("__repr__"), _special("__str__")
    __format__, __dir__ = _special("__format__"), _special("__dir__")

    def __copy__(self) -> Any:
        return locate(self)[0].ask("call", ["copy", "copy"], (self,))

    def __deepcopy__(self, _: Any) -> Any:
        return locate(self)[0].ask("call", ["copy", "deepcopy"], (self,))

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} of the other process cannot be pickled")


def _asked(name: str) -> property:
    return property(lambda self: locate(self)[0].get(self, name))


def _make_codes() -> dict[str, types.CodeType]:
    def plain(*args: Any, **options: Any) -> None: ...
    def generates(*args: Any, **options: Any) -> Generator[Any, Any, Any]:
        yield

    async def waits(*args: Any, **options: Any) -> None: ...
    async def flows(*args: Any, **options: Any) -> Any:
        yield

    functions = {"": plain, "generator ": generates, "async ": waits, "async generator ": flows}
    return {f"{form}function": function.__code__ for form, function in functions.items()}


_CODES = _make_codes()


class FunctionStandIn(StandIn):
    """A function, a method or a builtin of the other side; in a class body it is a method."""

    def __call__(self, /, *args: Any, **options: Any) -> Any:
        return locate(self)[0].call(self, args, options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None or "method" in self._StandIn__form else types.MethodType(self, instance)

    @property
    def __code__(self) -> Any:
        # `inspect.iscoroutinefunction` and similar functions look at its flags, and `curry` at its arguments.
        code, signature = _CODES.get(self._StandIn__form, _CODES["function"]), self.__signature__
        if signature is None:
            return code
        names = tuple(one.name for one in signature.parameters.values() if one.kind <= one.POSITIONAL_OR_KEYWORD)
        variables = (*names, *code.co_varnames)
        return code.replace(co_argcount=len(names), co_nlocals=len(variables), co_varnames=variables)

    @property
    def __signature__(self) -> Any:
        return locate(self)[0].signature(self)

    __doc__ = _asked("__doc__")  # pyright: ignore
    __module__ = _asked("__module__")  # pyright: ignore
    __dict__ = _asked("__dict__")  # pyright: ignore


def stand_in_class(
    peer: OtherSide, number: int, name: str, bases: tuple[type, ...], description: dict[str, Any], space: dict[str, Any]
) -> type:
    """Create the class that stands for one of the other side. `description` comes from `objects.describe`."""
    bases = tuple(dict.fromkeys(StandIn if base is object else base for base in bases))
    if not any(issubclass(base, StandIn) for base in bases):
        bases = (StandIn, *bases)
    space = {
        **space,
        "_place": (peer, number),
        "__qualname__": description["qualname"],
        "__module__": description["module"],
    }
    space["__doc__"] = _Doc(description["doc"])
    base = next((kind for one in bases if (kind := plain_base(one)) is not None), None)
    for special in description["special"]:
        if special in SPECIAL:
            space[special] = _awaits if special == "__await__" else _special(special)
    for special in description["none"]:
        if special in SPECIAL:
            space[special] = None
    if base is not None:
        for attribute in ("__repr__", "__str__", "__format__", "__copy__", "__deepcopy__"):
            # StandIn precedes the content's type among the bases; methods that were not redefined must use the content.
            if attribute not in space and StandIn in bases and hasattr(base, attribute):
                space[attribute] = getattr(base, attribute)
        for attribute in description["redefined"]:
            if hasattr(base, attribute) and not attribute.startswith("__"):
                space[attribute] = _redefined(attribute, base)
    else:
        space.setdefault("__dict__", _asked("__dict__"))
    return type.__new__(StandInType, name, bases, space)


class _Doc:
    """The docstring of a class, or of an object, which may have its own."""

    def __init__(self, of_class: str | None) -> None:
        self._of_class = of_class

    def __get__(self, stand_in: Any, owner: Any) -> Any:
        return self._of_class if stand_in is None else locate(stand_in)[0].get(stand_in, "__doc__")


class Super:
    """`super()` in a method of a test class that inherits from one of the program's."""

    def __init__(self, kind: Any, stand_in: Any) -> None:
        object.__setattr__(self, "_bound", (kind, stand_in))

    def __getattribute__(self, name: str) -> Any:
        kind, stand_in = object.__getattribute__(self, "_bound")
        peer, number = locate(kind)
        return peer.ask("super", number, (stand_in, name))


def _awaits(self: Any) -> Any:
    return locate(self)[0].waits(self)


def _redefined(name: str, base: type) -> property:
    # A method that the other side's class defines in place of the one of plain data.
    def read(self: Any) -> Any:
        peer, _ = locate(self)
        return peer.get(self, name) if peer.trusts_value(self) else getattr(base, name).__get__(self)

    return property(read)


def locate(stand_in: Any) -> tuple[OtherSide, int]:
    """Return the other side, and the number that it knows the object by."""
    if isinstance(stand_in, StandInType):
        return vars(stand_in)["_place"]
    return object.__getattribute__(stand_in, "_StandIn__place")


def form_of_stand_in(stand_in: Any) -> str:
    return object.__getattribute__(stand_in, "_StandIn__form")


def is_stand_in(value: Any) -> bool:
    kind = type(value)
    return kind is StandInType or (type(kind) is StandInType and kind is not StandIn)


def new_stand_in(kind: Any, place: tuple[OtherSide, int], form: str, content: Any = None) -> Any:
    base = plain_base(kind)
    if base is None:
        made = kind.__new__(kind)
    elif base.__new__ in (list.__new__, dict.__new__, set.__new__, bytearray.__new__) or base.__name__ == "deque":
        made: Any = base.__new__(kind)  # pyright: ignore
        base.__init__(made, content, *[content.maxlen] if base.__name__ == "deque" else [])  # pyright: ignore
    else:
        made = _immutable(kind, base, content)
    for name, value in (("place", place), ("form", form), ("made", False)):
        object.__setattr__(made, f"_StandIn__{name}", value)
    return made


def _immutable(kind: Any, base: Any, content: Any) -> Any:
    name = base.__name__
    if name in ("datetime", "date", "time", "timedelta"):
        fields = {"timedelta": "days seconds microseconds"}.get(
            name, "year month day hour minute second microsecond tzinfo"
        )
        return base.__new__(kind, **{one: getattr(content, one) for one in fields.split() if hasattr(content, one)})
    if name == "Fraction":
        return base.__new__(kind, content.numerator, content.denominator)
    if name == "range" or name.startswith("dict_"):
        raise TypeError(f"a {name} cannot be inherited from")
    return base.__new__(kind, content)


def generator_of(source: Any) -> Generator[Any, Any, Any]:
    return (yield from source)


async def coroutine_of(source: Any) -> Any:
    return await source


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
    """What the tests have shown so far about the program's classes: which objects may answer for themselves.

    Tests that expect plain data (`assert 4 in f(1)`, `f(1).startswith("a")`, `f(1) == 4`) can be fooled by an object
    that says yes to everything. Tests of a class must rely on just such an object. The test shows which is the case: it
    names the class (`Stack()`), or uses an attribute that plain data lacks (`.push`). Without either, the object is
    asked all the same, and its answer is recorded as unproven. If no test shows that it expects such an object, the
    answer does not count.
    """

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
        if name.startswith("_") or name in PLAIN_NAMES or is_attribute(name):
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

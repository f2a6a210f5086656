"""The judge's end of the channel to a program: of what comes back, only the form is relied on.

The program owns the process that sends it, so a message may hold anything. A message that the honest server in
program.py would never send breaks the link: the current test fails, and no other one runs.
"""

from __future__ import annotations

import types
import unittest
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from posttrain.sandbox import tables
from posttrain.sandbox.objects import form_of, importable
from posttrain.sandbox.peer import NotTransferable, Peer
from posttrain.sandbox.stand_ins import (
    ARITHMETIC,
    COMPARISONS,
    PLAIN_NAMES,
    SPECIAL,
    FunctionStandIn,
    StandInType,
    Trust,
    is_solution_object,
    is_stand_in,
    locate,
    new_stand_in,
)
from posttrain.sandbox.supervise import Ended, Program
from posttrain.sandbox.surroundings import Surroundings, log, warn
from posttrain.sandbox.wire import plain_base

_STOPS = (StopIteration, StopAsyncIteration)
_SERVED = {
    "get", "put", "delete", "call", "special", "item", "is_instance", "is_subclass", "describe", "start", "step",
    "finish", "cancel", "signature", "warn", "log",
}  # fmt: skip
_ABOUT_CLASSES = {"describe", "is_instance", "is_subclass"}
_REQUEST = {"do", "of", "args", "options", "changes"}
_OF_STATEMENT = {"__module__", "__qualname__"}
_MANY = 100_000
_MOST_NAMES = 10_000
_RUNNING = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_OF_RUNNING = {"send", "throw", "close", "asend", "athrow", "aclose"}
_OF_DUNDER = {"__name__", "__qualname__", "__doc__", "__module__", "__dict__", "__wrapped__", "__annotations__"}
_NEVER = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType, unittest.TestCase)
# Objects of these packages and classes never leave the judge: through them a program could run code, read or write
# memory, or read variables here. Tables of pandas, which evaluate text (`apply("query")`), are sent as content.
# By name, because most jobs do not import them.
_NEVER_PACKAGES = {
    "posttrain", "_pytest", "_ctypes", "ctypes", "_cffi_backend", "pickle", "_pickle", "shelve", "multiprocessing",
    "pandas", "bdb", "cProfile", "code", "doctest", "pdb", "profile", "trace",
}  # fmt: skip
_NEVER_CLASSES = {("asyncio.events", "AbstractEventLoop"), ("string", "Formatter"), ("unittest.mock", "_patch")}
# Methods of SQLite's connections that load libraries.
_NEVER_NAMES = {"enable_load_extension", "load_extension"}
# Private attributes of their objects lead to all that they are made of, such as `queue._loop`.
_CLOSED_PACKAGES = {"asyncio", "concurrent", "logging", "string", "subprocess", "threading"}
_PYTEST_OUTCOMES = "_pytest.outcomes"
# Special methods with which an object makes a statement about another value: `__eq__` could always say True.
_VOUCHES = COMPARISONS | ARITHMETIC


class ProgramError(Exception):
    """Stands for an exception of the program that must not be raised here as its own class."""


class ProgramExit(SystemExit):
    """`sys.exit()` of the program, which must not end the tests."""

    __module__ = "builtins"  # it is read like other exceptions of Python


class Link(Peer):
    """Sends requests to a program, and lets it use the objects of the tests that were handed to it."""

    def __init__(self, program: Program) -> None:
        super().__init__(1)
        self.broken: str | None = None  # why no further message is accepted
        self.trust = Trust()
        self.surroundings = Surroundings(self, program)
        self._program = program
        self._copies: dict[int, _Copy] = {}
        self._returned_by_calls: set[int] = set()
        self._named_classes: set[Any] = set()
        self.not_transferable: str | None = None  # what the tests tried to hand over, and could not
        self._offers: Callable[[], dict[str, Any]] = dict
        self._defined: dict[str, Any] = {}
        self._lent: set[int] = set()

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """Return those of the wanted names that the program defines; extra ones that it sends are dropped."""
        found = self.ask("names", None, wanted)
        if type(found) is not dict:
            self._break("no names")
        found = {name: found[name] for name in wanted if name in found}
        for name, value in found.items():
            self._note_class(name, value)
        return found

    def offer(self, space: dict[str, Any], given: dict[str, Any], free: Any) -> None:
        """Let the program use classes and modules of the tests that it needs and does not define (`free`).

        It is as if both were one file. Nothing else is offered: the program must not find the expected values.
        """
        wanted = [name for name in free[:_MOST_NAMES] if isinstance(name, str)] if isinstance(free, list) else []
        self._offers = lambda: {
            name: value
            for name in wanted
            if name in space and name not in given and _may_be_defined(value := space[name])
        }

    def _define(self) -> None:
        for name, value in self._offers().items():
            if self._defined.get(name) is not value:
                self._defined[name] = value
                self._lent.add(id(value))
                module = value.__name__ if isinstance(value, types.ModuleType) else None
                self.ask("define", None, (name, None if module else value, module))

    def ask(self, operation: str, target: Any, args: Any = (), options: Any = None, *, may_stop: bool = False) -> Any:
        if operation in ("call", "special"):
            self._define()
        try:
            return super().ask(operation, target, args, options, may_stop=may_stop)
        except NotTransferable as error:
            if operation != "special" or args[0] not in _VOUCHES:
                self.not_transferable = str(error)
            raise

    def _note_class(self, name: str, value: Any) -> None:
        if isinstance(value, StandInType):
            self.trust.note_class(value, name)
            if name[:1].isupper():
                self._named_classes.add(value)

    # Messages.

    def _send(self, message: dict[str, Any]) -> None:
        if self.broken or self._program.gone:
            raise Ended
        self._program.send(message)

    def _exchange(self, operation: str, target: Any, args: Any, options: dict[str, Any]) -> dict[str, Any]:
        self.surroundings.before()
        message = super()._exchange(operation, target, args, options)
        self.surroundings.after()
        return message

    def _receive(self) -> dict[str, Any]:
        return self._read_or_break(lambda: _as_message(self._program.receive()))

    def _next(self) -> dict[str, Any]:
        return self._read_or_break(super()._next)

    def _answer(self, message: dict[str, Any], may_stop: bool) -> Any:
        if "error" in message:
            raise _raisable(self._read_or_break(lambda: self.exception(message["error"])), may_stop)
        return self._read_or_break(lambda: self.read(message["value"]))

    def exception(self, error: dict[str, Any]) -> BaseException:
        if "exception" in error:
            return super().exception(error)
        return ProgramError(f"{str(error['name'])[:100]}: {str(error['text'])[:500]}")  # it could not be described

    def _read_or_break(self, read: Callable[[], Any]) -> Any:
        # If a message cannot be read, the link is broken for good: a forger gets no second try.
        try:
            return read()
        except Ended:
            raise
        except Exception as error:
            self._break(f"{type(error).__name__}: {error}")

    def _break(self, why: str) -> Any:
        self.broken = self.broken or f"the program sent no answer that can be read ({why})"
        raise Ended(self.broken) from None

    # What the program may do with objects of the tests.

    def _serve(self, request: dict[str, Any]) -> None:
        if request["do"] not in _SERVED:
            self._break(f"a request to {str(request['do'])[:50]!r}")
        try:
            self.surroundings.after()  # what the program printed so far comes before what the tests do now
            super()._serve(request)
        except Ended:
            raise
        except Exception as error:
            self._break(f"{type(error).__name__}: {error}")

    def _perform(self, request: dict[str, Any]) -> Any:
        target, args = request["of"], request.get("args", [])
        found = self._target(target)
        if _is_of_pandas(found):
            self._break("a request to use a table, of which the program has its own copy")
        if isinstance(found, type) and request["do"] not in _ABOUT_CLASSES and not _belongs_to_tests(found):
            # `type(file)(4, "w")` would open the judge's channel, and `attrgetter("__globals__")` read its variables.
            raise AttributeError(f"the class {found.__name__} of the tests is not the program's to use")
        if request["do"] in ("get", "put", "delete"):
            name = args[0]
            # A decorator of the program may add to a class that it is handed, but not change one that it is lent.
            lent, writes = id(found) in self._lent, request["do"] != "get"
            added = isinstance(found, type) and name in SPECIAL and writes and not lent
            if not isinstance(name, str) or (lent and writes) or not (added or _may_use(found, name, request["do"])):
                raise AttributeError(f"{str(name)[:100]} of the tests is not the program's to use")
        if request["do"] in ("warn", "log"):
            return {"warn": warn, "log": log}[request["do"]](*[self.read(arg) for arg in args])
        return super()._perform(request)

    def error(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, Ended):
            raise error
        return super().error(error)

    def _read_class(self, reference: dict[str, Any]) -> type:
        # The program's `SystemExit`, however the tests come to raise it, is no end of the tests.
        found = super()._read_class(reference)
        return ProgramExit if found is SystemExit else found

    def _export(self, value: Any) -> Any:
        if _must_stay(value):
            raise NotTransferable(f"a {type(value).__name__} of the tests cannot be handed to the program")
        form = form_of(value)
        if (form in ("class", "method") or form.endswith("function")) and (place := importable(value)):
            return {"import": place}
        if form == "method" and _is_of_pandas(getattr(value, "__self__", None)):
            raise NotTransferable(f"the method {value.__name__} of a table cannot be handed to the program")
        return super()._export(value)

    def _refer_held(self, value: Any, content: Callable[[], Any]) -> Any:
        # Such as the names of the levels of an index, which are a list with methods of pandas.
        held = is_stand_in(value) or not _is_of_pandas(value) or tables.can_be_sent(value)
        return super()._refer_held(value, content) if held else content()

    def _write_context(self, error: BaseException) -> Any:
        return None  # what the tests were handling may hold what they expect

    # What the tests do with objects of the program.

    def trusts(self, stand_in: Any) -> bool:
        return self.trust.trusts(stand_in)

    def signature(self, stand_in: Any) -> Any:
        return None  # forward_library_calls lets the program's process answer

    def is_instance(self, kind: Any, instance: Any) -> bool:
        # An object of the tests too: a class of the program may be a protocol.
        if not is_stand_in(instance) and (not _belongs_to_tests(type(instance)) or _must_stay(instance)):
            return False
        return self.ask("is_instance", locate(kind)[1], (instance,)) is True

    def trusts_value(self, stand_in: Any) -> bool:
        return self.trust.trusts_value(stand_in)

    def get(self, stand_in: Any, name: str) -> Any:
        value = super().get(stand_in, name)
        if isinstance(stand_in, (StandInType, FunctionStandIn)):
            self._note_class(name, value)
        elif not self.trusts(stand_in):
            if name in PLAIN_NAMES and callable(value):
                self.trust.require_proof(stand_in, f".{name}()")
            self.trust.note_use(stand_in, name)
        return value

    def put(self, stand_in: Any, name: str, value: Any) -> None:
        self._copies.clear()
        super().put(stand_in, name, value)

    def call(self, stand_in: Any, args: Any, options: dict[str, Any]) -> Any:
        self._copies.clear()
        value = super().call(stand_in, args, options)
        if is_stand_in(value) and not isinstance(value, StandInType):
            number = locate(value)[1]
            self._returned_by_calls.add(number)
            if is_solution_object(value):
                return new_stand_in(type(value), (self, number), "object")  # this one is not trusted
        return value

    def derive(self, name: str, bases: tuple[type, ...], space: dict[str, Any], options: dict[str, Any]) -> type:
        # A class of the tests that inherits from one of the program: it is created there, its methods run here.
        space = dict(space)
        cell = space.pop("__classcell__", None)
        members = [_member(key, value) for key, value in space.items() if key not in _OF_STATEMENT]
        kind = self.ask("derive", None, (name, list(bases), members), options)
        if not isinstance(kind, StandInType):
            self._break("no class")
        if cell is not None:
            cell.cell_contents = kind
        self._note_class(name, kind)
        return kind

    def construct(self, kind: Any, args: Any, options: dict[str, Any]) -> Any:
        self._copies.clear()
        value = super().construct(kind, args, options)
        if is_stand_in(value) and isinstance(value, kind):
            number = locate(value)[1]
            if (args or options) and number in self._returned_by_calls:
                # An object that a call returned before would equal whatever the tests construct to compare it with.
                value = new_stand_in(type(value), (self, number), "object", value)
            if kind in self._named_classes:
                object.__setattr__(value, "_StandIn__made", True)
        return value

    def special(self, stand_in: Any, name: str, args: Any, options: dict[str, Any]) -> Any:
        if name in ("__exit__", "__aexit__"):
            return self._exit(stand_in, name, args, options)
        if isinstance(stand_in, StandInType) or plain_base(type(stand_in)) is not None or self.trusts(stand_in):
            return super().special(stand_in, name, args, options)
        if name in ("__setitem__", "__delitem__", "__call__"):
            self._copies.clear()
        if name == "__iter__" and not hasattr(type(stand_in), "__next__"):
            return iter(self._copy(stand_in))
        value = super().special(stand_in, name, args, options)
        if name in _VOUCHES and value is not NotImplemented:
            self.trust.require_proof(stand_in, name)
        elif name in _CHECKS and (name != "__getitem__" or isinstance(args[0], slice)):
            self._check(stand_in, name, args, value)
        return value

    def _exit(self, stand_in: Any, name: str, args: Any, options: dict[str, Any]) -> Any:
        # A context manager of the program must not swallow a failed assertion of the tests.
        error = args[1] if len(args) > 1 else None
        try:
            value = super().special(stand_in, name, args, options)
        except NotTransferable:
            value = super().special(stand_in, name, (None, None, None), options)
        if _ends_a_test(error) and not is_stand_in(error):
            return False
        return value

    def _copy(self, stand_in: Any) -> _Copy:
        # Items are read once: a collection must not have three items when counted and none when compared.
        number = locate(stand_in)[1]
        if number not in self._copies:
            self._copies[number] = _Copy(super().special(stand_in, "__iter__", (), {}))
        return self._copies[number]

    def _check(self, stand_in: Any, name: str, args: Any, value: Any) -> None:
        # If the answer does not follow from the object's items, it needs a proof that the tests expect such an object.
        kind: Any = type(stand_in)
        iterable = (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")) and not hasattr(kind, "__next__")
        try:
            items = list(islice(iter(stand_in), _MANY)) if iterable else None
            agrees = items is not None and len(items) < _MANY and _CHECKS[name](items, args, value)
        except Ended:
            raise
        except Exception:
            agrees = False
        if not agrees:
            self.trust.require_proof(stand_in, name)


# Answers that the judge can compute itself, from the items.
_CHECKS: dict[str, Callable[[list[Any], Any, Any], bool]] = {
    "__len__": lambda items, args, value: value == len(items),
    "__bool__": lambda items, args, value: value == bool(items),
    "__contains__": lambda items, args, value: bool(value) == (args[0] in items),
    "__getitem__": lambda items, args, value: list(value) == items[args[0]],
}


class _Copy:
    """The items of one of the program's collections; each is requested once and kept."""

    def __init__(self, iterator: Any) -> None:
        self._rest, self._items = iter(iterator), []

    def __iter__(self) -> Iterator[Any]:
        place = 0
        while True:
            if place == len(self._items):
                try:
                    self._items.append(next(self._rest))
                except StopIteration:
                    return
            yield self._items[place]
            place += 1


def _member(name: str, value: Any) -> tuple[str, str, Any]:
    # One part of a class of the tests: its name, how it is wrapped, and the functions in it.
    if isinstance(value, property):
        return name, "property", (value.fget, value.fset, value.fdel)
    if isinstance(value, (classmethod, staticmethod)):
        return name, type(value).__name__, (value.__func__,)
    return name, "", (value,)


def _may_be_defined(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return True
    return isinstance(value, type) and not is_stand_in(value) and not issubclass(value, unittest.TestCase)


def _belongs_to_tests(kind: type) -> bool:
    return str(kind.__module__) == "__main__"


def _must_stay(value: Any) -> bool:
    # Whether the program must not get a reference to an object of this process.
    if isinstance(value, _NEVER):
        return True
    kinds = [(str(kind.__module__), kind.__name__) for kind in type(value).__mro__]
    packages = {module.partition(".")[0] for module, _ in kinds}
    if isinstance(value, BaseException):  # pytest's own are raised in functions that the program calls
        return "posttrain" in packages
    return not packages.isdisjoint(_NEVER_PACKAGES) or not _NEVER_CLASSES.isdisjoint(kinds)


def _is_of_pandas(value: Any) -> bool:
    # A row of `itertuples` is a named tuple, and has no methods of pandas.
    return tables.is_package(value) and not isinstance(value, (tuple, BaseException))


def _ends_a_test(error: Any) -> bool:
    # `pytest.fail` and a `pytest.raises` without an exception raise no AssertionError.
    kinds = type(error).__mro__
    return isinstance(error, (AssertionError, Ended)) or any(kind.__module__ == _PYTEST_OUTCOMES for kind in kinds)


def _may_use(target: Any, name: str, operation: str) -> bool:
    # Nothing through which the program could reach the code, the variables or the modules of the tests.
    if isinstance(target, _RUNNING):
        return operation == "get" and name in _OF_RUNNING
    if name in _NEVER_NAMES:
        return False
    if name.startswith("__") and name.endswith("__"):
        return (
            operation == "get" and name in _OF_DUNDER and (name != "__dict__" or type(target).__module__ == "__main__")
        )
    return not (name.startswith("_") and _package(target) in _CLOSED_PACKAGES)


def _package(target: Any) -> str:
    return str(type(target).__module__).partition(".")[0]


def _raisable(error: BaseException, may_stop: bool) -> BaseException:
    # Nothing that would end the judge or a loop of the tests: `all(map(right, cases))` is True after StopIteration.
    if isinstance(error, GeneratorExit) or (isinstance(error, _STOPS) and not may_stop):
        return ProgramError(f"{type(error).__name__}: {error}")
    return error


def _as_message(message: Any) -> dict[str, Any]:
    # An honest server sends requests, and answers with one of `value` and `error`; nothing else.
    if not isinstance(message, dict):
        raise TypeError("no message")
    keys = set(message)
    if not isinstance(message.get("changes", []), list):
        raise TypeError("no changes")
    if "do" in message:
        if keys != _REQUEST or not isinstance(message["args"], list) or not isinstance(message["options"], dict):
            raise ValueError("no request")
        if not isinstance(message["do"], str) or type(message["of"]) not in (int, type(None)):
            raise ValueError("no request")
    elif keys not in ({"value", "changes"}, {"error", "changes"}, {"value"}, {"error"}):
        raise ValueError("no answer")
    if "error" in message and not isinstance(message["error"], dict):
        raise TypeError("no error")
    return message

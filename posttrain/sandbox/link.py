"""The judge's end of the channel to a program: requests go out, plain data comes back, and nothing else is believed.

What comes back was made in a process that the program owns, so it may be anything. A message that the honest server in
program.py would never send is no answer: it breaks the link, the test at hand fails, and no other one is run.
"""

from __future__ import annotations

import builtins
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from posttrain.sandbox.names import MODULE
from posttrain.sandbox.remote import Remote, target_of
from posttrain.sandbox.supervise import Ended, Program
from posttrain.sandbox.values import by_place, decode, encode

_STOPS = (StopIteration, StopAsyncIteration)
_MUTABLE: tuple[type, ...] = (list, dict, set, bytearray, deque)


class ProgramError(Exception):
    """An exception of a class of the program's own."""


class Link:
    """Asks a program to do things, and serves the functions of the tests that were handed to it."""

    def __init__(self, program: Program) -> None:
        self.broken: str | None = None  # why nothing more is believed
        self._program = program
        self._turn = threading.RLock()  # of the threads of the tests; a function of theirs may ask while it is called
        self._functions: list[Callable[..., Any]] = []
        self._seen: set[int | str] = set()

    def ask(self, operation: str, target: int | str | None, /, *args: Any, **options: Any) -> Any:
        """The value that the program gives, or the exception that it raised."""
        request = {"do": operation, "of": target, "args": [self.out(arg) for arg in args]}
        reply = self._exchange(request | {"options": {name: self.out(value) for name, value in options.items()}})
        given = by_place(args, options)
        self._believe(lambda: self._change(given, reply.get("changed", {})))
        if reply.get("error"):
            raise self._believe(lambda: exception(reply["error"], may_stop=operation == "next"))
        if reply.get("same") is not None:  # the very argument: a function that should copy it would pass otherwise
            return self._believe(lambda: _mutable(given[reply["same"]]))
        return self._believe(lambda: self._value(reply["value"]))

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """Those of the names that the program defines; what it gives beyond them is not taken."""
        reply = self._exchange({"do": "names", "names": wanted})
        found = self._believe(lambda: dict(self._value(reply["value"])))
        return {name: self._named(name, found[name]) for name in wanted if name in found}

    def _named(self, name: str, value: Any) -> Any:
        return Remote(self, target_of(value), name=name) if isinstance(value, Remote) else value

    def out(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request; calls back into the tests are served while waiting for it."""
        with self._turn:
            if self.broken or self._program.gone:
                raise Ended
            self._program.send(request)
            return self._reply()

    def _reply(self) -> dict[str, Any]:
        while "callback" in (message := self._believe(lambda: _as_message(self._program.receive()))):
            function, args = self._believe(lambda message=message: self._called(message))
            try:
                answer = {"value": self.out(function(*args))}
            except Exception as error:
                answer = {"error": {"name": type(error).__name__, "text": str(error)}}
            self._program.send(answer)
        return message

    def _called(self, message: dict[str, Any]) -> tuple[Callable[..., Any], list[Any]]:
        number = message["callback"]
        if type(number) is not int or number < 0:
            raise ValueError("no function of the tests")
        return self._functions[number], [self._value(arg) for arg in message["args"]]

    def _believe(self, read: Callable[[], Any]) -> Any:
        """Read something that the program sent; if that fails, the link is broken and stays so."""
        try:
            return read()
        except Ended:
            raise
        except Exception as error:
            self.broken = f"the program sent no answer that can be read ({type(error).__name__}: {error})"
            raise Ended(self.broken) from None

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"ref": target_of(value)}
        if callable(value):
            if place := importable(value):
                return {"import": place}
            self._functions.append(value)
            return {"callback": len(self._functions) - 1}
        raise TypeError(f"a {type(value).__name__} of the tests cannot be handed to the program")

    def _value(self, data: Any) -> Any:
        return decode(data, self._special)

    def _special(self, tag: str, target: Any) -> Remote:
        if tag != "ref" or type(target) not in (int, str):
            raise ValueError(f"unknown tag {tag!r}")
        new = target not in self._seen
        self._seen.add(target)
        return Remote(self, target, new=new)

    def _change(self, given: dict[str, Any], changed: dict[str, Any]) -> None:
        """Do to arguments what the program did to its copies."""
        for place, data in changed.items():
            _assign(_mutable(given[place]), self._value(data))


def _mutable(argument: Any) -> Any:
    if not isinstance(argument, _MUTABLE):
        raise TypeError("no argument that can be changed")
    return argument


def _assign(old: Any, new: Any) -> None:
    kind = next(kind for kind in _MUTABLE if isinstance(old, kind))
    if not isinstance(new, kind):
        raise TypeError(f"a {type(new).__name__} in place of a {kind.__name__}")
    old.clear()
    old.update(new) if kind in (dict, set) else old.extend(new)


def importable(value: Any) -> list[str] | None:
    """Module and name of a function or class that the program can import by itself.

    It gets its own then: with the judge's `eval` or `os.system` in its hands it would be the judge.
    """
    owner = value if getattr(value, "__module__", None) else getattr(value, "__objclass__", None)  # str.upper has none
    module, name = getattr(owner, "__module__", None), getattr(value, "__qualname__", None)
    if module in (None, MODULE) or not isinstance(name, str) or module not in sys.modules:
        return None
    try:
        same = functools.reduce(getattr, name.split("."), sys.modules[module]) == value
    except AttributeError:
        return None
    return [module, name] if same is True else None


def _as_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise TypeError("no message")
    return message


def exception(error: dict[str, Any], may_stop: bool = False) -> Exception:
    """The exception that a program raised, as one of ours; never one that would end the process that judges.

    Nor one that ends a loop of the tests: `all(map(right, cases))` is true when `right` raises StopIteration.
    """
    kind = getattr(builtins, str(error.get("name")), None)
    text = str(error.get("text"))
    if isinstance(kind, type) and issubclass(kind, Exception) and (may_stop or not issubclass(kind, _STOPS)):
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError and its like need more than a text
            pass
    return ProgramError(f"{error.get('name')}: {text}")

"""Stand-ins for what a program defines, used by test code in another process: calls travel, plain data comes back.

What the program returns as an object of its own stays with it; here it is a `Remote`, which forwards calls, attributes
and items, but never a comparison: `==` between it and a value is False whatever the program would have said.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.sandbox.supervise import Program
from posttrain.sandbox.values import decode, encode

_STOPS = (StopIteration, StopAsyncIteration)


class ProgramError(Exception):
    """An exception of a class of the program's own."""


class Link:
    """Asks a program to do things, and serves the functions of the tests that were handed to it."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._functions: list[Callable[..., Any]] = []

    def ask(self, operation: str, target: int | str | None, *args: Any, **options: Any) -> Any:
        """The value that the program gives, or the exception that it raised."""
        request = {"do": operation, "of": target, "args": [self.out(arg) for arg in args]}
        self._program.send(request | {"options": {name: self.out(value) for name, value in options.items()}})
        reply = self.reply(may_stop=operation == "next")
        for place, data in reply.get("changed", {}).items():
            _assign(args[int(place)], self.value(data))
        return self.value(reply["value"])

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """Those of the names that the program defines."""
        self._program.send({"do": "names", "names": wanted})
        return self.value(self.reply()["value"])

    def reply(self, may_stop: bool = False) -> dict[str, Any]:
        """The next reply; calls back into the tests are served while waiting for it."""
        while "callback" in (message := self._program.receive()):
            try:
                function = self._functions[message["callback"]]
                answer = {"value": self.out(function(*[self.value(arg) for arg in message["args"]]))}
            except Exception as error:
                answer = {"error": {"name": type(error).__name__, "text": str(error)}}
            self._program.send(answer)
        if message.get("error"):
            raise exception(message["error"], may_stop)
        return message

    def out(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"ref": value._Remote__target}  # pyright: ignore
        if callable(value):
            self._functions.append(value)
            return {"callback": len(self._functions) - 1}
        raise TypeError(f"a {type(value).__name__} of the tests cannot be handed to the program")

    def value(self, data: Any) -> Any:
        return decode(data, lambda tag, content: Remote(self, content) if tag == "ref" else None)


class Remote:
    """Something that lives in the program's process."""

    def __init__(self, link: Link, target: int | str) -> None:
        object.__setattr__(self, "_Remote__link", link)
        object.__setattr__(self, "_Remote__target", target)

    def __ask(self, operation: str, *args: Any, **options: Any) -> Any:
        return self.__link.ask(operation, self.__target, *args, **options)  # pyright: ignore

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__ask("call", *args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)  # a protocol, as __array_interface__, by which memory of ours could be named
        return self.__ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.__ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__ask("put", key, value)

    def __len__(self) -> int:
        return self.__ask("len")

    def __iter__(self) -> Iterator[Any]:
        iterator = self.__ask("iter")
        while True:
            try:
                yield iterator.__ask("next")
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self.__ask("next")

    def __contains__(self, value: Any) -> bool:
        return self.__ask("in", value)

    def __enter__(self) -> Any:
        return self.__ask("enter")

    def __exit__(self, *_: object) -> None:
        self.__ask("exit")

    def __bool__(self) -> bool:
        return self.__ask("bool") is True

    def __str__(self) -> str:
        return str(self.__ask("str"))

    def __repr__(self) -> str:
        return str(self.__ask("repr"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self.__target == other.__target  # pyright: ignore

    def __hash__(self) -> int:
        return hash(self.__target)  # pyright: ignore


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


def _assign(old: Any, new: Any) -> None:
    """Do to an argument what the program did to its copy."""
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)

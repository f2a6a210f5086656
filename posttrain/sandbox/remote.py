"""Stand-ins for what lives in a program's process, used by test code in another one.

Three kinds, by what the tests expect. A value that a call gave back should have been plain data: `Remote` forwards its
attributes, items and methods, but length, `in`, truth and loops are the judge's own, over one copy of its items, and a
method that Python's own types have (`startswith`, `items`) is not the program's to answer. An object that the tests
construct, as `Stack()`, is what they test: `Made` answers for itself. `==` is never forwarded, whatever the kind.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.sandbox.link import Link

_PLAIN_TYPES = (str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset, range, deque, Counter)
_ARRAYS = {"all", "any", "equals", "item", "tolist"}
PLAIN_METHODS = _ARRAYS | {
    name for kind in _PLAIN_TYPES for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))
}
"""Methods that test code calls on plain data; an object that has them may be there to be taken for it."""


class Remote:
    """Something that the program gave. `name` is set for what the tests call by a name of the program's."""

    def __init__(self, link: Link, target: int | str, *, new: bool = True, name: str = "", mark: object = None) -> None:
        state = {"link": link, "target": target, "new": new, "makes": name[:1].isupper(), "copy": None}
        for key, value in {**state, "mark": target if mark is None else mark}.items():
            object.__setattr__(self, f"_Remote__{key}", value)

    def __ask(self, operation: str, /, *args: Any, **options: Any) -> Any:
        return self.__link.ask(operation, self.__target, *args, **options)  # pyright: ignore

    def __call__(self, /, *args: Any, **options: Any) -> Any:
        value = self.__ask("call", *args, **options)
        if not self.__makes or not isinstance(value, Remote):  # pyright: ignore
            return value
        # One object for all arguments would be equal to whatever the tests construct to compare it with.
        mark = object() if (args or options) and not value.__new else None  # pyright: ignore
        return Made(value.__link, value.__target, mark=mark)  # pyright: ignore

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)  # a protocol, as __array_interface__, by which memory of ours could be named
        value = self.__ask("get", name)
        if type(value) is not Remote:
            return value
        if name in PLAIN_METHODS and not self.__makes and not isinstance(self, Made):  # pyright: ignore
            return _Pretence(self, value, name)
        return _Method(self, value)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__ask("set", name, value)
        self.__forget()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return list(self)[key]
        return self.__ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__ask("put", key, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__items())

    def __next__(self) -> Any:
        return self.__ask("next")

    def __len__(self) -> int:
        try:
            items = self.__items()
        except TypeError:
            return self.__ask("len")
        if isinstance(items, _Pulled):
            raise TypeError("an iterator has no len()")
        return sum(1 for _ in items)

    def __contains__(self, value: Any) -> bool:
        return any(one is value or one == value for one in self.__items())

    def __bool__(self) -> bool:
        try:
            items = self.__items()
        except TypeError:
            return self.__ask("bool") is True
        return isinstance(items, _Pulled) or any(True for _ in items)

    def __enter__(self) -> Any:
        return self.__ask("enter")

    def __exit__(self, *_: object) -> None:
        self.__ask("exit")

    def __str__(self) -> str:
        return str(self.__ask("str"))

    def __repr__(self) -> str:
        return str(self.__ask("repr"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self.__mark == other.__mark  # pyright: ignore

    def __hash__(self) -> int:
        return hash(self.__mark)  # pyright: ignore

    def __items(self) -> _Copy | _Pulled:
        """The items, taken once: an object must not have three when counted and none when compared."""
        if self.__copy is None:  # pyright: ignore
            try:
                iterator = self.__ask("iter")
                if not isinstance(iterator, Remote):
                    raise TypeError("no iterator")
                own = iterator.__target == self.__target  # pyright: ignore
                found: Any = _Pulled(self) if own else _Copy(iterator)
            except TypeError as error:
                found = error
            object.__setattr__(self, "_Remote__copy", found)
        if isinstance(self.__copy, TypeError):  # pyright: ignore
            raise TypeError(str(self.__copy))  # pyright: ignore
        return self.__copy  # pyright: ignore

    def __forget(self) -> None:
        object.__setattr__(self, "_Remote__copy", None)


class Made(Remote):
    """An object that the tests constructed by a name with a capital letter: its class is under test."""

    def __len__(self) -> int:
        return self._Remote__ask("len")

    def __iter__(self) -> Iterator[Any]:
        return iter(_Pulled(self._Remote__ask("iter")))

    def __contains__(self, value: Any) -> bool:
        return self._Remote__ask("in", value)

    def __bool__(self) -> bool:
        return self._Remote__ask("bool") is True

    def __getitem__(self, key: Any) -> Any:
        return self._Remote__ask("item", key)


class _Method(Remote):
    """A method of an object: calling it may change the object."""

    def __init__(self, owner: Remote, method: Remote) -> None:
        super().__init__(method._Remote__link, method._Remote__target)  # pyright: ignore
        object.__setattr__(self, "_Method__owner", owner)

    def __call__(self, /, *args: Any, **options: Any) -> Any:
        value = super().__call__(*args, **options)
        self.__owner._Remote__forget()
        return value


class _Pretence(Remote):
    """A method by which an object could pass for plain data; it may say nothing, or give the object itself."""

    def __init__(self, owner: Remote, method: Remote, name: str) -> None:
        super().__init__(method._Remote__link, method._Remote__target)  # pyright: ignore
        object.__setattr__(self, "_Pretence__owner", owner)
        object.__setattr__(self, "_Pretence__name", name)

    def __call__(self, /, *args: Any, **options: Any) -> Any:
        value = super().__call__(*args, **options)
        if value is None or (type(value) is Remote and target_of(value) == target_of(self.__owner)):
            return value
        raise TypeError(
            f"the tests call .{self.__name}() on a value of a class of the program's own, which cannot vouch for it; "
            "plain data is needed here"
        )


class _Pulled:
    """The items of an iterator of the program's, gone once they are read."""

    def __init__(self, iterator: Any) -> None:
        if not isinstance(iterator, Remote):
            raise TypeError("no iterator")
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield next(self._iterator)
            except StopIteration:
                return


class _Copy:
    """The items of a collection of the program's, each asked for once and kept."""

    def __init__(self, iterator: Remote) -> None:
        self._rest, self._items = iter(_Pulled(iterator)), []

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


def target_of(remote: Remote) -> int | str:
    """What the program knows it by."""
    return remote._Remote__target  # pyright: ignore


for _kind in (Remote, Made, _Method, _Pretence):  # theirs would be found before __getattr__ is asked
    _kind.__doc__ = property(lambda self: self._Remote__ask("get", "__doc__"))  # pyright: ignore

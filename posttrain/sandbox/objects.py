"""What a process does for the other one with its own objects: describes their class, and uses them on request.

Both processes of a test do this for objects that they have handed to the other.
"""

from __future__ import annotations

import abc
import builtins
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Coroutine
from typing import Any

from posttrain.sandbox.stand_ins import SPECIAL
from posttrain.sandbox.wire import plain_base

# The program's name as a module.
MODULE = "solution"
_FUNCTIONS = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
)  # fmt: skip
_STEP_S = 0.001


def form_of(value: Any) -> str:
    """What stands for it in the other process: a class, a function, a generator, a coroutine or an object."""
    if isinstance(value, type):
        return "class"
    kind = type(value)
    if kind in _FUNCTIONS:
        flags = getattr(getattr(value, "__code__", None), "co_flags", 0)
        for flag, form in (
            (inspect.CO_ASYNC_GENERATOR, "async generator function"),
            (inspect.CO_COROUTINE, "async function"),
            (inspect.CO_GENERATOR, "generator function"),
        ):
            if flags & flag:
                return form
        return "function" if kind is types.FunctionType else "method"
    if kind is types.GeneratorType:
        return "generator"
    if kind is types.CoroutineType:
        return "coroutine"
    return "exception" if issubclass(kind, BaseException) else "object"


def describe(kind: type, refer: Callable[[type], Any]) -> dict[str, Any]:
    """What the other process must know of a class to make one that stands for it; `refer` writes its bases."""
    own = type.__getattribute__(kind, "__dict__")
    plain = [base for base in kind.__mro__ if plain_base(base) is base]
    doc = own.get("__doc__")
    return {
        "name": kind.__name__,
        "qualname": str(kind.__qualname__),
        "module": str(kind.__module__),
        "doc": doc if isinstance(doc, str) else None,
        "special": sorted(name for name in SPECIAL if own.get(name) is not None),
        "none": sorted(name for name in SPECIAL if name in own and own[name] is None),
        "redefined": [name for name in own if not name.startswith("__") and any(hasattr(base, name) for base in plain)],
        "bases": [refer(base) for base in kind.__bases__],
    }


def importable(value: Any) -> list[str] | None:
    """Module and name of a function or class that the other process can import by itself.

    It gets its own then: with the judge's `eval` or `os.system` in its hands a program would be the judge.
    """
    owner = value if getattr(value, "__module__", None) else getattr(value, "__objclass__", None)  # str.upper has none
    module, name = getattr(owner, "__module__", None), getattr(value, "__qualname__", None)
    if module in (None, MODULE, "__main__") or not isinstance(name, str) or module not in sys.modules:
        return None
    try:
        same = functools.reduce(getattr, name.split("."), sys.modules[module]) == value
    except AttributeError:
        return None
    return [module, name] if same is True else None


def known_class(place: Any) -> type | None:
    """Return our class for one that the other process names, if that is safe: plain data, or Python's exceptions."""
    if not isinstance(place, list) or len(place) != 2:
        return None
    module, name = place
    if not isinstance(module, str) or not isinstance(name, str) or module not in sys.modules:
        return None
    found: Any = vars(sys.modules[module]).get(name)
    if not isinstance(found, type) or found.__module__ != module or type(found) is not type:
        return None
    if plain_base(found) is found or found is object:
        return found
    if module == "builtins" and (issubclass(found, BaseException) or found in (type, bool)):
        return found
    # Never a class that lets a test end without a failure, such as unittest.SkipTest.
    library = module.partition(".")[0] in sys.stdlib_module_names and module.partition(".")[0] != "unittest"
    return found if library and issubclass(found, Exception) else None


def known_interface(place: Any) -> Any:
    """Return our own abstract class for one of `collections.abc` that the other process names."""
    if not isinstance(place, list) or len(place) != 2 or place[0] != "collections.abc":
        return None
    found = vars(importlib.import_module("collections.abc")).get(place[1]) if isinstance(place[1], str) else None
    return found if isinstance(found, abc.ABCMeta) else None


def describe_signature(function: Any) -> list[Any] | None:
    """Describe the arguments of a Python function: name, kind, whether there is a default, default, annotation."""
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        return None
    described = []
    for one in inspect.signature(function).parameters.values():
        given, note = one.default is not one.empty, one.annotation
        note = note if isinstance(note, (type, str)) and note is not one.empty else None
        described.append([one.name, int(one.kind), given, one.default if given else None, note])
    return described


def make_signature(described: list[Any] | None) -> inspect.Signature | None:
    """Make the signature that `describe_signature` describes; a default may be a stand-in."""
    empty = inspect.Parameter.empty
    if described is None:
        return None
    return inspect.Signature(
        [
            inspect.Parameter(name, kind, default=value if given else empty, annotation=empty if note is None else note)
            for name, kind, given, value, note in described
        ]
    )


def do_special(target: Any, name: str, /, *args: Any, **options: Any) -> Any:
    """Call a special method as Python does: the one of the class."""
    if name not in SPECIAL:
        raise AttributeError(name)
    method = getattr(type(target), name, None)
    if method is None:
        raise TypeError(f"{type(target).__name__!r} object has no {name}")
    return method(target, *args, **options)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "put": setattr,
    "delete": delattr,
    "call": lambda target, /, *args, **options: target(*args, **options),
    "special": do_special,
    "item": lambda target, key: target[key],
    "is_instance": lambda target, value: builtins.isinstance(value, target),
    "is_subclass": lambda target, value: builtins.issubclass(value, target),
    "signature": describe_signature,
}


class Tasks:
    """Coroutines of this process that the other one waits for.

    Each process has its own event loop. The waiting process polls whether the task is done, and runs the tasks of its
    own loop in between; a process without a running loop runs its tasks while it is polled.
    """

    def __init__(self) -> None:
        self._tasks: dict[int, Any] = {}
        self._loop: Any = None
        self._last = 0

    def start(self, awaitable: Any) -> int:
        asyncio = _asyncio()
        running = asyncio._get_running_loop()
        if running is None and self._loop is None:
            self._loop = asyncio.new_event_loop()
        coroutine: Coroutine[Any, Any, Any] = _await(awaitable)
        self._last += 1
        self._tasks[self._last] = (running or self._loop).create_task(coroutine)
        return self._last

    def step(self, number: int) -> bool:
        # Unless the loop is running anyway, run it for a moment, so that the task makes progress.
        task = self._tasks[number]
        loop = task.get_loop()
        if not task.done() and _asyncio()._get_running_loop() is None:
            timer = loop.call_later(_STEP_S, loop.stop)

            def stop(_: Any) -> None:
                loop.stop()

            task.add_done_callback(stop)
            loop.run_forever()
            task.remove_done_callback(stop)
            timer.cancel()
        return task.done()

    def finish(self, number: int) -> Any:
        return self._tasks.pop(number).result()

    def cancel(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()
            self.step(number)  # what it waits for on the other side must end too, before the other side goes on
            self._tasks.pop(number, None)


def _asyncio() -> Any:
    # Imported on demand: every job is a fork of what is imported, and a larger fork costs more.
    return importlib.import_module("asyncio")


async def _await(awaitable: Any) -> Any:
    return await awaitable

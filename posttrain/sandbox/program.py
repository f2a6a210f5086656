"""The process that holds untrusted code: runs it as a script, or loads it and answers calls to what it defines."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import linecache
import os
import random
import signal
import sys
import traceback
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from posttrain.sandbox import wire
from posttrain.sandbox.values import by_place, decode, encode

_FILE = "program.py"


def run_source(source: str) -> int:
    """Run a script as Python would, and give its exit code."""
    _become_ordinary()
    try:
        exec(compile(source, _FILE, "exec"), _module("__main__", source).__dict__)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        _print_error(error)
        code = 1
    return _finish(code)


def run_argv(argv: list[str]) -> int:
    """Replace this process by another program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, dict(os.environ))
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    return 127


def answer_calls(channel: int, source: str) -> int:
    """Load a program as a module, then do what is asked of it until the other side hangs up."""
    _become_ordinary()
    module = _module("solution", source)
    try:
        exec(compile(source, _FILE, "exec"), module.__dict__)
    except BaseException as error:
        _flush()
        wire.send(channel, {"error": _describe(error)})
        return 1
    _flush()
    wire.send(channel, {"value": None})
    server = _Server(channel, module)
    with contextlib.suppress(wire.Closed):
        while True:
            server.answer(wire.receive(channel))
    return 0


class _Server:
    """Answers requests; what is no plain data stays here and travels as a number."""

    def __init__(self, channel: int, module: types.ModuleType) -> None:
        self._channel, self._module = channel, module
        self._kept: dict[int, Any] = {}

    def answer(self, request: dict[str, Any]) -> None:
        try:
            reply = self._do(request)
        except BaseException as error:
            reply = {"error": _describe(error)}
        _flush()
        wire.send(self._channel, reply)

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        operation = request["do"]
        if operation == "names":
            known = vars(self._module)
            wanted = {name: known[name] for name in request["names"] if name in known}
            return {"value": {"dict": [[name, self._out(value)] for name, value in wanted.items()]}}
        target = self._find(request["of"])
        args = [self._in(arg) for arg in request.get("args", [])]
        if operation == "call":
            options = {name: self._in(value) for name, value in request.get("options", {}).items()}
            return self._call(target, args, options)
        return {"value": self._out(_OPERATIONS[operation](target, *args))}

    def _call(self, target: Any, args: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        """The value or error of a call, what became of arguments, and which of them the value is, if it is one."""
        given = {place: arg for place, arg in by_place(args, options).items() if isinstance(arg, _MUTABLE)}
        before = {place: self._out(arg) for place, arg in given.items()}
        same = None
        try:
            value = target(*args, **options)
            same = next((place for place, arg in given.items() if arg is value), None)
            reply: dict[str, Any] = {"value": self._out(value)}
        except BaseException as error:
            reply = {"error": _describe(error)}
        after = {place: self._out(arg) for place, arg in given.items()}
        changed = {place: new for place, new in after.items() if new != before[place]}
        return {**reply, "changed": changed, "same": same}

    def _find(self, target: int | str) -> Any:
        if isinstance(target, int):
            return self._kept[target]
        found: Any = self._module
        for name in target.split("."):
            found = getattr(found, name, None)
            if found is None and "Solution" in vars(self._module):  # the form of LeetCode
                found = getattr(vars(self._module)["Solution"](), name, None)
            if found is None:
                raise NameError(f"the program defines no {target}")
        return found

    def _out(self, value: Any) -> Any:
        return encode(value, self._keep)

    def _keep(self, value: Any) -> Any:
        self._kept[id(value)] = value
        return {"ref": id(value)}

    def _in(self, data: Any) -> Any:
        return decode(data, self._special)

    def _special(self, tag: str, content: Any) -> Any:
        if tag == "ref":
            return self._kept[content]
        if tag == "import":
            return functools.reduce(getattr, content[1].split("."), importlib.import_module(content[0]))
        return lambda *args: self._call_back(content, args)

    def _call_back(self, number: int, args: tuple[Any, ...]) -> Any:
        """A function of the tests was handed to the program, and it calls it."""
        wire.send(self._channel, {"callback": number, "args": [self._out(arg) for arg in args]})
        while True:
            message = wire.receive(self._channel)
            if "do" not in message:
                break
            self.answer(message)
        if message.get("error"):
            raise RuntimeError(message["error"]["text"])
        return self._in(message["value"])


_MUTABLE = (list, dict, set, bytearray, deque)
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "item": lambda target, key: target[key],
    "put": lambda target, key, value: target.__setitem__(key, value),
    "len": len,
    "iter": iter,
    "next": next,
    "in": lambda target, value: value in target,
    "str": str,
    "repr": repr,
    "bool": bool,
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target: type(target).__exit__(target, None, None, None),
}


def _become_ordinary() -> None:
    """Undo what tells this process from a fresh interpreter."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "posttrain"]:
        del sys.modules[name]
    sys.argv = [_FILE]
    sys.path.insert(0, os.getcwd())
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(fd, "w", closefd=False)), "utf-8", "backslashreplace")
        for fd in (1, 2)
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed(0)  # a fork gets a new seed; with a fixed one a program does the same in every job


def _module(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__["__file__"] = _FILE
    sys.modules[name] = module
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    return module


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 255
    with contextlib.suppress(Exception):
        print(error.code, file=sys.stderr)
    return 1


def _print_error(error: BaseException) -> None:
    with contextlib.suppress(BaseException):
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # without our own frame
        traceback.print_exception(type(error), error, trace)


def _describe(error: BaseException) -> dict[str, Any]:
    name, text, line = type(error).__name__, "", None
    with contextlib.suppress(BaseException):
        text = str(error)[:500]
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
        line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    return {"name": name, "text": text, "line": line}


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


def _finish(code: int) -> int:
    """What an interpreter does at its end: wait for threads, run exit functions, flush."""
    import atexit
    import threading

    for step in (getattr(threading, "_shutdown", None), getattr(atexit, "_run_exitfuncs", None)):
        if step is not None:
            with contextlib.suppress(BaseException):
                step()
    _flush()
    return code

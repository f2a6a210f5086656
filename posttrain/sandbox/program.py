"""The process that runs the untrusted code: as a script, or as a module whose functions the judge calls."""

from __future__ import annotations
import __future__

import builtins
import contextlib
import functools
import importlib
import io
import linecache
import logging
import os
import random
import signal
import sys
import traceback
import types
import warnings
from typing import Any

from posttrain.sandbox import wire
from posttrain.sandbox.peer import Peer, describe_error
from posttrain.sandbox.stand_ins import is_stand_in

_FILE = "program.py"


def run_source(source: str) -> int:
    """Run a script as Python would, and return its exit code."""
    _reset_interpreter()
    try:
        exec(_compile(source), _module("__main__", source).__dict__)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        _print_error(error)
        code = 1
    return _shut_down_interpreter(code)


def run_argv(argv: list[str]) -> int:
    """Replace this process by another program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, dict(os.environ))
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    return 127


def answer_calls(channel: int, source: str) -> int:
    """Load a program as a module, then answer requests until the other side closes the channel."""
    _reset_interpreter()
    try:
        module, code = _load(source)
    except BaseException as error:
        _flush()
        wire.send(channel, {"error": _describe(error)})
        return 1
    _flush()
    wire.send(channel, {"value": _free_names(code, vars(module))})
    server = _Server(channel, module)
    with contextlib.suppress(wire.Closed):
        while True:
            server.serve_next()
    return 0


def _load(source: str) -> tuple[types.ModuleType, types.CodeType]:
    # Annotations may name a class that only the tests define, as in LeetCode's form: then they are not evaluated.
    module, code = _module("solution", source), _compile(source)
    try:
        exec(code, module.__dict__)
    except NameError:
        module, code = _module("solution", source), _compile(source, __future__.annotations.compiler_flag)
        exec(code, module.__dict__)
    return module, code


def _compile(source: str, flags: int = 0) -> types.CodeType:
    # Without the `annotations` future of this file: programs may look at their own annotations.
    return compile(source, _FILE, "exec", flags=flags, dont_inherit=True)


class _Server(Peer):
    """Answers requests. Objects that are not plain data stay here and travel as a number."""

    def __init__(self, channel: int, module: types.ModuleType) -> None:
        super().__init__(-1)
        self._channel, self._module = channel, module
        self._replaced: dict[tuple[str, str], Any] = {}
        self._defined: set[str] = set()

    def serve_next(self) -> None:
        self._serve(self._next())

    def _send(self, message: dict[str, Any]) -> None:
        _flush()
        wire.send(self._channel, message)

    def _receive(self) -> dict[str, Any]:
        return wire.receive(self._channel)

    def _perform(self, request: dict[str, Any]) -> Any:
        own = {
            "names": self._names,
            "define": self._define,
            "derive": self._derive,
            "replace": self._replace,
            "environment": _set_environment,
            "report": self._report,
        }
        if request["do"] in own:
            options = {name: self.read(value) for name, value in request["options"].items()}
            return own[request["do"]](*[self.read(arg) for arg in request["args"]], **options)
        if request["do"] == "super":
            one, name = (self.read(arg) for arg in request["args"])
            return getattr(super(self._target(request["of"]), one), name)
        return super()._perform(request)

    def _names(self, *wanted: str) -> dict[str, Any]:
        known = vars(self._module)
        return {name: known[name] for name in wanted if name in known}

    def _define(self, name: str, value: Any, module: str | None) -> None:
        # A class or module of the tests that the program uses and does not define, as if both were one file.
        if name in self._defined or name not in vars(self._module):
            self._defined.add(name)
            vars(self._module)[name] = importlib.import_module(module) if module else value

    def _derive(self, name: str, bases: list[Any], members: list[Any], /, **options: Any) -> type:
        # A class of the tests that inherits from one of the program's; its functions run in the tests' process.
        wraps: dict[str, Any] = {"property": property, "classmethod": classmethod, "staticmethod": staticmethod}
        space = {key: wraps[how](*parts) if how else parts[0] for key, how, parts in members}
        return types.new_class(name, tuple(bases), options, lambda own: own.update(space, __module__="__main__"))

    def _replace(self, module: str, name: str, back: bool, value: Any) -> None:
        # What the tests patch in their own process is patched here too.
        owner = self._module if module == self._module.__name__ else importlib.import_module(module)
        if back:
            value = self._replaced.pop((module, name), _MISSING)
        else:
            self._replaced.setdefault((module, name), getattr(owner, name, _MISSING))
        if value is not _MISSING:
            setattr(owner, name, value)
        elif hasattr(owner, name):
            delattr(owner, name)

    def _report(self, what: str) -> None:
        # Sends the program's warnings or log messages to the tests.
        if what == "warn":

            def show(message: Any, category: Any, *_: Any, **__: Any) -> None:
                self.ask("warn", None, (category, str(message)))

            warnings.simplefilter("always")
            warnings.showwarning = show
        elif not any(type(handler).__name__ == "_ForwardingHandler" for handler in logging.getLogger().handlers):
            logging.getLogger().addHandler(_ForwardingHandler(self))
            logging.getLogger().setLevel(1)

    def _target(self, target: Any) -> Any:
        if isinstance(target, list):
            return _resolve(target)
        return self._find(target) if isinstance(target, str) else super()._target(target)

    def _find(self, target: str) -> Any:
        found: Any = self._module
        for name in target.split("."):
            found = getattr(found, name, None)
            if found is None and "Solution" in vars(self._module):  # LeetCode's form
                found = getattr(vars(self._module)["Solution"](), name, None)
            if found is None:
                raise NameError(f"the program defines no {target}")
        return found

    def _special(self, tag: str, content: Any) -> Any:
        return _resolve(content) if tag == "import" else super()._special(tag, content)

    def _class_space(self, description: dict[str, Any]) -> dict[str, Any]:
        # Tests and program may each define the same class, such as a node; to the program both must be one class.
        own = vars(self._module).get(description["name"])
        return {"__class__": property(lambda _: own)} if isinstance(own, type) and not is_stand_in(own) else {}


class _ForwardingHandler(logging.Handler):
    def __init__(self, server: _Server) -> None:
        super().__init__()
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        self._server.ask("log", None, (record.name, record.levelno, record.getMessage()))


_MISSING = object()


def _resolve(place: list[str]) -> Any:
    return functools.reduce(getattr, place[1].split("."), importlib.import_module(place[0]))


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _free_names(code: types.CodeType, known: dict[str, Any]) -> list[str]:
    # Names that the program uses and does not define. Names of attributes are among them.
    found, left = set(), [code]
    while left:
        one = left.pop()
        found.update(one.co_names)
        left += [inner for inner in one.co_consts if isinstance(inner, types.CodeType)]
    return sorted(name for name in found if name not in known and not hasattr(builtins, name))


def _reset_interpreter() -> None:
    # Programs should find a fresh interpreter, not one that has posttrain's modules and streams.
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
    random.seed(0)  # each fork would get a new seed; a fixed one makes every job behave the same


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
    line = None
    with contextlib.suppress(BaseException):
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
        line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    return {**describe_error(error), "line": line}


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


def _shut_down_interpreter(code: int) -> int:
    # What an interpreter does at its end: wait for threads, run exit functions, flush.
    import atexit
    import threading

    for step in (getattr(threading, "_shutdown", None), getattr(atexit, "_run_exitfuncs", None)):
        if step is not None:
            with contextlib.suppress(BaseException):
                step()
    _flush()
    return code

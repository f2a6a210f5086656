"""Finds damage to the state that all scores of a worker share: builtins, modules, signals, the working folder.

After each score a worker compares that state with the one after the reward was imported:

    replaced or removed builtins, functions of `os` and others, entries of `sys.modules`; file descriptors 0 to 2 closed
        the worker ends after this score: what was computed with them in the meantime may be cached
    working folder, signal handlers and timers, sys.stdin, sys.stdout, sys.stderr
        restored: functions with a timeout set alarms, and those that run programs change the folder

Changes that the reward's file makes when it is imported are not damage: every worker imports it.
"""

from __future__ import annotations

import builtins
import contextlib
import operator
import signal
import sys
from _signal import getsignal  # pyright: ignore[reportMissingImports]  # ten times as quick as `signal.getsignal`, which converts to an enum
from collections.abc import Iterable
from os import chdir, fstat, getcwd
from typing import Any, NamedTuple

# Names that functions are known to replace (`reliability_guard` of HumanEval's evaluation sets many to None), and what
# a worker needs itself. Not all names of these modules, because they are compared after every score.
_GUARDED = {
    "os": (
        "chdir chmod chown environ fchdir fork forkpty getcwd getpid kill killpg listdir lstat makedirs mkdir open "
        "path pipe putenv read remove removedirs rename renames replace rmdir scandir setuid stat system truncate "
        "unlink waitpid walk write"
    ),
    "shutil": "copy copyfile chown move rmtree which",
    "subprocess": "Popen call check_call check_output run",
    "time": "monotonic perf_counter sleep time",
    "pickle": "dumps loads",
}
_SIGNALS = ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGHUP", "SIGUSR1", "SIGUSR2")
# Most names in a message.
_SHOWN = 3
_Exception, _OSError, _missing = Exception, OSError, object()


class Damage(NamedTuple):
    """What a score changed; empty if nothing."""

    # What cannot be restored, so that the worker must end.
    lasting: str = ""
    # What was restored; reported only for the first score that changed something.
    repaired: str = ""


_NONE = Damage()


class _Table:
    """Entries of a dict that must not change: names of a module, or modules of `sys.modules`."""

    def __init__(self, prefix: str, entries: dict[str, Any], names: Iterable[str]) -> None:
        self.prefix, self.entries = prefix, entries
        self.wanted = [(name, entries[name]) for name in names if name in entries]
        self._get = operator.itemgetter(*[name for name, _ in self.wanted])
        self._values = self._get(entries)

    def changed(self) -> list[str]:
        try:
            # Compares identities first, so it calls no `__eq__` of the user's.
            if self._get(self.entries) == self._values:
                return []
        except _Exception:  # an entry is gone, or cannot be compared
            pass
        get, found = self.entries.get, []
        for name, value in self.wanted:
            if get(name, _missing) is not value:
                found += [self.prefix + name]
        return found

    def put_back(self) -> None:
        for name, value in self.wanted:
            self.entries[name] = value


class SharedState:
    """Records the shared state when created. Example: `SharedState(out).check()` gives `Damage("builtins.len", "")`."""

    def __init__(self, out: Any) -> None:
        top = [name for name in sys.modules if "." not in name]
        self._tables = [
            _Table("builtins.", builtins.__dict__, builtins.__dict__),
            _Table("sys.modules: ", sys.modules, top),
        ]
        for name, guarded in _GUARDED.items():
            if name in sys.modules:
                self._tables.append(_Table(f"{name}.", vars(sys.modules[name]), guarded.split()))
        self._files = [(name, number, _file(number)) for number, name in enumerate(("stdin", "stdout", "stderr"))]
        self._folder = _folder()
        numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
        self._handlers = [(number, getsignal(number)) for number in numbers]
        self._out, self._in, self._reported = out, sys.stdin, False

    # Builtins may be damaged when this begins. Until they are restored, it uses only names bound at the top.
    def check(self) -> Damage:
        """Return what has changed, and restore everything except file descriptors."""
        found: list[str] = []
        for table in self._tables:
            if changed := table.changed():
                found += changed
                table.put_back()
        # From here on builtins are restored and may be used.
        found += [f"{name} (file descriptor {number})" for name, number, file in self._files if _file(number) != file]
        repaired = self._repair()
        if not found and (not repaired or self._reported):
            return _NONE
        self._reported = self._reported or bool(repaired)
        return Damage(_list_names(found), _list_names(repaired))

    def _repair(self) -> list[str]:
        sys.stdout = sys.stderr = self._out
        sys.stdin = self._in
        found: list[str] = []
        if self._folder is not None and _folder() != self._folder:
            found.append("the working folder")
            with contextlib.suppress(OSError):  # the folder was removed, which is not the score's fault
                chdir(self._folder)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers:
            if handler is not None and getsignal(number) is not handler:
                if number.name != "SIGALRM":  # a timeout leaves this behind routinely
                    found.append(f"the handler of {number.name}")
                signal.signal(number, handler)
        return found


def _folder() -> str | None:
    try:
        return getcwd()
    except _OSError:
        return None


def _file(number: int) -> tuple[int, int] | None:
    try:
        facts = fstat(number)
    except _OSError:
        return None
    return facts.st_dev, facts.st_ino


def _list_names(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

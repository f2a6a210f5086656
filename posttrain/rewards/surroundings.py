"""What all scores of a worker share, and one score may damage: builtins, modules, signals, the working folder.

After each score a worker compares it with what it was when the reward had been imported:

    replaced or removed builtins, functions of `os` and others, entries of `sys.modules`; file descriptors 0 to 2 closed
        the worker ends behind this score: what was computed with them meanwhile, and cached, cannot be put back
    working folder, signal handlers and timers, sys.stdin, sys.stdout, sys.stderr
        put back: functions with a timeout set alarms, and those that run programs change the folder

What the reward's file changes when it is imported is part of what is compared with: every worker imports it.

`check` begins while builtins may be damaged. Until it has put them back, it uses none but those bound below.
"""

from __future__ import annotations

import builtins
import contextlib
import operator
import signal
import sys
from _signal import getsignal  # pyright: ignore[reportMissingImports]  # ten times as quick as that of `signal`, which makes it an enum's member
from collections.abc import Iterable
from os import chdir, fstat, getcwd
from typing import Any, NamedTuple

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
"""Names that functions are known to replace (`reliability_guard` of HumanEval's evaluation sets many to None), and what
a worker needs itself. Not all names of these modules, because they are compared after every score."""
_SIGNALS = ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SHOWN = 3
"""Names that a message lists."""
_Exception, _OSError, _missing = Exception, OSError, object()


class Damage(NamedTuple):
    """What a score changed; empty where nothing."""

    lasting: str = ""
    """Because of which the worker must end."""
    repaired: str = ""
    """Which was put back; of the first score that changed something alone."""


_NONE = Damage()


class _Table:
    """Entries of a dict that must stay: names of a module, or modules of `sys.modules`."""

    def __init__(self, prefix: str, entries: dict[str, Any], names: Iterable[str]) -> None:
        self.prefix, self.entries = prefix, entries
        self.wanted = [(name, entries[name]) for name in names if name in entries]
        self._get = operator.itemgetter(*[name for name, _ in self.wanted])
        self._values = self._get(entries)

    def changed(self) -> list[str]:
        """Names of entries that are gone or are another object."""
        try:
            if self._get(self.entries) == self._values:  # compares addresses first, so that it looks into no object
                return []
        except _Exception:  # one is gone, or cannot be compared
            pass
        get, found = self.entries.get, []
        for name, value in self.wanted:
            if get(name, _missing) is not value:
                found += [self.prefix + name]
        return found

    def put_back(self) -> None:
        for name, value in self.wanted:
            self.entries[name] = value


class Surroundings:
    """Remembers them when it is made. Example: `Surroundings(out).check()` gives `Damage("builtins.len", "")`."""

    def __init__(self, out: Any) -> None:
        """`out` is what sys.stdout and sys.stderr are."""
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
        self._out, self._in, self._told = out, sys.stdin, False

    def check(self) -> Damage:
        """What was changed since; afterwards all is as it was, except file descriptors."""
        found: list[str] = []
        for table in self._tables:
            if changed := table.changed():
                found += changed
                table.put_back()
        # From here on builtins are whole.
        found += [f"{name} (file descriptor {number})" for name, number, file in self._files if _file(number) != file]
        repaired = self._repair()
        if not found and (not repaired or self._told):
            return _NONE
        self._told = self._told or bool(repaired)
        return Damage(_listed(found), _listed(repaired))

    def _repair(self) -> list[str]:
        sys.stdout = sys.stderr = self._out
        sys.stdin = self._in
        found: list[str] = []
        if self._folder is not None and _folder() != self._folder:
            found.append("the working folder")
            with contextlib.suppress(OSError):  # it was removed, which is no score's fault
                chdir(self._folder)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers:
            if handler is not None and getsignal(number) is not handler:
                if number.name != "SIGALRM":  # what a timeout leaves behind is no news
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


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

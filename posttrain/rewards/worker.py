"""A reward worker, a process with the arguments FD PARENT (crew.py): imports the reward once, then scores.

types.py lists its messages. After each score it looks for damage to the state that all scores of a worker share, and
compares it with the state after the reward was imported:

    replaced or removed builtins, functions of `os` and others, entries of `sys.modules`; file descriptors 0 to 2 closed
        the worker ends after this score: what was computed with them in the meantime may be cached
    working folder, signal handlers and timers, sys.stdin, sys.stdout, sys.stderr
        restored: functions with a timeout set alarms, and those that run programs change the folder

Changes that the reward's file makes when it is imported are not damage: every worker imports it.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import operator
import os
import pickle
import signal
import sys
import time
import zlib
from _signal import getsignal  # pyright: ignore[reportMissingImports]  # ten times as quick as `signal.getsignal`, which converts to an enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from os import chdir, fstat, getcwd
from types import ModuleType
from typing import Any, NamedTuple

from posttrain.machines.channel import Channel
from posttrain.machines.spawn import connection
from posttrain.rewards import scorers
from posttrain.rewards.loading import load_scores
from posttrain.rewards.signatures import BatchFacts, describe_exception
from posttrain.rewards.types import CHUNK_S, Outcome, Payload, RewardError, ScoreItems, failure
from posttrain.texts import utf8, well_formed

# How much one sample may print before the rest is cut.
PRINT_LINES, PRINT_CHARS = 20, 2000
_SLOW_IMPORT_S = 60.0


def main() -> None:
    """Serve one parent until it closes the connection."""
    channel = Channel(connection())
    messages = _messages(channel)
    spec = next(messages, None)
    if spec is None:
        return
    out = _Lines(channel)
    sys.stdout = sys.stderr = out
    scorers.CODE_SETTINGS.update(spec.code)
    seeding = Seeding(spec.seed)
    try:
        score, spec = load_scores(spec)
    except RewardError as error:
        channel.send(("failed", error.what, error.todo))
        return
    except BaseException as error:
        channel.send(("failed", f"the reward could not be loaded: {describe_exception(error)}", ""))
        return
    scorers.before_slow_import = lambda: channel.send(("wait", _SLOW_IMPORT_S))
    shared_state = SharedState(out)
    channel.send(("ready", spec))
    gc.freeze()  # so that collections skip what was imported
    for chunk in messages:
        if not _score_chunk(lambda payloads: score_task(score, payloads, seeding), chunk, channel, out, shared_state):
            return


def _messages(channel: Channel) -> Iterator[Any]:
    while not channel.ended:
        yield from channel.receive()


def _score_chunk(
    score: Callable[[list[Payload]], list[Outcome]],
    chunk: list[tuple[int, list[Payload]]],
    channel: Channel,
    out: _Lines,
    shared_state: SharedState,
) -> bool:
    # False if a score damaged what the next one needs: another worker gets the rest of the chunk.
    # Bound now, because a function may replace those of the modules.
    process, own_process, now = (
        os.getpid(),
        os.getpid,
        time.monotonic,
    )
    begin = start = now()
    for place, (number, payloads) in enumerate(chunk):
        if start > begin + CHUNK_S:  # slower than the pool expected: other workers may be idle
            channel.send(("back", (start - begin) / place))
            return True
        out.new_sample()
        try:
            outcomes = score(payloads)
        except _ANYTHING:  # with damaged builtins even describing an error raises one
            outcomes = None
        if own_process() != process:  # the function forked, and this is the child, which returned too
            os._exit(0)
        damage = shared_state.check()
        out.flush_line()
        end = now()
        if outcomes is None:
            outcomes = [failure(f"it replaced {damage.lasting or 'what reading its score needs'}")] * len(payloads)
        channel.send(("done", number, outcomes, start, end))
        if damage.repaired or damage.lasting:
            channel.send(("damage", damage.lasting, damage.repaired))
        if damage.lasting:
            return False
        start = end
    return True


_ANYTHING = BaseException


def score_task(score: ScoreItems, payloads: Sequence[Payload], seeding: Seeding) -> list[Outcome]:
    """Return one outcome per payload; whatever is raised becomes an outcome."""
    try:
        items = []
        for row, response, tokens, own_words, ids in payloads:
            data_source, ground_truth, extra_info, *more = pickle.loads(row)
            facts = BatchFacts(more[0], more[1], ids) if more else None
            items.append((data_source, response, ground_truth, extra_info, tokens, own_words, facts))
        seeding.new_sample("\n".join([response for _, response, *_ in payloads]))
        return score(items)
    except BaseException as error:
        return [failure(describe_exception(error))] * len(payloads)


class _Lines(io.TextIOBase):
    """Replaces stdout and stderr: sends whole lines to the parent, limited per sample."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._pid, self._rest = channel, os.getpid(), ""
        self.new_sample()

    def new_sample(self) -> None:
        self._lines, self._chars, self._rest = 0, 0, ""

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: a function that closes its stdout must not silence the next one."""

    def write(self, text: str, /) -> int:
        if os.getpid() != self._pid:  # a forked child must not write to its parent's connection
            return os.write(2, utf8(text))
        if self._lines <= PRINT_LINES:
            *lines, self._rest = (self._rest + text[: PRINT_CHARS * 2]).split("\n")
            for line in lines:
                self._send(line)
            if len(self._rest) > PRINT_CHARS:
                self.flush_line()
        return len(text)

    def flush_line(self) -> None:
        if self._rest:
            self._send(self._rest)
            self._rest = ""

    def _send(self, line: str) -> None:
        if self._lines > PRINT_LINES:
            return
        self._lines, self._chars = self._lines + 1, self._chars + len(line)
        if self._lines > PRINT_LINES or self._chars > PRINT_CHARS:
            room = PRINT_CHARS - (self._chars - len(line)) if self._lines <= PRINT_LINES else 0
            self._lines, line = PRINT_LINES + 1, f"{line[:room]}... cut"
        self._channel.send(("print", well_formed(line)))


def serve() -> None:
    """Run the whole process."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent closed the connection
        main()
    # Threads that the user's function left behind must not keep the process alive.
    os._exit(0)


_GENERATORS = ("random", "numpy.random")


class Seeding:
    """Seeds random numbers per sample, so that a score does not depend on which worker computed it, or after what.

    Seeding takes longer than many a score, so only generators that were imported are seeded. As an entry of
    `sys.meta_path` it also sees a generator that a function imports while it scores, and seeds it at once.
    """

    def __init__(self, seed: int = 0) -> None:
        self._base = self._number = seed
        sys.meta_path.insert(0, self)
        for name in _GENERATORS:
            self._seed(sys.modules.get(name))

    def new_sample(self, text: str) -> None:
        self._number = zlib.crc32(text.encode("utf-8", "surrogatepass"), self._base)
        for name in _GENERATORS:
            if name in sys.modules:
                self._seed(sys.modules[name])

    def _seed(self, generator: ModuleType | None) -> None:
        if generator is not None and hasattr(generator, "seed"):  # not if it is a user's file with that name
            generator.seed(self._number)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as usual, and seed it after it has run."""
        if name not in _GENERATORS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_seed(module: ModuleType) -> None:
            run(module)
            self._seed(module)

        spec.loader.exec_module = run_and_seed
        return spec


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

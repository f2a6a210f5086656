"""Files of a run folder: replaced in one step, and read safely although they may be cut off, replaced or malicious.

`replace_file` lets a reader, and a run that is killed, see the old content or the new. When reading, a named pipe, a
device, a broken link or a file of many gigabytes must not hang or fill the process, and a few lines of YAML can expand
to billions of values. All of these raise DamagedFile with one sentence.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from posttrain.errors import UserError, first_line

_LEFT = re.compile(r"\..+\.\d+\.tmp")


def replace_file(path: Path, content: bytes | Callable[[Path], object]) -> None:
    """Make `path` hold `content`, or what `content(temporary path)` writes; after an error the old file stays."""
    # The process id keeps two writers of one file apart; the leading dot hides it from globs over a run's files.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # or else the name may reach the disk before the content
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def clear_leftovers(*folders: Path) -> None:
    """Remove temporary files of killed processes; only for folders into which no other process writes."""
    for folder in folders:
        for path in folder.glob(".*.tmp"):
            if _LEFT.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()


# Of a status or of settings: ten times what a run writes. YAML is parsed at about 100 KB a second.
MOST_BYTES = 256 * 1024
MOST_VALUES = 50_000  # of a file of settings, with every alias expanded
LONGEST_LINE = 4 * 1024 * 1024
MOST_LINE_BYTES = 512 * 1024 * 1024  # of a file with one line per step: a hundred thousand steps
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class DamagedFile(UserError):
    """A file of a run that cannot be read; the text says which and why."""


def open_stored(path: Path) -> BinaryIO:
    """The file, open for reading. FileNotFoundError if there is none, DamagedFile if it is not a regular file."""
    try:
        _require_plain(path, os.stat(path).st_mode)
        # O_NONBLOCK: if the file was replaced by a pipe since the check, opening it would wait for a writer.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.path.islink(path):
            raise DamagedFile(f"{path.name} is a link to a file that does not exist.") from None
        raise
    except OSError as error:
        raise DamagedFile(f"{path.name} cannot be opened: {error.strerror or error}.") from error
    try:
        _require_plain(path, os.fstat(number).st_mode)
    except DamagedFile:
        os.close(number)
        raise
    return os.fdopen(number, "rb")


def is_plain(path: Path) -> bool:
    """Whether this is a regular file, which opens without waiting."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def read_stored(path: Path) -> bytes:
    """The content of a small file; DamagedFile if it has more than MOST_BYTES."""
    with open_stored(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > MOST_BYTES else file.read(MOST_BYTES + 1)
    if size > MOST_BYTES or len(data) > MOST_BYTES:
        raise DamagedFile(f"{path.name} has {max(size, len(data)):,} bytes; at most {MOST_BYTES:,} are read.")
    return data


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds."""
    try:
        found = json.loads(read_stored(path))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path.name} is not valid JSON: {first_line(error)}.") from error
    if not isinstance(found, dict):
        raise DamagedFile(f"{path.name} holds a {type(found).__name__}, not an object.")
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """The YAML mapping that a file holds."""
    text = read_stored(path).decode("utf-8", "replace")
    try:
        found = yaml.load(text, _BoundedLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DamagedFile(f"{path.name} is not valid YAML: {first_line(error)}.") from error
    if found is not None and not isinstance(found, dict):
        raise DamagedFile(f"{path.name} holds a {type(found).__name__}, not settings by name.")
    return found or {}


def stored_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Whole lines from byte `start` on, with their line ends; an incomplete last line is not returned."""
    with open_stored(path) as file:
        file.seek(start)
        place = start
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise DamagedFile(
                    f"{path.name} has a line of more than {LONGEST_LINE:,} bytes, from byte {place:,} on."
                )
            if not line.endswith(b"\n"):
                return
            place += len(line)
            if place > MOST_LINE_BYTES:
                raise DamagedFile(f"{path.name} is read up to byte {MOST_LINE_BYTES:,}; there is more.")
            yield line


def _require_plain(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "no file")
        raise DamagedFile(f"{path.name} is {kind}, not a file.")


class _BoundedLoader(yaml.SafeLoader):
    # Counts values as they would be without aliases: lists of aliases of lists of aliases grow tenfold per line.
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._count, self._size_of = 0, {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias = self.check_event(yaml.AliasEvent)
        event, before = self.peek_event(), self._count
        node = super().compose_node(parent, index)
        # An alias of a node that contains it is endless and has no size yet: count it as too many.
        self._count += self._size_of.get(event.anchor, MOST_VALUES) if is_alias else 1
        if self._count > MOST_VALUES:
            raise yaml.YAMLError(f"it stands for more than {MOST_VALUES:,} values")
        if not is_alias and event.anchor:
            self._size_of[event.anchor] = self._count - before
        return node


class Background:
    """Runs work in a thread, one piece at a time and in order, so that at most one step's samples wait in memory.

    An error is raised by the next call of `run` or `wait`, so none is lost.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self, work: Callable[[], object]) -> None:
        """Start `work` when the piece before it is done."""
        self.wait()

        def piece() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        # Not a daemon: a process that ends normally waits until the files are written.
        self._thread = threading.Thread(target=piece, name=self.name)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the running piece; raise its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

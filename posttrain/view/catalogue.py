"""Filters and full-text search over all samples of a run.

`Catalogue` holds a few numbers of every response in memory, so that a million of them can be filtered quickly. It is
read in the background, newest step first; an answer says how much has been read. Background work pauses while a request
is being answered, because Python computes in one thread at a time.

`search` goes newest step first and gives hits as they are found. Two threads read ahead (Arrow reads and compares
outside of Python's lock). Files that cannot contain the words are skipped: `TrigramIndex` holds the trigrams (three
consecutive bytes) of each file's texts as a bitmap of 32 KiB. It is built in the background as soon as samples are
viewed, newest file first, and kept in memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.tracking.samples import step_of
from posttrain.view.runs import number
from posttrain.view.samples import KINDS, LIGHT, SampleFile, pc, preview

REFRESH_S = 2.0
MOST = 500  # responses in one answer


class Part:
    """The responses of one file."""

    def __init__(self, path: Path) -> None:
        table = SampleFile(path).columns(LIGHT)
        self.step, self.rows = step_of(path), len(table)
        self.uid, self.sample = table["uid"].combine_chunks(), _array(table["sample"], np.int32, -1)
        self.score, self.mismatch = _array(table["score"], np.float32), _array(table["mismatch"], np.float32)
        self.length, self.data_row = _array(table["length"], np.int32, 0), _array(table["data_row"], np.int64, -1)
        self.truncated = _flags(table["finish_reason"], lambda reasons: pc.equal(reasons, "length"))
        self.failed = pc.is_valid(table["error"]).to_numpy(zero_copy_only=False)


class Catalogue:
    """All responses of one run and kind; `refresh` notices new, changed and removed files."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self._parts: dict[Path, tuple[int, Part | None]] = {}
        self._lock, self._thread, self._looked = threading.Lock(), None, 0.0
        self.total = 0

    def refresh(self) -> None:
        """Look for new files and have them read by a thread of its own."""
        with self._lock:
            if time.monotonic() - self._looked < REFRESH_S or (self._thread and self._thread.is_alive()):
                return
            self._looked = time.monotonic()
            files = {path: _modified_at(path) for path in reversed(KINDS[self.kind](self.folder / "samples"))}
            self._parts = {path: known for path, known in self._parts.items() if files.get(path) == known[0]}
            self.total = len(files)
            missing = [(path, changed) for path, changed in files.items() if path not in self._parts]
            if missing:
                self._thread = threading.Thread(target=self._read, args=(missing,), daemon=True)
                self._thread.start()

    def _read(self, missing: list[tuple[Path, int]]) -> None:
        for path, changed in missing:
            yield_to_answers()
            try:
                part = Part(path)
            except Exception:  # removed by thinning, or damaged: read the other files
                part = None
            self._parts[path] = (changed, part)

    def wait(self, seconds: float | None = None) -> None:
        """Until everything was read; within an answer, at most so long."""
        thread = self._thread
        if thread and thread.is_alive():
            with nullcontext() if seconds is None else while_waiting():
                thread.join(seconds)

    def parts(self) -> list[Part]:
        """What was read up to now, newest step first."""
        known = [part for _, part in list(self._parts.values()) if part is not None]
        return sorted(known, key=lambda part: -part.step)

    # -- questions

    def find(self, which: str, step: int | None = None) -> dict[str, Any]:
        """At most MOST responses by one of FILTERS, of a step or of all, newest first among equals."""
        rule = FILTERS[which]
        self.refresh()
        self.wait(0.15)  # enough for short runs; for long ones the answer says how much was read
        parts = [part for part in self.parts() if step is None or part.step == step]
        chosen, count = rule(parts)
        return self._answer(parts, chosen) | {"count": count}

    def same_prompt(self, data_row: int) -> dict[str, Any]:
        """All groups of one row of the data, oldest step first."""
        self.refresh()
        self.wait(0.15)
        found = []
        for part in reversed(self.parts()):
            rows = np.flatnonzero(part.data_row == data_row)
            if not len(rows):
                continue
            for uid in dict.fromkeys(part.uid.take(pa.array(rows)).to_pylist()):
                own = [row for row in rows.tolist() if part.uid[row].as_py() == uid]
                scores = part.score[own]
                mean = number(float(np.nanmean(scores))) if np.isfinite(scores).any() else None
                length = number(float(part.length[own].mean()))
                found.append({"step": part.step, "uid": uid, "n": len(own), "mean": mean, "length": length})
        return {"groups": found, **self._progress()}

    def _answer(self, parts: list[Part], chosen: list[tuple[int, int]]) -> dict[str, Any]:
        found = []
        for place, row in chosen:
            part = parts[place]
            found.append(
                {
                    "step": part.step,
                    "row": row,
                    "uid": part.uid[row].as_py(),
                    "sample": int(part.sample[row]),
                    "score": number(float(part.score[row])),
                    "length": int(part.length[row]),
                    "mismatch": number(float(part.mismatch[row])),
                    "truncated": bool(part.truncated[row]),
                    "failed": bool(part.failed[row]),
                }
            )
        return {"found": found, **self._progress()}

    def _progress(self) -> dict[str, int]:
        return {"read": len(self._parts), "files": self.total}


def previews(folder: Path, kind: str, wanted: list[tuple[int, int]]) -> list[str]:
    """The beginnings of responses, given by (step, row)."""
    texts: dict[tuple[int, int], str] = {}
    for step, own in by_step(wanted).items():
        try:
            found = SampleFile(folder / "samples" / f"{kind}_{step}.parquet").take(own, ("response",))
        except (OSError, pa.ArrowException, IndexError):
            continue
        texts |= {(step, row): preview(one["response"]) for row, one in zip(own, found, strict=True)}
    return [texts.get(key, "") for key in wanted]


def by_step(wanted: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """The rows of each step among pairs (step, row)."""
    rows: dict[int, list[int]] = {}
    for step, row in wanted:
        rows.setdefault(step, []).append(row)
    return rows


Rule = Callable[[list[Part]], tuple[list[tuple[int, int]], int]]


def _largest(values_of: Callable[[Part], np.ndarray]) -> Rule:
    # In descending order; among equal values newer steps first.
    def rule(parts: list[Part]) -> tuple[list[tuple[int, int]], int]:
        if not parts:
            return [], 0
        values = np.concatenate([values_of(part) for part in parts])
        values = np.where(np.isfinite(values), values, -np.inf)
        count = int(np.isfinite(values).sum())
        most = min(MOST, count)
        if most == 0:
            return [], 0
        # A partition finds the least value that is shown without sorting a million others.
        bound = np.partition(values, len(values) - most)[len(values) - most]
        above = np.flatnonzero(values > bound)
        above = above[np.argsort(-values[above], kind="stable")]
        equal = np.flatnonzero(values == bound)[: most - len(above)]
        return _places(parts, np.concatenate([above, equal])), count

    return rule


def _with_flag(marks_of: Callable[[Part], np.ndarray]) -> Rule:
    def rule(parts: list[Part]) -> tuple[list[tuple[int, int]], int]:
        marks = np.concatenate([marks_of(part) for part in parts]) if parts else np.zeros(0, bool)
        found = np.flatnonzero(marks)
        return _places(parts, found[:MOST]), len(found)

    return rule


FILTERS: dict[str, Rule] = {
    "best": _largest(lambda part: part.score),
    "worst": _largest(lambda part: -part.score),
    "mismatch": _largest(lambda part: part.mismatch),
    "longest": _largest(lambda part: part.length.astype(np.float32)),
    "truncated": _with_flag(lambda part: part.truncated),
    "failed": _with_flag(lambda part: part.failed),
}


def _places(parts: list[Part], rows: np.ndarray) -> list[tuple[int, int]]:
    # Rows counted over all parts -> (number of the part, row in it).
    ends = np.cumsum([part.rows for part in parts])
    owners = np.searchsorted(ends, rows, side="right")
    return [(int(owner), int(row - (ends[owner - 1] if owner else 0))) for owner, row in zip(owners, rows, strict=True)]


def _array(column: Any, kind: Any, empty: float = np.nan) -> np.ndarray:
    if pa.types.is_null(column.type):
        return np.full(len(column), empty, kind)
    values = (
        pc.fill_null(column, empty if pa.types.is_floating(column.type) else int(empty))
        if column.null_count
        else column
    )
    return values.to_numpy(zero_copy_only=False).astype(kind)


def _flags(column: Any, test: Callable[[Any], Any]) -> np.ndarray:
    if pa.types.is_null(column.type):
        return np.zeros(len(column), bool)
    return pc.fill_null(test(column), False).to_numpy(zero_copy_only=False)


def _modified_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


# The longest pause: a page that asks without end must not stop the reading.
LONGEST_S = 0.5

_lock, _asked = threading.Lock(), 0


@contextmanager
def answering(change: int = 1) -> Iterator[None]:
    """Wraps the making of an answer."""
    global _asked
    with _lock:
        _asked += change
    try:
        yield
    finally:
        with _lock:
            _asked -= change


def while_waiting() -> AbstractContextManager[None]:
    """Wraps the part of an answer that waits for the background work itself, which must not pause then."""
    return answering(-1)


def yield_to_answers() -> None:
    """Called by background work between two files: wait until no answer is being made."""
    until = time.monotonic() + LONGEST_S
    while _asked > 0 and time.monotonic() < until:
        time.sleep(0.002)


BITS = 18  # 2**18 bits are 32 KiB a file


class TrigramIndex:
    """The bitmaps of one run's files. `learn` makes missing ones; a file without one is not ruled out."""

    def __init__(self) -> None:
        self._maps: dict[Path, tuple[int, np.ndarray]] = {}
        self._lock, self._thread = threading.Lock(), None

    def learn(self, paths: list[Path], wait: Callable[[], object]) -> None:
        """Have a thread of its own make what is missing, after `wait`."""
        with self._lock:
            if self._thread and self._thread.is_alive():
                return
            missing = [path for path in paths if not self._is_known(path)]
            if missing:
                self._thread = threading.Thread(target=self._make, args=(missing, wait), daemon=True)
                self._thread.start()

    def rules_out(self, path: Path, words: str) -> bool:
        """Whether the file cannot hold these words, in capitals or not."""
        data = np.frombuffer(words.strip().lower().encode("utf-8", "replace"), np.uint8)
        if len(data) < 3 or not self._is_known(path):
            return False
        wanted = _codes(data)
        known = self._maps[path][1]
        return not bool(((known[wanted >> 3] >> (wanted & 7)) & 1).all())

    def _is_known(self, path: Path) -> bool:
        return path in self._maps and self._maps[path][0] == _modified_at(path)

    def _make(self, paths: list[Path], wait: Callable[[], object]) -> None:
        wait()
        for path in paths:
            yield_to_answers()
            try:
                changed = path.stat().st_mtime_ns
                self._maps[path] = (changed, bitmap(path))
            except Exception:  # removed by thinning, or damaged: it is not ruled out
                continue


def bitmap(path: Path) -> np.ndarray:
    """One bit per hash of three bytes that follow each other in prompts and responses, in small letters."""
    table = SampleFile(path).columns(("prompt", "response"))
    marks = np.zeros(1 << BITS, bool)
    for column in table.columns:
        if pa.types.is_null(column.type):
            continue
        for chunk in column.chunks:
            data = pc.utf8_lower(chunk).buffers()[2]
            # Rows lie end to end. Trigrams that span two of them only make the index less strict.
            if data is not None and data.size >= 3:
                marks[_codes(np.frombuffer(data, np.uint8))] = True
    return np.packbits(marks, bitorder="little")


def _codes(data: np.ndarray) -> np.ndarray:
    wide = data.astype(np.uint32)
    codes = (wide[:-2] << 16) | (wide[1:-1] << 8) | wide[2:]
    # Multiplicative hashing (Knuth): the upper bits of this product are well mixed.
    return (codes * np.uint32(2654435761)) >> np.uint32(32 - BITS)


MOST_HITS = 200
AROUND = 60  # characters on either side of a hit
_COLUMNS = ("prompt", "response")
_AHEAD = 6


def search(
    folder: Path, kind: str, words: str, index: TrigramIndex, *, before: int | None = None
) -> Iterator[dict[str, Any]]:
    """Lines `{"hits": [...]}` and `{"at": step, "done": files, "files": all}`; the last has `end`.

    A hit is (step, uid, sample, score, column, text around). `before`: only steps before this one, to continue.
    """
    paths = [path for path in reversed(KINDS[kind](folder / "samples")) if before is None or step_of(path) < before]
    words, found, at = words.strip(), 0, None
    if not words:
        paths = []
    with ThreadPoolExecutor(2) as pool:
        try:
            for done, (path, hits) in enumerate(_ahead(pool, paths, words, index), 1):
                at = step_of(path)
                if hits:
                    found += len(hits)
                    yield {"hits": hits, "at": at, "done": done, "files": len(paths)}
                elif done % 25 == 0:
                    yield {"at": at, "done": done, "files": len(paths)}
                if found >= MOST_HITS:
                    break
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    yield {"end": True, "found": found, "at": at, "more": found >= MOST_HITS, "files": len(paths)}


def _ahead(
    pool: ThreadPoolExecutor, paths: list[Path], words: str, index: TrigramIndex
) -> Iterator[tuple[Path, list[Any]]]:
    # In order, with up to _AHEAD files being searched in advance.
    waiting: deque[tuple[Path, Future[list[Any]]]] = deque()
    for path in paths:
        if index.rules_out(path, words):
            continue
        waiting.append((path, pool.submit(_search_file, path, words)))
        if len(waiting) >= _AHEAD:
            first, future = waiting.popleft()
            yield first, future.result()
    for path, future in waiting:
        yield path, future.result()


def _search_file(path: Path, words: str) -> list[dict[str, Any]]:
    try:
        file = SampleFile(path)
        texts = file.columns(_COLUMNS)
        holds_words = lambda column: pc.match_substring(pc.utf8_lower(column), words.lower())  # noqa: E731
        marks = {name: _flags(texts[name], holds_words) for name in _COLUMNS}
        rows = np.flatnonzero(marks["prompt"] | marks["response"])[:MOST_HITS].tolist()
        if not rows:
            return []
        about = file.take(rows, ("uid", "sample", "score"))
    except Exception:  # removed meanwhile, or damaged: search the others
        return []
    hits = []
    for row, one in zip(rows, about, strict=True):
        column = "response" if marks["response"][row] else "prompt"
        text = _around(texts[column][row].as_py(), words)
        hits.append({"step": step_of(path), **one, "score": number(one["score"]), "in": column, "text": text})
    return hits


def _around(text: str, words: str) -> list[str]:
    place = text.lower().find(words.lower())
    if place < 0 or len(text.lower()) != len(text):
        return ["", "", text[: 2 * AROUND]]
    end = place + len(words)
    return [text[max(0, place - AROUND) : place], text[place:end], text[end : end + AROUND]]

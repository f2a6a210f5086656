"""Full-text search over samples: newest step first, hits are given as they are found.

Two threads read ahead (Arrow reads and compares outside of Python's lock). Files that cannot contain the words are
skipped: `TrigramIndex` holds the trigrams (three consecutive bytes) of each file's texts as a bitmap of 32 KiB. It is
built in the background as soon as samples are viewed, newest file first, and kept in memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.tracking.samples import step_of
from posttrain.view.catalogue import yield_to_answers
from posttrain.view.runs import number
from posttrain.view.samples import KINDS, SampleFile, pc

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
        known = self._maps.get(path)
        try:
            return known is not None and known[0] == path.stat().st_mtime_ns
        except OSError:
            return False

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


MOST = 200
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
                if found >= MOST:
                    break
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    yield {"end": True, "found": found, "at": at, "more": found >= MOST, "files": len(paths)}


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
        marks = {name: _contains(texts[name], words) for name in _COLUMNS}
        rows = np.flatnonzero(marks["prompt"] | marks["response"])[:MOST].tolist()
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


def _contains(column: Any, words: str) -> np.ndarray:
    if pa.types.is_null(column.type):
        return np.zeros(len(column), bool)
    marks = pc.match_substring(pc.utf8_lower(column), words.lower())
    return pc.fill_null(marks, False).to_numpy(zero_copy_only=False)


def _around(text: str, words: str) -> list[str]:
    place = text.lower().find(words.lower())
    if place < 0 or len(text.lower()) != len(text):
        return ["", "", text[: 2 * AROUND]]
    end = place + len(words)
    return [text[max(0, place - AROUND) : place], text[place:end], text[end : end + AROUND]]

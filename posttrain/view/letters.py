"""Letters: which three bytes follow each other anywhere in a file's texts, as a small bitmap per file.

A search for rare words then reads only the files that may hold them. The maps are made in the background as soon as
somebody looks at samples, newest file first, and are kept in memory; 32 KiB a file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from posttrain.view.courtesy import give_way
from posttrain.view.sample_file import SampleFile, pc

BITS = 18


class Letters:
    """The maps of one run's files. `learn` makes the missing ones; until then nothing is ruled out."""

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
            give_way()
            try:
                changed = path.stat().st_mtime_ns
                self._maps[path] = (changed, bitmap(path))
            except Exception:  # thinned away, or damaged in any way: nothing is ruled out there
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
            if data is not None and data.size >= 3:  # rows stand end to end: what spans two of them does no harm
                marks[_codes(np.frombuffer(data, np.uint8))] = True
    return np.packbits(marks, bitorder="little")


def _codes(data: np.ndarray) -> np.ndarray:
    wide = data.astype(np.uint32)
    codes = (wide[:-2] << 16) | (wide[1:-1] << 8) | wide[2:]
    return (codes * np.uint32(2654435761)) >> np.uint32(32 - BITS)

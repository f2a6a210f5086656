"""Full-text search over samples: newest step first, hits are given as they are found.

Two threads read ahead (the reading and comparing happens outside Python); files that cannot hold the words are passed
over by what the index of letters knows of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.tracking.samples import step_of
from posttrain.view.letters import Letters
from posttrain.view.metrics import number
from posttrain.view.sample_file import SampleFile, pc
from posttrain.view.samples import KINDS

MOST = 200
AROUND = 60
"""Characters on either side of a hit."""
_COLUMNS = ("prompt", "response")
_AHEAD = 6


def search(
    folder: Path, kind: str, words: str, letters: Letters, *, before: int | None = None
) -> Iterator[dict[str, Any]]:
    """Lines `{"hits": [...]}` and `{"at": step, "done": files, "files": all}`; the last has `end`.

    A hit is (step, uid, sample, score, column, text around). `before`: only steps before this one, to go on with.
    """
    paths = [path for path in reversed(KINDS[kind](folder / "samples")) if before is None or step_of(path) < before]
    words, found, at = words.strip(), 0, None
    if not words:
        paths = []
    with ThreadPoolExecutor(2) as pool:
        try:
            for done, (path, hits) in enumerate(_ahead(pool, paths, words, letters), 1):
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
    pool: ThreadPoolExecutor, paths: list[Path], words: str, letters: Letters
) -> Iterator[tuple[Path, list[Any]]]:
    """(path, hits) in order, some files being searched ahead."""
    waiting: deque[tuple[Path, Future[list[Any]]]] = deque()
    for path in paths:
        if letters.rules_out(path, words):
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
    except Exception:  # thinned away meanwhile, or damaged in any way: the others are searched nevertheless
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
    """What stands before the hit, the hit, and what follows it."""
    place = text.lower().find(words.lower())
    if place < 0 or len(text.lower()) != len(text):
        return ["", "", text[: 2 * AROUND]]
    end = place + len(words)
    return [text[max(0, place - AROUND) : place], text[place:end], text[end : end + AROUND]]

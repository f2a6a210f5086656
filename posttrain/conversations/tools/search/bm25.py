"""BM25 over passages, by numpy: score(q, d) = sum over words w of q of idf(w) * tf * (k + 1) / (tf + k * (1 - b + b *
|d| / mean |d|)), with k = 1.2, b = 0.75 and idf(w) = ln(1 + (N - n_w + 0.5) / (n_w + 0.5)).

Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009; idf as in Lucene, never below 0.
The weight of each word in each passage is computed once; a query adds up those of its words.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

_K, _B = 1.2, 0.75
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


def split_words(text: str) -> list[str]:
    """Words in lower case; characters of scripts without spaces are words."""
    return _WORD.findall(text.lower())


class BM25:
    """The index of some passages."""

    def __init__(self, passages: Sequence[str]) -> None:
        self._size = len(passages)
        self._words: dict[str, int] = defaultdict()
        self._words.default_factory = self._words.__len__  # pyright: ignore
        tokens, lengths = array("l"), np.zeros(self._size, dtype=np.int64)
        number = self._words.__getitem__
        for place, passage in enumerate(passages):
            words = split_words(passage)
            lengths[place] = len(words)
            tokens.extend(map(number, words))
        self._words.default_factory = None  # pyright: ignore
        self._weigh(np.frombuffer(tokens, dtype=np.dtype("l")) if tokens else np.zeros(0, np.int64), lengths)

    def _weigh(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Of each word, the passages that have it, in order, and its weight in each."""
        size = max(self._size, 1)
        pairs = tokens * size + np.repeat(np.arange(self._size), lengths)
        pairs, counts = np.unique(pairs, return_counts=True)
        words, self._places = np.divmod(pairs, size)
        self._starts = np.searchsorted(words, np.arange(len(self._words) + 1))
        having = np.diff(self._starts)
        idf = np.log1p((self._size - having + 0.5) / (having + 0.5))
        long = lengths / max(lengths.mean() if self._size else 0.0, 1e-9)
        norm = _K * (1 - _B + _B * long[self._places])
        self._weights = (np.repeat(idf, having) * counts * (_K + 1) / (counts + norm)).astype(np.float32)

    def best(self, query: str, most: int) -> list[tuple[int, float]]:
        """(passage, score) of the best, at most so many; equal scores in the order of the passages."""
        scores = np.zeros(self._size, dtype=np.float32)
        for word in sorted({number for word in split_words(query) if (number := self._words.get(word)) is not None}):
            span = slice(self._starts[word], self._starts[word + 1])
            scores[self._places[span]] += self._weights[span]
        found = np.flatnonzero(scores > 0)
        if len(found) > most:
            # All that are at least as good as the last: which of equal ones argpartition takes is left open.
            last = np.partition(scores[found], len(found) - most)[len(found) - most]
            found = found[scores[found] >= last]
        order = found[np.argsort(-scores[found], kind="stable")][:most]
        return [(int(place), float(scores[place])) for place in order]

"""Texts of token rows: decoded all at once where that gives what row by row gives."""

from __future__ import annotations

import pytest

from posttrain.models.embedded import byte_tokenizer
from posttrain.texts import common_start, texts_of

ROWS = [[72, 101, 300, 108], [], [301, 33], [72, 32, 46]]


def test_the_common_start_ends_where_two_sequences_differ_or_one_ends():
    assert common_start([1, 2, 3], (1, 2, 4)) == 2 == common_start("abc", "ab")
    assert common_start([], [1]) == 0 == common_start([2, 1], [1, 2]) and common_start("ab", "ab") == 2


@pytest.mark.parametrize("clean", [False, True])
def test_texts_are_those_of_the_tokenizer(clean, monkeypatch):
    tokenizer = byte_tokenizer(400)
    tokenizer.clean_up_tokenization_spaces = clean  # may do something to each text afterwards
    row_by_row = tokenizer.batch_decode(ROWS, skip_special_tokens=True)
    asked = []
    batch_decode = type(tokenizer).batch_decode
    monkeypatch.setattr(type(tokenizer), "batch_decode", lambda *a, **k: (asked.append(1), batch_decode(*a, **k))[1])
    assert texts_of([tuple(row) for row in ROWS], tokenizer) == row_by_row
    assert bool(asked) is clean, "a plain tokenizer decodes all rows at once"


def test_a_tokenizer_of_its_own_kind_is_asked_itself():
    class Own:
        def batch_decode(self, rows, skip_special_tokens):
            return ["".join(map(chr, row)) for row in rows]

    assert texts_of([[72, 105]], Own()) == ["Hi"]

"""Conversations in the viewer: each piece of a row by who wrote it, with the calls and the reward of each turn."""

from __future__ import annotations

import json
from typing import Any

from posttrain.view.samples import turns_of

LETTERS = [bytes([value]) for value in range(128)]


def row(text: str, mask: str, **fields: Any) -> dict[str, Any]:
    """A row as the sample files have it; lists that they hold as JSON are given as lists."""
    empty = dict.fromkeys(("parent", "fork", "turn_ends", "tool_calls", "call_seconds", "turn_rewards"))
    texts = {name: json.dumps(value) if isinstance(value, list) else value for name, value in fields.items()}
    ids = {"prompt_ids": [65, 66], "response_ids": list(text.encode()), "response_mask": [int(one) for one in mask]}
    return empty | ids | texts


def pieces(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(piece["by"], piece["text"], piece.get("turn"), piece.get("reward")) for piece in found]


def test_turns_have_their_rewards_and_the_calls_that_they_made():
    calls = [{"turn": 1, "name": "where", "arguments": {"is": "hat"}, "answer": "den", "error": None}]
    given = {"turn_ends": [[0, 3], [1, 8]], "turn_rewards": [[1, 0.5]], "tool_calls": calls, "call_seconds": [0.25]}
    found = turns_of(row("ask den ok!", "11100001000", **given), LETTERS)
    assert pieces(found) == [
        ("model", "ask", 1, None),
        ("read", " den", None, None),
        ("model", " ", 2, 0.5),
        ("read", "ok!", None, None),
    ]
    assert found[0]["calls"] == [{"name": "where", "arguments": {"is": "hat"}, "error": None, "seconds": 0.25}]
    assert found[2]["calls"] == [] and [piece["tokens"] for piece in found] == [3, 4, 1, 3]


def test_two_turns_without_anything_between_them_are_two():
    found = turns_of(row("abcd", "1111", turn_ends=[[0, 2], [1, 4]]), LETTERS)
    assert pieces(found) == [("model", "ab", 1, None), ("model", "cd", 2, None)]


def test_a_branch_shows_apart_what_it_shares_with_another():
    found = turns_of(row("abcdef", "000011", parent=0, fork=5, turn_ends=[[2, 6]]), LETTERS)
    assert pieces(found) == [("shared", "abc", None, None), ("read", "d", None, None), ("model", "ef", 3, None)]


def test_rows_of_earlier_versions_are_divided_by_what_was_trained_on():
    found = turns_of(row("abcdef", "110011"), LETTERS)
    assert pieces(found) == [("model", "ab", 1, None), ("read", "cd", None, None), ("model", "ef", 2, None)]

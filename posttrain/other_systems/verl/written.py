"""Keys of verl as the user wrote them: what translations read, and how they refuse."""

from __future__ import annotations

from posttrain.config.merge import Entry, Merged
from posttrain.config.resolved import Problem
from posttrain.other_systems.verl.rule import NOTHING, plain

ON = ("true", "1", "yes", "on")


def number(merged: Merged, key: str, default: float) -> float:
    """The value of a key, which may still be text."""
    try:
        return float(str(merged.value(key)))
    except (KeyError, ValueError):
        return default


def refuse(merged: Merged, entry: Entry, why: str, do: str) -> None:
    """Add a problem: this value cannot be used."""
    what = f"`{entry.spelling}={entry.value}` cannot be used: {why}."
    merged.problems.append(Problem(what, entry.source, do))


def is_empty(entry: Entry) -> bool:
    """Whether the value says nothing."""
    return plain(entry.value) in NOTHING or plain(entry.value).startswith("${oc.select")


def given(merged: Merged, key: str) -> str:
    """What the user said under a key, as plain text; empty if nothing."""
    # Only what the user said: a default of ours must not decide what verl's script means.
    entry = merged.elsewhere.get(key) or merged.entries.get(key)
    return plain(entry.value) if entry is not None and entry.explicit else ""

"""Entries of merged settings: a derived one taken out, and others put in on its behalf or by default."""

from __future__ import annotations

from typing import Any

from posttrain.config.merge import Entry, Merged
from posttrain.config.problem import Problem


def take(merged: Merged, key: str) -> Entry | None:
    """The entry of a derived key, taken out: what it means is set instead."""
    return merged.entries.pop(key, None)


def put(merged: Merged, key: str, value: Any, by: Entry) -> None:
    """Set a key on behalf of a derived one, by the same ranks as if it had been written itself."""
    old = merged.entries.get(key)
    if old is not None and old.explicit and old.rank > by.rank:
        return
    if old is not None and old.explicit and old.rank == by.rank and old.value != value:
        what = f"`{by.spelling}={by.value}` means `{key}={value}`, but `{old.spelling}={old.value}` is set too."
        where = old.source if old.source == by.source else f"{by.source}, and {old.source}"
        merged.problems.append(Problem(what, where, "keep one of them", (key,)))
    merged.entries[key] = Entry(value, by.source, by.spelling, by.rank, by.explicit)


def set_default(merged: Merged, key: str, value: Any, why: str) -> None:
    """A default that depends on the run; it does not count as set by the user."""
    merged.entries[key] = Entry(value, f"default ({why})", key, -1, False)

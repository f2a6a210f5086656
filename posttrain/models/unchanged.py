"""While weights do not change, as over the passes of one update, what is made from them is made once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Made = TypeVar("Made")
_here = threading.local()  # another thread has a model of its own


@contextmanager
def weights_unchanged() -> Iterator[None]:
    before = getattr(_here, "made", None)
    _here.made = {}
    try:
        yield
    finally:
        _here.made = before


def once(key: Any, make: Callable[[Any], Made]) -> Made:
    """make(key), kept until weights may change again; made each time where that is not known."""
    made: dict[Any, Any] | None = getattr(_here, "made", None)
    if made is None:
        return make(key)
    if key not in made:
        made[key] = make(key)
    return made[key]

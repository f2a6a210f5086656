"""Marks on a worker's methods: how the data of a call is spread over the workers of a group."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """SPLIT cuts a DataProto by rows over the ranks and joins the results; ALL sends it whole; ONE asks rank 0."""

    SPLIT = "split"
    ALL = "all"
    ONE = "one"


def register(dispatch: Dispatch) -> Callable[[Method], Method]:
    """Make a method callable through a worker group."""

    def mark(method: Method) -> Method:
        method.dispatch = dispatch  # pyright: ignore
        return method

    return mark

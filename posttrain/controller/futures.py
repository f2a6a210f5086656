"""What a call that is not waited for gives: its result, later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Future(ABC):
    """The result of a call to workers."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` would return at once."""

    @abstractmethod
    def result(self) -> Any:
        """What the call gave, or the error that it ended with; waits for it."""


class Finished(Future):
    """A call that was made when it was asked for: the local worker's."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self._value = self._error = None
        try:
            self._value = call(*arguments)
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

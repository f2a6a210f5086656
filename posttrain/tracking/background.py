"""Work beside the run's own: files are compressed and written while the device computes the next step.

One piece at a time, in order, so that no more than one step's rows wait in memory. What a piece raises is raised by the
next call of `run` or `wait`: an error reaches the run a little later, and never not at all. The thread is no daemon; a
process that ends by itself ends after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs pieces of work in a thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self, work: Callable[[], object]) -> None:
        """Start `work` when the piece before it is done."""
        self.wait()

        def piece() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=piece, name=self.name)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way; raises what the last piece raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

"""The end of a run whose reward gives no scores: nothing could be learnt from it, and its curves would say nothing.

A reward that fails on a whole batch before it has ever given a score is wrong, and is refused at once. One that worked
before may come back (a server that is started again), so that it has a few batches' time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from posttrain.rewards.types import RewardError

PATIENCE = 3
"""Batches in a row that may fail altogether once there were scores."""
TRY = "correct it; `posttrain reward try FN DATA` shows what a reward makes of data, without a model"


class AllFailed(RewardError):
    """No response of a batch could be scored; the text says why."""


class FailureWatch:
    """Told the errors of every batch of one reward; raises AllFailed when it gives no scores."""

    def __init__(self, what: str = "reward", where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do or TRY
        self._worked, self._in_a_row = False, 0

    def look(self, errors: Sequence[str | None]) -> None:
        """One entry per response: why it could not be scored, or None."""
        if not errors:
            return
        if any(error is None for error in errors):
            self._worked, self._in_a_row = True, 0
            return
        self._in_a_row += 1
        if not self._worked or self._in_a_row >= PATIENCE:
            raise all_failed([error or "" for error in errors], self.what, self.where, self.do, batches=self._in_a_row)


def all_failed(
    errors: Sequence[str], what: str = "reward", where: str = "", do: str = TRY, *, batches: int = 1
) -> AllFailed:
    """The error for responses none of which could be scored."""
    often = Counter(errors).most_common()
    reason = often[0][0].replace("\n", "\n    ")
    others = f"\n  and {len(often) - 1} other errors" if len(often) > 1 else ""
    last = f" of each of the last {batches} batches" if batches > 1 else ""
    return AllFailed(
        f"The {what} failed on all {len(errors)} responses{last}, so that nothing can be learnt:\n    {reason}{others}",
        where,
        do,
    )

"""The records of the reward package: what is scored, the outcome, which function scores, messages, and errors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import UserError
from posttrain.settings import LARGEST_SCORE

# The messages between a RewardPool and one of its workers (`machines/channel.py` is their connection).
#
# To the worker: the RewardSpec, then chunks of tasks [(task's number, [Payload, ...]), ...]
# From it:       ("ready", spec) or ("failed", what, todo); ("print", line); ("wait", seconds);
#                ("done", number, [(score, parts, error), ...], start, end);
#                ("back", seconds of a task): gives back the rest of its chunk
#                ("damage", what, what was restored): after a "done", if its score changed what all scores of a worker
#                share (worker.py). If `what` is not empty, the worker ends.
#
# A worker sends each answer at once, into the socket's buffer. There it is safe whatever the worker does next, and the
# pool reads many at a time.

# Pickled (data_source, ground_truth, extra_info), followed by (prompt, progress) for functions of TRL's form; the
# response, its number of tokens, the part that the model wrote if that is not all, and the token ids for TRL's form.
Payload = tuple[bytes, str, "int | None", "str | None", "Sequence[int] | None"]

# Seconds of work in one chunk; a worker gives back the tasks that it has not begun by then.
CHUNK_S = 0.05
# Most tasks in a chunk. All their answers fit into the socket's buffer, so that a worker never blocks on sending.
CHUNK = 512

# data_source, solution_str, ground_truth, extra_info and number of tokens of one response; the part that the model
# wrote, if that is not all; and BatchFacts, for functions of TRL's form.
Fields = tuple[str, str, Any, Any, "int | None", "str | None", Any]
# Score, named parts, and the error that makes the score invalid, if any.
Outcome = tuple[float, dict[str, "float | str"], "str | None"]
# Returns one outcome per response; gets one response, or all of a group.
ScoreItems = Callable[[Sequence[Fields]], list[Outcome]]

# The error of a response without a score: its advantage is 0, and it is not part of its group's baseline.
NONE_APPLIES = "no reward function applies to this response: each returned None"


class RewardError(UserError):
    """A reward that cannot be used. The message says what is wrong, where it was set and what to do."""

    def __init__(self, what: str, where: str = "", todo: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.todo = what, where, todo

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  set in: {self.where}")
        if self.todo:
            lines.append(f"  to do:  {self.todo}")
        return "\n".join(lines)


@dataclass
class RewardItem:
    """One response to be scored. Items that share `group` are passed to a list-form function in one call."""

    data_source: str | None
    solution_str: str
    ground_truth: Any
    extra_info: Any = None
    group: Hashable = None
    group_size: int = 1
    # Tokens that the model wrote, if known.
    tokens: int | None = None
    # What the model wrote itself, one line per turn, if `solution_str` also holds observations.
    own_words: str | None = None
    # For functions of TRL's form: the row's prompt, the response's tokens, and (finished steps, all steps).
    prompt: Any = None
    token_ids: Sequence[int] | None = None
    progress: tuple[int, int] | None = None


@dataclass
class RewardResult:
    """A score and its named parts; `error` says why the failure score was given instead, or is None."""

    score: float
    parts: dict[str, float | str] = field(default_factory=dict)
    error: str | None = None
    # The duration of the call, which a group shares; None if it did not return.
    seconds: float | None = field(default=None, compare=False)


@dataclass
class RewardSpec:
    """Where a reward function comes from and how it is called: plain data that is sent to the workers."""

    # `builtin` (by data source), `file`, `dotted`, `pickled`, `url`, `shape` (format) or `combined`.
    kind: str = "builtin"
    # The file, dotted path or URL as given; the name of a built-in scorer, or empty for the row's own.
    path: str = ""
    # The function's name; filled in when the reward is resolved.
    name: str | None = None
    # Which signature the function has: `source`, `pair`, `list` or `batch`.
    form: str = "source"
    # Columns that the rows must have.
    columns: list[str] = field(default_factory=list)
    # Further keyword arguments of every call.
    kwargs: dict[str, Any] = field(default_factory=dict)
    # The working folder: dotted paths are looked up here first.
    folder: str = field(default_factory=os.getcwd)
    # Import path of the process that named the function; needed for functions pickled by reference.
    sys_path: list[str] = field(default_factory=list)
    # The function itself, if an object was given instead of a path.
    pickled: bytes = b""
    # `scorers.CODE_SETTINGS`; empty means the defaults.
    code: dict[str, Any] = field(default_factory=dict)
    # Seeds the random numbers that the function draws.
    seed: int = 0
    # The deadline of a score; requests to servers end before it.
    timeout_s: float = 10.0
    # The functions of a combined reward.
    parts: list[RewardPart] = field(default_factory=list)
    # How messages name it.
    label: str = "built-in scorers, by data_source"

    @property
    def takes_groups(self) -> bool:
        """Whether all responses of a prompt are scored by one call."""
        return self.form in ("list", "batch")


@dataclass
class RewardPart:
    """One function of a combined reward."""

    name: str
    weight: float
    # Counts only if the part of this name judged the response right.
    needs: str | None
    spec: RewardSpec


@dataclass(frozen=True)
class RewardList:
    """Functions whose scores are summed, from `posttrain.train(reward=[f, g], reward_weights=[1.0, 0.5])`."""

    functions: Sequence[Callable[..., Any]]
    # One per function; None means 1.
    weights: Sequence[float] | None = None


TOO_LARGE = f": scores end at {LARGEST_SCORE:g}, training could not square larger ones"


def is_usable(score: float) -> bool:
    """Whether a score can be trained on: finite, and small enough."""
    return abs(score) <= LARGEST_SCORE


def failure(error: str) -> Outcome:
    return (0.0, {}, error)


# Once there were scores, this many batches in a row may fail: a server may be restarting.
PATIENCE = 3
TRY = "correct it; `posttrain reward try FN DATA` shows what a reward makes of data, without a model"


class AllFailed(RewardError):
    """No response of a batch could be scored; the text says why."""


class FailureWatch:
    """Checks the errors of every batch of one reward, and raises AllFailed if it gives no scores.

    A reward that fails on a whole batch before it ever gave a score is wrong, and stops the run at once: nothing could
    be learnt from it. A reward that worked before gets a few more batches.
    """

    def __init__(self, what: str = "reward", where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do or TRY
        self._worked, self._in_a_row = False, 0

    def check(self, errors: Sequence[str | None]) -> None:
        """`errors` has one entry per response: why it could not be scored, or None."""
        if not errors:
            return
        if any(error is None for error in errors):
            self._worked, self._in_a_row = True, 0
            return
        self._in_a_row += 1
        if not self._worked or self._in_a_row >= PATIENCE:
            raise all_failed_error(
                [error or "" for error in errors], self.what, self.where, self.do, batches=self._in_a_row
            )


def all_failed_error(
    errors: Sequence[str], what: str = "reward", where: str = "", do: str = TRY, *, batches: int = 1
) -> AllFailed:
    often = Counter(errors).most_common()
    reason = often[0][0].replace("\n", "\n    ")
    others = f"\n  and {len(often) - 1} other errors" if len(often) > 1 else ""
    last = f" of each of the last {batches} batches" if batches > 1 else ""
    return AllFailed(
        f"The {what} failed on all {len(errors)} responses{last}, so that nothing can be learnt:\n    {reason}{others}",
        where,
        do,
    )

"""The records of the reward package: what is scored, the result, which function scores, and errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import UserError

# data_source, solution_str, ground_truth, extra_info and number of tokens of one response; the part that the model
# wrote, if that is not all; and BatchFacts, for functions of TRL's form.
Fields = tuple[str, str, Any, Any, "int | None", "str | None", Any]


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

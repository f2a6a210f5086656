"""The records that rewards are made of: what is scored, what came out, which function does it, and what went wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import UserError


class RewardError(UserError):
    """A reward that cannot be used; says what is wrong, where it was set and what to do."""

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
    """One response to be scored. Items that share `group` are handed to a list-form function in one call."""

    data_source: str | None
    solution_str: str
    ground_truth: Any
    extra_info: Any = None
    group: Hashable = None
    group_size: int = 1
    tokens: int | None = None
    """Tokens of the response that the model wrote, where they are known."""
    own_words: str | None = None
    """What the model wrote itself, a line for each turn, where `solution_str` has what it was told too."""
    prompt: Any = None
    """The row's prompt, for functions of TRL's form: messages, or a text where the data has texts."""
    token_ids: Sequence[int] | None = None
    """Of the response, for functions of TRL's form."""
    progress: tuple[int, int] | None = None
    """Steps that are done, and steps of the run, for functions of TRL's form."""


@dataclass
class RewardResult:
    """A score and its named parts; `error` tells why the failure score was given instead, or is None."""

    score: float
    parts: dict[str, float | str] = field(default_factory=dict)
    error: str | None = None
    seconds: float | None = field(default=None, compare=False)
    """Of the call that gave it, which a group shares; None where the call did not come back."""


@dataclass
class RewardSpec:
    """Where a reward function comes from and how it is called: plain data that travels to the workers."""

    kind: str = "builtin"
    """`builtin` (by data source), `file`, `dotted`, `pickled`, `url`, `shape` (its form) or `combined`."""
    path: str = ""
    """The file, dotted path or URL, as it was given; of a built-in scorer its name, or nothing for the row's own."""
    name: str | None = None
    """The function's name; filled in when the reward is resolved."""
    form: str = "source"
    """`source`, `pair`, `list` or `batch`: which of the signatures the function has."""
    columns: list[str] = field(default_factory=list)
    """Columns of the rows that it cannot do without."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of every call."""
    folder: str = field(default_factory=os.getcwd)
    """The working folder: dotted paths are looked up here first."""
    sys_path: list[str] = field(default_factory=list)
    """Import path of the process that named the function; needed for functions that were pickled by reference."""
    pickled: bytes = b""
    """The function itself, when an object was given instead of a path."""
    code: dict[str, Any] = field(default_factory=dict)
    """Arguments of `scorers.code.configure`; empty leaves the defaults."""
    seed: int = 0
    """Of the random numbers that the function draws: with another one, the same response may score differently."""
    timeout_s: float = 10.0
    """Seconds that a score may take: what waits for others stops before that."""
    parts: list[RewardPart] = field(default_factory=list)
    """The functions of a combined reward."""
    label: str = "built-in scorers, by data_source"
    """How the run names it to its user."""

    @property
    def takes_groups(self) -> bool:
        """Whether all responses of a prompt are scored by one call."""
        return self.form in ("list", "batch")


@dataclass
class RewardPart:
    """One function of a combined reward."""

    name: str
    weight: float
    needs: str | None
    """Counts only where the part of this name found the response right."""
    spec: RewardSpec


@dataclass(frozen=True)
class RewardList:
    """Functions whose scores are summed, as `posttrain.train(reward=[f, g], reward_weights=[1.0, 0.5])` has them."""

    functions: Sequence[Callable[..., Any]]
    weights: Sequence[float] | None = None
    """One of each; None takes 1."""

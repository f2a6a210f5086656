"""One response of several turns: what the model wrote and what it was told, as one row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.rollout.base import Output
from posttrain.rollout.turns.next_turn import Key


@dataclass
class Conversation:
    """Grows by a model's turn (`wrote`) and by what it hears (`heard`) in turn; ends with one of the model's."""

    key: Key
    prompt_ids: Sequence[int]
    seed: int
    how: dict[str, bool]
    """`validate`, `greedy`: as the rows were asked for."""
    rank: int = 0
    """Where its cache is."""
    turns: int = 0
    reward: float = 0.0
    """What tools gave of their own."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """For samples: turn, name, arguments, answer and error of each call."""
    tool_seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    """What an agent leaves for reward functions."""
    score: Any = None
    """What an agent gave as the reward; None leaves it to the reward function."""
    error: str | None = None
    """Why an agent failed."""
    own_prompt: bool = False
    """Whether an agent made another prompt than the row's."""
    before: list[int] = field(default_factory=list)
    """What the model had read and written when its last turn ended: a turn that goes on from it begins with these."""
    samples: list[Output] = field(default_factory=list)
    """What an agent had the model write beside the conversation."""
    full: bool = False
    """Whether an agent wanted a further turn, for which there was no room."""
    finish_reason: str = "stop"
    """Of the model's last turn."""
    _tokens: list[int] = field(default_factory=list)
    _written: list[bool] = field(default_factory=list)
    _log_probs: list[np.ndarray] = field(default_factory=list)
    _drawn: list[np.ndarray] = field(default_factory=list)
    _filtered: bool = False
    _versions: list[tuple[int, int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def ids(self) -> list[int]:
        """Everything so far, the prompt in front."""
        return [*self.prompt_ids, *self._tokens]

    @property
    def marks(self) -> list[bool]:
        """Of each token so far, whether the model wrote it."""
        return self._written

    def wrote(self, output: Output, marks: Sequence[bool] | None = None) -> None:
        """A turn of the model's; `marks` say which of its tokens count as its own, where not all do."""
        drawn = output.sampling_log_probs
        self._add(output.token_ids, output.log_probs, output.log_probs if drawn is None else drawn, written=True)
        if marks is not None:
            self._written[-len(marks) :] = marks
        self._filtered |= drawn is not None
        self._count(output.versions, [True] * len(output.token_ids) if marks is None else marks)
        self.turns += 1
        self.finish_reason = output.finish_reason

    def heard(self, ids: Sequence[int]) -> None:
        nothing = np.zeros(len(ids), np.float32)
        self._add(ids, nothing, nothing, written=False)  # sampled by no policy, so no version counts them

    def _count(self, spans: Sequence[tuple[int, int]], marks: Sequence[bool]) -> None:
        """Adds a turn's spans of policy versions, counting the tokens that are marked; equal neighbours are joined."""
        at = 0
        for version, tokens in spans:
            counted, at = sum(marks[at : at + tokens]), at + tokens
            if counted and self._versions and self._versions[-1][0] == version:
                counted += self._versions.pop()[1]
            if counted:
                self._versions.append((version, counted))

    def _add(self, ids: Sequence[int], log_probs: Any, drawn: Any, *, written: bool) -> None:
        self._tokens += ids
        self._written += [written] * len(ids)
        self._log_probs.append(np.asarray(log_probs, np.float32))
        self._drawn.append(np.asarray(drawn, np.float32))

    def output(self, finish_reason: str) -> Output:
        """The whole response."""
        return Output(
            self.key,
            self._tokens,
            np.concatenate(self._log_probs),
            finish_reason,
            self._versions,
            np.concatenate(self._drawn) if self._filtered else None,  # pyright: ignore
            written=self._written,
        )

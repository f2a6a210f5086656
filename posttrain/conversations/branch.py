"""One row of a conversation: a prompt and the tokens behind it, as the model read and wrote them in one context.

A conversation has one branch, unless its agent compacts the context, opens a sub-agent or tries two continuations: each
of these starts another one. A branch may begin with tokens of its parent. It reads them as observations, because they
are trained in the parent: every sampled token is trained once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from posttrain.rollout.base import Output


@dataclass
class Branch:
    """Grows by `add_sampled` (a turn of the model) and `add_observation`."""

    number: int
    prompt_ids: Sequence[int]
    parent: int | None = None
    """The branch that it was opened from; None for the conversation's first."""
    fork: int = 0
    """How many of its tokens, from the prompt's first on, it shares with its parent."""
    turns: int = 0
    """Turns of the model in this context, with those that it copied from its parent."""
    own_prompt: bool = False
    """Whether its prompt is another than the one of the data."""
    stopped_by: str = ""
    """The limit that kept an agent from a further turn, as a finish reason; empty if there was none."""
    is_stripped: bool = False
    """Whether it continues its parent without the thinking of earlier turns (`thinking.py`)."""
    finish_reason: str = "stop"
    """Of the model's last turn."""
    turn_ends: list[tuple[int, int]] = field(default_factory=list)
    """Of each turn that was sampled here: its number within the conversation, and where in the response it ends."""
    last_request: int | None = None
    """The number of the last request in this context, whose KV cache a next turn continues from."""
    cached_ids: list[int] = field(default_factory=list)
    """Prompt and output of that request."""
    _tokens: list[int] = field(default_factory=list)
    _sampled: list[bool] = field(default_factory=list)
    _log_probs: list[np.ndarray] = field(default_factory=list)
    _sampling_log_probs: list[np.ndarray] = field(default_factory=list)
    _filtered: bool = False
    _versions: list[tuple[int, int]] = field(default_factory=list)
    _routes: np.ndarray | None = None

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def ids(self) -> list[int]:
        """The prompt and everything so far."""
        return [*self.prompt_ids, *self._tokens]

    @property
    def mask(self) -> list[bool]:
        """Of each token of the response so far, whether it is trained in this row."""
        return self._sampled

    def shared(self, ids: Sequence[int]) -> int:
        """How many of its tokens these begin with."""
        own = self.ids
        most = min(len(own), len(ids))
        if own[:most] == list(ids[:most]):  # the usual case: one continues the other
            return most
        return next(place for place, (mine, other) in enumerate(zip(own, ids, strict=False)) if mine != other)

    def add_sampled(self, output: Output, turn: int, mask: Sequence[bool] | None = None) -> None:
        """Appends the conversation's turn of this number; `mask` says which of its tokens are trained, where not all
        are."""
        own = [True] * len(output.token_ids) if mask is None else list(mask)
        drawn = output.sampling_log_probs
        self._append(output.token_ids, output.log_probs, output.log_probs if drawn is None else drawn, own)
        self._filtered |= drawn is not None
        if output.routes is not None:  # of the whole context: a turn's request begins with all that was before
            self._routes = output.routes
        self._add_versions(output.versions, own)
        self.turns += 1
        self.turn_ends.append((turn, self.length))
        self.finish_reason = output.finish_reason

    def add_observation(self, ids: Sequence[int]) -> None:
        """Appends tokens that the model reads. No policy sampled them here, so they have no log-prob and no version."""
        zeros = np.zeros(len(ids), np.float32)
        self._append(ids, zeros, zeros, [False] * len(ids))

    def continue_from(self, parent: Branch) -> None:
        """Takes over the parent's turns, and the KV cache of its last one."""
        self.turns, self.finish_reason = parent.turns, parent.finish_reason
        self.last_request, self.cached_ids = parent.last_request, parent.cached_ids

    def drop_turn(self) -> None:
        """Takes back the turn that was sampled last, with which the branch ends."""
        count = len(self._log_probs.pop())
        self._sampling_log_probs.pop()
        del self._tokens[-count:], self._sampled[-count:]
        self.turn_ends.pop()
        self.turns -= 1
        while count:
            version, tokens = self._versions.pop()
            if tokens > count:
                self._versions.append((version, tokens - count))
            count -= min(tokens, count)

    def drop_observation(self, keep: int) -> None:
        """Takes back tokens at the end that no turn follows, up to the `keep`-th of the response."""
        while self._log_probs and not any(self._sampled[-len(self._log_probs[-1]) :] or [True]):
            if self.length - len(self._log_probs[-1]) < keep:
                return
            count = len(self._log_probs.pop())
            self._sampling_log_probs.pop()
            del self._tokens[len(self._tokens) - count :], self._sampled[len(self._sampled) - count :]

    def output(self, id: Hashable, finish_reason: str) -> Output:
        """The row as the response of a request."""
        return Output(
            id,
            self._tokens,
            np.concatenate(self._log_probs),
            finish_reason,
            self._versions,
            np.concatenate(self._sampling_log_probs) if self._filtered else None,  # pyright: ignore
            written=self._sampled,
            routes=self._routes,
        )

    def _append(self, ids: Sequence[int], log_probs: Sequence[float] | np.ndarray, drawn: object, mask: list[bool]):
        self._tokens += ids
        self._sampled += mask
        self._log_probs.append(np.asarray(log_probs, np.float32))
        self._sampling_log_probs.append(np.asarray(drawn, np.float32))

    def _add_versions(self, spans: Sequence[tuple[int, int]], mask: Sequence[bool]) -> None:
        """Adds the policy versions of a turn. Spans count masked tokens only, so that they line up with the trained
        tokens when staleness is corrected; a span that continues the one before is joined with it."""
        start = 0
        for version, tokens in spans:
            counted, start = sum(mask[start : start + tokens]), start + tokens
            if counted and self._versions and self._versions[-1][0] == version:
                counted += self._versions.pop()[1]
            if counted:
                self._versions.append((version, counted))

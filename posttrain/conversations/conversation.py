"""The ledger of one response of several turns: the tokens that were sampled, and the observation tokens between them.

Sampled tokens enter once, as the engine gave them, with their log-probs and policy versions. Nothing is ever rendered
and tokenized again: a chat template may write an earlier turn differently, and then the log-probs would belong to other
tokens than those that are trained.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.conversations.tools.base import ToolAnswer, ToolCall
from posttrain.rollout.base import Output, Request, RolloutEngine, Sampling

Key = tuple[Any, int]
"""(uid, sample): a response among those to its prompt."""


class ChatError(Exception):
    """A call that a conversation cannot follow; the message is for the author of the agent."""


@dataclass(frozen=True)
class Limits:
    """The most tokens of a prompt, and of a response with all its observations."""

    prompt: int
    response: int


@dataclass
class Conversation:
    """Grows by `add_sampled` (a turn of the model) and `add_observation`; ends with a turn of the model."""

    key: Key
    prompt_ids: Sequence[int]
    seed: int
    how: dict[str, bool]
    """`validate`, `greedy`: as the response was requested."""
    rank: int = 0
    """The rollout rank that holds its KV cache."""
    turns: int = 0
    requests: int = 0
    """Turns requested of the engine; more than `turns` where an agent samples beside the conversation."""
    reward: float = 0.0
    """The sum of what tools gave."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """For saved samples: turn, name, arguments, answer and error of each tool call."""
    tool_seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    """What an agent passes to reward functions."""
    score: Any = None
    """The agent's reward; None leaves it to the reward function."""
    error: str | None = None
    """Why the agent failed."""
    own_prompt: bool = False
    """Whether an agent replaced the prompt."""
    cached_ids: list[int] = field(default_factory=list)
    """Prompt and output of the last request: a turn that begins with these can continue from its KV cache."""
    samples: list[Output] = field(default_factory=list)
    """What an agent sampled beside the conversation, for `compose`."""
    full: bool = False
    """Whether an agent wanted a further turn, for which there was no room."""
    finish_reason: str = "stop"
    """Of the model's last turn."""
    _tokens: list[int] = field(default_factory=list)
    _sampled: list[bool] = field(default_factory=list)
    _log_probs: list[np.ndarray] = field(default_factory=list)
    _sampling_log_probs: list[np.ndarray] = field(default_factory=list)
    _filtered: bool = False
    _versions: list[tuple[int, int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def ids(self) -> list[int]:
        """The prompt and everything so far."""
        return [*self.prompt_ids, *self._tokens]

    @property
    def mask(self) -> list[bool]:
        """Of each token so far, whether the model sampled it."""
        return self._sampled

    def add_sampled(self, output: Output, mask: Sequence[bool] | None = None) -> None:
        """Appends a turn of the model; `mask` says which of its tokens are trained, where not all are."""
        own = [True] * len(output.token_ids) if mask is None else list(mask)
        drawn = output.sampling_log_probs
        self._append(output.token_ids, output.log_probs, output.log_probs if drawn is None else drawn, own)
        self._filtered |= drawn is not None
        self._add_versions(output.versions, own)
        self.turns += 1
        self.finish_reason = output.finish_reason

    def add_observation(self, ids: Sequence[int]) -> None:
        """Appends tokens that the model reads. No policy sampled them, so they have no log-prob and no version."""
        zeros = np.zeros(len(ids), np.float32)
        self._append(ids, zeros, zeros, [False] * len(ids))

    def add_call(self, call: ToolCall | None, answer: ToolAnswer) -> None:
        """Records a tool call for samples and metrics; None is one that could not be read."""
        self.reward += answer.reward
        self.tool_seconds += answer.seconds
        name, arguments = (None, None) if call is None else (call.name, call.arguments)
        self.calls.append(
            {
                "turn": self.turns,
                "name": name,
                "arguments": arguments,
                "answer": answer.text,
                "error": answer.error,
            }
        )

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

    def _append(self, ids: Sequence[int], log_probs: Any, drawn: Any, mask: list[bool]) -> None:
        self._tokens += ids
        self._sampled += mask
        self._log_probs.append(np.asarray(log_probs, np.float32))
        self._sampling_log_probs.append(np.asarray(drawn, np.float32))

    def output(self, finish_reason: str) -> Output:
        """The whole response."""
        return Output(
            self.key,
            self._tokens,
            np.concatenate(self._log_probs),
            finish_reason,
            self._versions,
            np.concatenate(self._sampling_log_probs) if self._filtered else None,  # pyright: ignore
            written=self._sampled,
        )

    def adopt(self, other: Conversation) -> None:
        """Takes over what the agent's process made of this conversation; what the loop keeps here stays."""
        kept = {"key", "rank", "requests", "cached_ids"}
        vars(self).update({name: value for name, value in vars(other).items() if name not in kept})

    def compose(self, limits: Limits, prompt_ids: Sequence[int], ids: Sequence[int], mask: Sequence[int]) -> None:
        """Makes the response from tokens that an agent put together itself. Tokens with mask 1 must be among `samples`,
        in order, and keep their log-probs. What follows the last of them is dropped: it would train nothing."""
        if len(ids) != len(mask):
            raise ChatError(f"response_ids has {len(ids)} tokens and response_mask {len(mask)} marks")
        if not 0 < len(prompt_ids) <= limits.prompt:
            raise ChatError(f"the prompt has {len(prompt_ids)} tokens (data.max_prompt_length={limits.prompt})")
        wanted = [bool(one) for one in mask[: limits.response]]
        if not any(wanted):
            raise ChatError("no token of the response is the model's: response_mask is 0 everywhere")
        end = len(wanted) - wanted[::-1].index(True)
        response, wanted = [int(one) for one in ids[:end]], wanted[:end]
        found = _find_turns(response, wanted, self.samples)
        self.own_prompt = list(prompt_ids) != list(self.prompt_ids)
        self.prompt_ids = list(prompt_ids)
        place = 0
        for start, output in found:
            if start > place:
                self.add_observation(response[place:start])
            place = min(start + len(output.token_ids), end)
            self._add_part(output, wanted[start:place])
        marked = [*self.mask, *[False] * (end - place)]
        if marked != wanted:
            missing = next(number for number, own in enumerate(wanted) if own and not marked[number])
            raise ChatError(
                f"token {missing} of the response is marked as the model's, and no turn of the model has it"
            )

    def _add_part(self, output: Output, mask: list[bool]) -> None:
        """Appends the first tokens of a turn; those with mask False count as observation, with log-prob 0."""
        count, drawn = len(mask), output.sampling_log_probs
        log_probs = np.where(mask, np.asarray(output.log_probs, np.float32)[:count], 0.0)
        if drawn is not None:
            drawn = np.where(mask, np.asarray(drawn, np.float32)[:count], 0.0)
        part = replace(output, token_ids=list(output.token_ids[:count]), log_probs=log_probs)
        self.add_sampled(replace(part, sampling_log_probs=drawn), mask)  # pyright: ignore


def _find_turns(response: list[int], mask: list[bool], samples: Sequence[Output]) -> list[tuple[int, Output]]:
    """Where in the response each sampled turn begins; turns that are not in it are skipped. The last may be cut."""
    found, place = [], 0
    for output in samples:
        ids = output.token_ids
        for start in range(place, len(response)):
            part = response[start : start + len(ids)]
            whole = len(part) == len(ids) or start + len(part) == len(response)
            if whole and part == ids[: len(part)] and any(mask[start : start + len(part)]):
                found.append((start, output))
                place = start + len(part)
                break
    return found


@dataclass(frozen=True)
class TurnRequest:
    """A turn of a conversation, as a rollout worker is asked for it. It continues from the KV cache of the turn before,
    whose tokens `prompt_ids` begins with; a `fresh` one does not."""

    key: Key
    turn: int
    prompt_ids: list[int]
    max_tokens: int
    seed: int
    how: dict[str, bool]
    """`validate`, `greedy`: as the conversation was requested."""
    stop: tuple[str, ...] = ()
    """Texts that end this turn, besides those of the settings."""
    fresh: bool = False

    @property
    def id(self) -> Any:
        return self.key if self.turn == 0 else (*self.key, self.turn)

    @property
    def parent(self) -> Any:
        if self.fresh or self.turn == 0:
            return None
        return self.key if self.turn == 1 else (*self.key, self.turn - 1)

    def submit(self, engine: RolloutEngine, sampling: Sampling, latest: dict[Key, Hashable]) -> None:
        """Queues the turn. `latest` has the last request of each conversation, which holds its KV cache."""
        if self.fresh and self.key in latest:
            engine.release([latest[self.key]])
        sampling = replace(sampling, max_tokens=self.max_tokens, stop=(*sampling.stop, *self.stop))
        engine.submit(Request(self.id, self.prompt_ids, sampling, self.seed, self.parent, keep=True))
        latest[self.key] = self.id

"""The ledger of one conversation: in each of its branches, the tokens that were sampled and those that were read.

Sampled tokens enter once, as the engine gave them, with their log-probs and policy versions. Nothing is ever rendered
and tokenized again: a chat template may write an earlier turn differently, and then the log-probs would belong to other
tokens than those that are trained.

A conversation ends in `rows`, one per branch in which the model spoke. All of them are one sample: one reward, one
advantage (docs/contracts.md).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.conversations.branch import Branch
from posttrain.conversations.tools.base import ToolAnswer, ToolCall
from posttrain.rollout.base import Output, Request, RolloutEngine, Sampling

Key = tuple[Any, int]
"""(uid, sample): a response among those to its prompt."""


class ChatError(Exception):
    """A call that a conversation cannot follow; the message is for the author of the agent."""


class TooManyRows(ChatError):
    """A further row of a sample that has as many as it may."""


@dataclass(frozen=True)
class Limits:
    """The most tokens of a prompt, and of a response with all its observations; both hold for each row. `rows` is the
    most of a sample; `tool_seconds` and `tool_cost` are what its tools may take in all. None is no limit."""

    prompt: int
    response: int
    rows: int | None = None
    tool_seconds: float | None = None
    tool_cost: float | None = None


@dataclass
class Conversation:
    """Its branches grow by turns of the model and by observations. `prompt_ids` are those of the data."""

    key: Key
    prompt_ids: Sequence[int]
    seed: int
    how: dict[str, bool]
    """`validate`, `greedy`: as the response was requested."""
    rank: int = 0
    """The rollout rank that holds its KV cache."""
    turns: int = 0
    """Of the model, in all branches."""
    requests: int = 0
    """Turns requested of the engine; more than `turns` where an agent samples beside the conversation."""
    reward: float = 0.0
    """The sum of what tools gave."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """For saved samples: turn, name, arguments, answer and error of each tool call, and metrics that the tool gave."""
    call_seconds: list[float] = field(default_factory=list)
    """How long each of `calls` took. Apart from them, as it differs between two runs that are otherwise the same."""
    tool_seconds: float = 0.0
    """How long it has waited for tools."""
    tool_cost: float = 0.0
    """What its calls cost, by their answers."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What an agent passes to reward functions."""
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """(number of the turn, reward) of the turns that an environment or an agent rewarded."""
    score: Any = None
    """The agent's reward; None leaves it to the reward function."""
    error: str | None = None
    """Why the agent failed."""
    branches: list[Branch] = field(default_factory=list)
    """In the order in which they were opened; the first begins with the prompt of the data."""
    samples: list[tuple[Sequence[int], Output]] = field(default_factory=list)
    """What an agent sampled beside the conversation, behind which tokens, for `compose`."""
    _composed: list[list[bool]] = field(default_factory=list)
    """Of each of `samples`, which tokens are trained in a row."""

    def __post_init__(self) -> None:
        self.branches.append(Branch(0, self.prompt_ids))

    @property
    def main(self) -> Branch:
        """The first branch: the only one, unless an agent opens others."""
        return self.branches[0]

    @property
    def rows(self) -> list[Branch]:
        """The branches with trained tokens, in the order of their last turns: the conversation ended in the last one.
        Where the model never spoke, the first branch alone."""
        spoken = [branch for branch in self.branches if any(branch.mask)]
        return sorted(spoken, key=lambda branch: branch.turn_ends[-1][0]) or [self.main]

    @property
    def stopped_by(self) -> str:
        """The limit that kept the context in which the conversation ended from a further turn; empty if there was
        none."""
        last = self.rows[-1]
        # Without its thinking that context is another branch, which has no turn where the limit came first.
        own = [one for one in self.branches if one is last or (one.is_stripped and one.parent == last.number)]
        return next((one.stopped_by for one in own if one.stopped_by and (one is last or not any(one.mask))), "")

    def parent_row(self, branch: Branch) -> tuple[int | None, int]:
        """(number, shared tokens) of the nearest branch above this one that is a row."""
        rows = {row.number for row in self.rows}
        parent, fork = branch.parent, branch.fork
        while parent is not None and parent not in rows:
            above = self.branches[parent]
            parent, fork = above.parent, min(fork, above.fork)
        return (None, 0) if parent is None else (parent, fork)

    def open_branch(self, ids: Sequence[int], limits: Limits, parent: Branch | None = None) -> Branch:
        """A further row, whose next turn the model writes behind these tokens. Without `parent` it is the branch that
        they share the longest beginning with."""
        if limits.rows is not None and len(self.branches) >= limits.rows:
            raise TooManyRows(
                f"the sample has {len(self.branches)} rows already, and a further context (a sub-agent, compaction, a "
                f"changed history) would be one more (actor_rollout_ref.rollout.agent.max_rows={limits.rows})"
            )
        shared = {one.number: one.shared(ids) for one in self.branches}
        if parent is None:
            parent = max(self.branches, key=lambda one: (shared[one.number], one.number))
        fork = shared[parent.number]
        most = limits.prompt + limits.response
        # With its parent's prompt, the two rows share it in the update as two samples of one prompt do.
        prompt = list(parent.prompt_ids)
        if fork < len(prompt) or len(ids) - len(prompt) >= limits.response:
            prompt = [int(one) for one in ids[: limits.prompt]]
        rest = [int(one) for one in ids[len(prompt) :]]
        if not prompt or len(rest) >= limits.response:
            raise ChatError(
                f"a branch begins with {len(ids)} tokens; a row has at most {most} with the model's next turn "
                "(data.max_prompt_length + data.max_response_length)"
            )
        branch = Branch(len(self.branches), prompt, parent.number, fork)
        branch.own_prompt = prompt != list(self.prompt_ids)
        if rest:
            branch.add_observation(rest)
        if fork == len(parent.ids):  # it goes on where its parent stands, so that the parent's turns are its own
            branch.continue_from(parent)
        self.branches.append(branch)
        return branch

    def strip_branch(self, ids: Sequence[int], limits: Limits, parent: Branch) -> Branch:
        """A further row that continues the parent's context as these tokens, which lack the thinking of its turns."""
        branch = self.open_branch(ids, limits, parent)
        branch.continue_from(parent)
        branch.is_stripped = True
        return branch

    def branch_behind(self, ids: Sequence[int], limits: Limits, busy: Collection[int | None] = ()) -> Branch:
        """The branch whose next turn comes behind these tokens: one that they continue, or a further one. Those that
        are `busy` wait for a turn."""
        if not self.requests and 0 < len(ids) <= limits.prompt:
            self.main.own_prompt = list(ids) != list(self.prompt_ids)
            self.main.prompt_ids = list(ids)
        for branch in reversed(self.branches):
            # One that ends with a turn, or has none yet: behind an observation the model has spoken, or will.
            fits = len(ids) - len(branch.prompt_ids) < limits.response
            idle = branch.number not in busy and (not branch.length or any(branch.mask[-1:]))
            if fits and idle and branch.shared(ids) == len(branch.ids):
                branch.add_observation(ids[len(branch.ids) :])
                return branch
        branch = self.open_branch(ids, limits)
        if branch.parent in busy:  # its KV cache is still written to
            branch.last_request, branch.cached_ids = None, []
        return branch

    def give_up(self, branch: Branch) -> None:
        """Takes back what was read only for a turn that does not come."""
        needed = max((one.fork for one in self.branches if one.parent == branch.number), default=0)
        branch.drop_observation(needed - len(branch.prompt_ids))

    def drop_turn(self, ids: Sequence[int]) -> None:
        """Takes back the turn with which these tokens end, and what was read only for it."""
        found = [one for one in self.branches if any(one.mask[-1:]) and one.ids == list(ids)]
        for branch in found[:1]:
            branch.drop_turn()
            self.give_up(branch)

    def add_sampled(self, output: Output, mask: Sequence[bool] | None = None, branch: Branch | None = None) -> None:
        """Appends a turn of the model to a branch, the first unless one is given."""
        (branch or self.main).add_sampled(output, self.turns, mask)
        self.turns += 1

    def add_observation(self, ids: Sequence[int]) -> None:
        """Appends tokens that the model reads to the first branch."""
        self.main.add_observation(ids)

    def output(self, finish_reason: str) -> Output:
        """The row in which the conversation ended."""
        return self.rows[-1].output(self.key, finish_reason)

    def add_call(self, call: ToolCall | None, answer: ToolAnswer) -> None:
        """Records a tool call for samples and metrics; None is one that could not be read."""
        self.reward += answer.reward
        self.call_seconds.append(answer.seconds)
        name, arguments = (None, None) if call is None else (call.name, call.arguments)
        self.calls.append(
            {
                "turn": self.turns,
                "name": name,
                "arguments": arguments,
                "answer": answer.text,
                "error": answer.error,
            }
            | ({"metrics": answer.metrics} if answer.metrics else {})
            | ({"cost": answer.cost} if answer.cost else {})
        )

    def add_spent(self, answers: Sequence[ToolAnswer]) -> None:
        """Counts what calls took that ran side by side."""
        self.tool_seconds += max((one.seconds for one in answers), default=0.0)
        self.tool_cost += sum(one.cost for one in answers)

    def spent(self, limits: Limits) -> str:
        """The limit on tools that is reached, as a finish reason; empty if none is."""
        if limits.tool_seconds is not None and self.tool_seconds >= limits.tool_seconds:
            return "tool_time"
        return "tool_cost" if limits.tool_cost is not None and self.tool_cost >= limits.tool_cost else ""

    def adopt(self, other: Conversation) -> None:
        """Takes over what the agent's process made of this conversation."""
        vars(self).update({name: value for name, value in vars(other).items() if name != "rank"})

    def begin_request(self, branch: Branch) -> int:
        """Counts a request for a turn in this branch; gives its number."""
        branch.last_request, self.requests = self.requests, self.requests + 1
        return branch.last_request

    def end_request(self, branch: Branch, prompt_ids: Sequence[int], output: Output, *, kept: bool) -> None:
        """Records the turn that a request brought."""
        branch.cached_ids = [*prompt_ids, *output.token_ids]
        if kept:
            self.add_sampled(output, branch=branch)
        else:
            self.samples.append((prompt_ids, output))

    def compose(self, limits: Limits, prompt_ids: Sequence[int], ids: Sequence[int], mask: Sequence[int]) -> None:
        """Makes a row from tokens that an agent put together itself; every further call makes another one. Tokens with
        mask 1 must be among `samples`, in order, and keep their log-probs; those of an earlier row are not trained
        again. What follows the last of them is dropped: it would train nothing."""
        if len(ids) != len(mask):
            raise ChatError(f"response_ids has {len(ids)} tokens and response_mask {len(mask)} marks")
        if not 0 < len(prompt_ids) < limits.prompt + limits.response:
            most = f"data.max_prompt_length={limits.prompt}, data.max_response_length={limits.response}"
            raise ChatError(f"the prompt has {len(prompt_ids)} tokens ({most})")
        branch = self._begin_composed(limits, [int(one) for one in prompt_ids])
        wanted = [bool(one) for one in mask[: limits.response - branch.length]]
        if not any(wanted):
            raise ChatError("no token of the response is the model's: response_mask is 0 everywhere")
        end = len(wanted) - wanted[::-1].index(True)
        response, wanted = [int(one) for one in ids[:end]], wanted[:end]
        found = _find_turns(branch.ids, response, wanted, self.samples, self._composed)
        marked, place = [False] * end, 0
        for start, number in found:
            if start > place:
                branch.add_observation(response[place:start])
            read, output = self.samples[number]
            if list(read) != branch.ids:  # sampled behind other tokens, whose routes are not those of this row
                output = replace(output, routes=None)
            place = min(start + len(output.token_ids), end)
            marked[start:place] = own = wanted[start:place]
            taken = self._composed[number]
            self._add_part(branch, output, [new and not old for new, old in zip(own, taken, strict=False)])
            taken[: len(own)] = [new or old for new, old in zip(own, taken, strict=False)]
        if marked != wanted:
            missing = next(number for number, own in enumerate(wanted) if own and not marked[number])
            raise ChatError(
                f"token {missing} of the response is marked as the model's, and no turn of the model has it"
            )
        if branch.number and any(branch.mask):
            read = branch.ids[: len(branch.prompt_ids) + branch.mask.index(True)]
            shared = {one.number: one.shared(read) for one in self.branches[: branch.number]}
            branch.parent = max(shared, key=lambda number: (shared[number], number))
            branch.fork = shared[branch.parent]

    def _begin_composed(self, limits: Limits, prompt_ids: list[int]) -> Branch:
        if self.main.length or len(self.branches) > 1 or len(prompt_ids) > limits.prompt:
            branch = self.open_branch(prompt_ids, limits)
        else:
            branch = self.main
            branch.prompt_ids, branch.own_prompt = prompt_ids, prompt_ids != list(self.prompt_ids)
        self._composed += [[False] * len(output.token_ids) for _, output in self.samples[len(self._composed) :]]
        return branch

    def _add_part(self, branch: Branch, output: Output, mask: list[bool]) -> None:
        """Appends the first tokens of a turn; those with mask False count as observation, with log-prob 0."""
        if not any(mask):  # trained in an earlier row: the turn is no turn of this one
            branch.add_observation(output.token_ids[: len(mask)])
            return
        count, drawn = len(mask), output.sampling_log_probs
        log_probs = np.where(mask, np.asarray(output.log_probs, np.float32)[:count], 0.0)
        if drawn is not None:
            drawn = np.where(mask, np.asarray(drawn, np.float32)[:count], 0.0)
        part = replace(output, token_ids=list(output.token_ids[:count]), log_probs=log_probs)
        self.add_sampled(replace(part, sampling_log_probs=drawn), mask, branch)  # pyright: ignore


def _find_turns(
    before: list[int],
    response: list[int],
    mask: list[bool],
    samples: Sequence[tuple[Sequence[int], Output]],
    composed: Sequence[Sequence[bool]],
) -> list[tuple[int, int]]:
    """(where in the response, number) of each sampled turn; turns that are not in it are skipped. The last may be cut.
    One that an earlier row has is found only behind the very tokens that it was sampled behind: other turns may have
    the same tokens."""
    found, place = [], 0
    for number, (prompt, output) in enumerate(samples):
        ids = output.token_ids
        exact = len(prompt) - len(before)
        as_sampled = exact >= place and [*before, *response[:exact]] == list(prompt)
        places = [exact] if as_sampled else [] if any(composed[number]) else range(place, len(response))
        for start in places:
            part = response[start : start + len(ids)]
            whole = len(part) == len(ids) or start + len(part) == len(response)
            if whole and part == ids[: len(part)] and any(mask[start : start + len(part)]):
                found.append((start, number))
                place = start + len(part)
                break
    return found


def request_number(id: Any) -> int:
    """The number of a request within its conversation, by its id."""
    return id[2] if len(id) > 2 else 0


@dataclass(frozen=True)
class TurnRequest:
    """A turn of a conversation, as a rollout worker is asked for it. It continues from the KV cache of the request
    before it in its branch (`after`), whose tokens `prompt_ids` begins with; a `fresh` one does not."""

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
    after: int | None = None
    """The number of the request before it in its branch; None for the first."""

    @property
    def id(self) -> Any:
        return self._id(self.turn)

    @property
    def parent(self) -> Any:
        return None if self.fresh or self.after is None else self._id(self.after)

    def _id(self, turn: int) -> Any:
        return self.key if turn == 0 else (*self.key, turn)

    def submit(self, engine: RolloutEngine, sampling: Sampling, kept: dict[Key, list[Hashable]]) -> None:
        """Queues the turn. `kept` has the requests of each conversation that may hold its KV cache."""
        own = kept.setdefault(self.key, [])
        if self.after is not None and (before := self._id(self.after)) in own:
            own.remove(before)  # the engine hands its blocks to this turn, or frees them
            if self.fresh:
                engine.release([before])
        sampling = replace(sampling, max_tokens=self.max_tokens, stop=(*sampling.stop, *self.stop))
        engine.submit(Request(self.id, self.prompt_ids, sampling, self.seed, self.parent, keep=True))
        own.append(self.id)

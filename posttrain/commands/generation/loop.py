"""The loop over prompts: it keeps the engine full, and yields a prompt when its last response is complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.conversations.conversation import Key
from posttrain.conversations.loop import ROW_FIELDS, ConversationLoop
from posttrain.data.dataset import PromptItem
from posttrain.rollout.base import Output, Request, RolloutEngine, Sampling
from posttrain.rollout.generate import admission_deadline, advance
from posttrain.rollout.sampling import row_seeds
from posttrain.texts import own_words
from posttrain.trainer.ppo.reward import score_by_agent


class Requests:
    """`submit` a prompt, `advance` until some responses are complete. Without `turns` a response has one turn."""

    def __init__(self, engine: RolloutEngine, sampling: Sampling, turns: ConversationLoop | None = None) -> None:
        self.engine, self.sampling, self.turns = engine, sampling, turns
        self._kept: dict[Key, list[Hashable]] = {}  # of each conversation, the requests whose KV cache may be kept

    def submit(self, key: Key, prompt_ids: list[int], seed: int, row: Mapping[str, Any]) -> None:
        """`row` are the fields of the prompt's row, which may have something for tools or agents."""
        if self.turns is not None:
            if not self.turns.begin(key, prompt_ids, seed, {}, {name: row[name] for name in ROW_FIELDS}):
                return  # its agent asks for the first turn
            self._kept[key] = [key]
        self.engine.submit(Request(key, prompt_ids, self.sampling, seed, keep=self.turns is not None))

    def has_work(self) -> bool:
        return self.engine.has_work() or (self.turns is not None and self.turns.waits())

    def advance(self) -> list[Output]:
        """Advance the engine, and return the responses that are complete."""
        if self.turns is None:
            return advance(self.engine)
        streams = self.turns.streams(0)
        others = (admission_deadline(self.engine),) if streams or self.turns.others_may_join else ()
        outputs = advance(self.engine, *others)
        if streams:
            self.turns.show(0, self.engine.so_far(streams))
        whole = self.turns.receive(0, outputs)
        # In rounds (deterministic runs) the next turns wait until the engine is empty, so that what is batched together
        # does not depend on how long tools take. Otherwise they join as they become ready.
        at_rest = not self.engine.has_work()
        if at_rest or not self.turns.in_rounds:
            following, full = self.turns.next(wait=at_rest)
            whole += full
            for turn in following.get(0, []):
                turn.submit(self.engine, self.sampling, self._kept)
        ended = self.turns.ended().get(0, [])
        # A conversation's cache is held for its next turn, and goes back with its last one.
        self.engine.release([id for key in ended for id in self._kept.pop(key)])
        return whole


@dataclass
class Answers:
    """The responses to one prompt; `index` is the prompt's row in the data."""

    index: int
    responses: list[str]
    response_ids: list[list[int]]
    finish_reasons: list[str]
    marks: list[list[bool]] | None = None  # with tools: which tokens the model wrote itself
    # With tools: what it wrote itself, a line for each turn: what built-in scorers read.
    own_words: list[str] | None = None
    num_turns: list[int] | None = None
    tool_calls: list[str] | None = None  # with tools: the calls of each response as JSON, as samples of a run have them
    tool_rewards: list[float] | None = None
    # With an agent: what it gave as each reward, as JSON of `score`, `parts` and `error`; None where it gave none.
    agent_scores: list[str | None] | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.response_ids))


def answer(
    requests: Requests,
    prompts: Iterable[PromptItem],
    *,
    n: int,
    seed: int,
    decode: Callable[[list[int]], str],
    in_flight: int,
) -> Iterator[Answers]:
    """Yield `n` responses to each prompt, in the order in which prompts are finished.

    A sample's seed is derived from `seed`, its prompt's row and its number, so other prompts do not affect it.
    """
    # Prompts are submitted as others finish, so that a file of millions of rows does not fill the engine's queue.
    waiting: Iterator[PromptItem] | None = iter(prompts)
    open_: dict[int, dict[int, Output]] = {}
    running = 0
    while True:
        while waiting is not None and running < in_flight:
            following = next(waiting, None)
            if following is None:
                waiting = None
                break
            index = following["index"]
            open_[index] = {}
            running += n
            for number, own_seed in enumerate(row_seeds(n, seed, index)):
                requests.submit((index, number), following["prompt_ids"], own_seed, following)
        if not requests.has_work():
            return
        for output in requests.advance():
            index, number = output.id
            open_[index][number] = output
            running -= 1
            if len(open_[index]) == n:
                yield _answers(index, open_.pop(index), decode, requests)


def _answers(index: int, outputs: dict[int, Output], decode: Callable[[list[int]], str], requests: Requests) -> Answers:
    ordered = [outputs[number] for number in range(len(outputs))]
    answers = Answers(
        index,
        [decode(output.token_ids) for output in ordered],
        [output.token_ids for output in ordered],
        [output.finish_reason for output in ordered],
    )
    if requests.turns is not None:
        records = [requests.turns.records.pop((index, number)) for number in range(len(outputs))]
        answers.marks = [list(map(bool, output.written or ())) for output in ordered]
        answers.own_words = own_words(answers.response_ids, answers.marks, requests.turns.tokenizer)
        answers.num_turns = [record.turns for record in records]
        answers.tool_calls = [json.dumps(record.calls, ensure_ascii=False) for record in records]
        answers.tool_rewards = [record.reward for record in records]
        if requests.turns.has_agents:
            found = [score_by_agent(record, 0.0) for record in records]
            answers.agent_scores = [one and json.dumps(vars(one)) for one in found]
    return answers

"""The loop over prompts: the engine is kept full, and a prompt is handed on when its last response has ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from posttrain.commands.generation.asking import Asking
from posttrain.data.dataset import PromptItem
from posttrain.rollout.base import Output
from posttrain.rollout.sampling import row_seeds
from posttrain.texts import own_words
from posttrain.trainer.ppo.agent_rewards import score_by_agent


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
    asking: Asking,
    prompts: Iterable[PromptItem],
    *,
    n: int,
    seed: int,
    decode: Callable[[list[int]], str],
    in_flight: int,
) -> Iterator[Answers]:
    """`n` responses to each prompt, in the order in which prompts are finished.

    A sample's seed is made of `seed`, its prompt's row and its number: which others are asked for does not matter.
    """
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
                asking.submit((index, number), following["prompt_ids"], own_seed, following)
        if not asking.has_work():
            return
        for output in asking.advance():
            index, number = output.id  # pyright: ignore
            open_[index][number] = output
            running -= 1
            if len(open_[index]) == n:
                yield _answers(index, open_.pop(index), decode, asking)


def _answers(index: int, outputs: dict[int, Output], decode: Callable[[list[int]], str], asking: Asking) -> Answers:
    ordered = [outputs[number] for number in range(len(outputs))]
    answers = Answers(
        index,
        [decode(output.token_ids) for output in ordered],
        [output.token_ids for output in ordered],
        [output.finish_reason for output in ordered],
    )
    if asking.turns is not None:
        records = [asking.turns.records.pop((index, number)) for number in range(len(outputs))]
        answers.marks = [list(map(bool, output.written or ())) for output in ordered]
        answers.own_words = own_words(answers.response_ids, answers.marks, asking.turns.tokenizer)
        answers.num_turns = [record.turns for record in records]
        answers.tool_calls = [json.dumps(record.calls, ensure_ascii=False) for record in records]
        answers.tool_rewards = [record.reward for record in records]
        if asking.turns.has_agents:
            found = [score_by_agent(record, 0.0) for record in records]
            answers.agent_scores = [one and json.dumps(vars(one)) for one in found]
    return answers

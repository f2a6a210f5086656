"""The loop over prompts: the engine is kept full, and a prompt is handed on when its last response has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from posttrain.rollout.base import Output, Request, RolloutEngine, Sampling
from posttrain.rollout.generate import advance
from posttrain.rollout.sampling import row_seeds


@dataclass
class Answers:
    """The responses to one prompt; `index` is the prompt's row in the data."""

    index: int
    responses: list[str]
    response_ids: list[list[int]]
    finish_reasons: list[str]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.response_ids))


def answer(
    engine: RolloutEngine,
    prompts: Iterable[tuple[int, list[int]]],
    sampling: Sampling,
    *,
    n: int,
    seed: int,
    decode: Callable[[list[int]], str],
    in_flight: int,
) -> Iterator[Answers]:
    """`n` responses to each prompt, in the order in which prompts are finished.

    A sample's seed is made of `seed`, its prompt's row and its number: which others are asked for does not matter.
    """
    waiting: Iterator[tuple[int, list[int]]] | None = iter(prompts)
    open_: dict[int, dict[int, Output]] = {}
    running = 0
    while True:
        while waiting is not None and running < in_flight:
            following = next(waiting, None)
            if following is None:
                waiting = None
                break
            index, ids = following
            open_[index] = {}
            running += n
            for number, own_seed in enumerate(row_seeds(n, seed, index)):
                engine.submit(Request((index, number), ids, sampling, own_seed))
        if not engine.has_work():
            return
        for output in advance(engine):
            index, number = output.id  # pyright: ignore
            open_[index][number] = output
            running -= 1
            if len(open_[index]) == n:
                yield _answers(index, open_.pop(index), decode)


def _answers(index: int, outputs: dict[int, Output], decode: Callable[[list[int]], str]) -> Answers:
    ordered = [outputs[number] for number in range(len(outputs))]
    return Answers(
        index,
        [decode(output.token_ids) for output in ordered],
        [output.token_ids for output in ordered],
        [output.finish_reason for output in ordered],
    )

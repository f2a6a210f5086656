"""A rollout engine that writes what a script says, with the log-probs of the model behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.rollout.base import Output, Request, RolloutEngine
from posttrain.rollout.engines import ENGINES, make_native

Script = Callable[[str, int], str]
"""(the text that the model has read, the request's seed) -> what it writes; `<|end|>` is added."""


class Scripted(RolloutEngine):
    """All else is the engine's below."""

    shares_weights = True

    def __init__(self, engine: RolloutEngine, tokenizer, script: Script) -> None:
        self.engine, self.tokenizer, self.script = engine, tokenizer, script
        self.waiting: list[Request] = []
        self.seen: list[Request] = []
        self.released: list[object] = []

    def submit(self, request: Request) -> None:
        self.check_request(request)
        self.waiting.append(request)
        self.seen.append(request)

    def step(self) -> list[Output]:
        now, self.waiting = self.waiting[:2], self.waiting[2:]  # not all at once
        return [self._written(request) for request in now]

    def _written(self, request: Request) -> Output:
        read = list(request.prompt_ids)
        text = self.script(self.tokenizer.decode(read, skip_special_tokens=False), request.seed) + "<|end|>"
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: request.sampling.max_tokens]
        (scores,) = self.engine.score([read + ids], temperature=request.sampling.temperature)
        reason = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return Output(request.id, ids, scores[-len(ids) :].tolist(), reason, [(self.version, len(ids))])

    def has_work(self) -> bool:
        return bool(self.waiting)

    def abort(self, ids):
        return []

    def release(self, ids) -> None:
        self.released += ids

    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0):
        return self.engine.score(token_ids, temperature=temperature)

    def load_weights(self, weights, version: int) -> None:
        self.engine.load_weights(weights, version)
        self.version = version

    def cache_bytes(self) -> int:
        return self.engine.cache_bytes()

    def _give_back(self) -> None:
        self.engine.sleep()

    def _take(self, stage) -> None:
        self.engine.wake(stage)


def use(script: Script) -> list[Scripted]:
    """The engine `scripted` writes this; gives the engines that were made."""
    made: list[Scripted] = []

    def make(order):
        engine, _ = make_native(order)
        made.append(Scripted(engine, order.tokenizer, script))
        return made[-1], "scripted"

    ENGINES["scripted"] = make
    return made

"""A rollout engine for drills: the first run records its responses beside this file, later runs get the same ones.

What is sampled after an update depends on it in its last bit, so runs on different numbers of workers can be compared
only where they learn from the same responses. Copy this file to a folder that all machines see, and give
`actor_rollout_ref.model.external_lib=FOLDER/recorded_rollouts.py actor_rollout_ref.rollout.name=recorded`.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from posttrain.rollout.base import Output, Request, RolloutEngine, Stage
from posttrain.rollout.engines import Made, Order, make_native, register_engine

RECORDING = Path(__file__).with_name("rollouts.pickle")  # read by the user who wrote it
ANNOUNCED = "recorded rollouts"
LENGTHS = (2, 3, 5, 9, 17)  # tokens of a response, at most: uneven ones are harder to divide among workers


class Recorded(RolloutEngine):
    """Generates with `inner` and records, or replays; scores and weights are those of `inner`."""

    def __init__(self, inner: RolloutEngine) -> None:
        self.inner, self.waiting = inner, []
        self.shares_weights, self.asleep = inner.shares_weights, inner.asleep
        print(ANNOUNCED, flush=True)  # by what the run has collected of its workers' output, they are counted
        self.replayed = pickle.loads(RECORDING.read_bytes()) if RECORDING.exists() else None
        self.recorded: dict[Hashable, tuple[list[int], Output]] = {}
        self.prompts: dict[Hashable, list[int]] = {}

    def submit(self, request: Request) -> None:
        if self.replayed is not None:
            self.waiting.append(request)
            return
        most = LENGTHS[zlib.crc32(repr(request.id).encode()) % len(LENGTHS)]
        self.prompts[request.id] = list(request.prompt_ids)
        self.inner.submit(replace(request, sampling=replace(request.sampling, max_tokens=most)))

    def step(self) -> list[Output]:
        if self.replayed is not None:
            asked, self.waiting = self.waiting, []
            return [self._replay(request, *self.replayed[request.id]) for request in asked]
        ended = self.inner.step()
        self.recorded |= {output.id: (self.prompts[output.id], output) for output in ended}
        if ended and not self.inner.has_work():
            partial = RECORDING.with_suffix(".partial")
            partial.write_bytes(pickle.dumps(self.recorded))
            os.replace(partial, RECORDING)
        return ended

    def _replay(self, request: Request, prompt: list[int], output: Output) -> Output:
        assert list(request.prompt_ids) == prompt, f"{request.id}: recorded for another prompt"
        return replace(output, versions=[(self.version, len(output.token_ids))])

    def has_work(self) -> bool:
        return bool(self.waiting) if self.replayed is not None else self.inner.has_work()

    def abort(self, ids: Iterable[Hashable]) -> list[Output]:
        return self.inner.abort(ids)

    def release(self, ids: Iterable[Hashable]) -> None:
        self.inner.release(ids)

    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        return self.inner.score(token_ids, temperature=temperature)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.inner.load_weights(weights, version)
        self.version = version

    def cache_bytes(self) -> int:
        return self.inner.cache_bytes()

    def _give_back(self) -> None:
        self.inner.sleep()

    def _take(self, stage: Stage) -> None:
        self.inner.wake(stage)


@register_engine("recorded")
def make_recorded(order: Order) -> Made | str:
    made = make_native(order)
    return made if isinstance(made, str) else (Recorded(made[0]), f"recorded ({made[1]})")

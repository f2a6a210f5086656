"""Conversations over a KV cache that is far too small for them say what they say over a large one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from posttrain.config.rollout import RolloutConfig
from posttrain.rollout.base import Output, Request, Sampling
from posttrain.rollout.native.build import build_native
from tests.rollout.tiny import tiny

GROUPS, SAMPLES, TURNS, RESPONSE = 3, 4, 5, 60
SAMPLINGS = [
    {"top_k": 50, "temperature": 1.3, "stop": ("A", "zz", "5", "R")},
    {"stop_token_ids": (3, 8, 20, 50)},
]


@pytest.fixture(scope="module")
def module():
    return tiny("qwen2")


def native(module, blocks: int, segment: int = 64, **settings):
    config = RolloutConfig(kv_cache_gb=0.01, **settings)
    engine, _ = build_native(module, config, decode=lambda ids: "".join(chr(33 + one) for one in ids))
    engine.pool.limit, engine.queue.segment = blocks, segment
    return engine


class Talk:
    """One conversation: observations of random lengths between turns, and a budget for the whole response."""

    def __init__(self, key: tuple[int, int], prompt: list[int], rng: random.Random, sampling: dict) -> None:
        self.key, self.ids, self.left, self.turn, self.sampling = key, list(prompt), RESPONSE, 0, sampling
        self.turns = rng.randrange(1, TURNS + 1)
        self.observations = [[rng.randrange(1, 90) for _ in range(rng.randrange(1, 25))] for _ in range(TURNS)]
        self.seeds = [rng.getrandbits(60) for _ in range(TURNS)]

    def request(self) -> Request:
        parent = (*self.key, self.turn - 1) if self.turn else None
        sampling = Sampling(max_tokens=self.left, **self.sampling)
        return Request((*self.key, self.turn), list(self.ids), sampling, self.seeds[self.turn], parent, keep=True)

    def receive(self, output: Output) -> bool:
        """Whether a further turn follows."""
        observation = self.observations[self.turn]
        self.turn += 1
        self.left -= len(output.token_ids) + len(observation)
        self.ids += [*output.token_ids, *observation]
        return self.turn < self.turns and self.left > 0 and output.finish_reason == "stop"


def converse(engine, seed: int, sampling: dict, *, in_rounds: bool, groups: int = GROUPS) -> dict[tuple, Output]:
    """All turns of several conversations, each group with one prompt."""
    rng, talks = random.Random(seed), {}
    for group in range(groups):
        prompt = [rng.randrange(1, 90) for _ in range(rng.choice([5, 20, 33, 64, 70]))]
        talks |= {(group, sample): Talk((group, sample), prompt, rng, sampling) for sample in range(SAMPLES)}
    outputs, ready = {}, list(talks.values())
    for _ in range(5_000):
        if ready and not (in_rounds and engine.has_work()):
            for talk in ready:
                engine.submit(talk.request())
            ready = []
        if not engine.has_work():
            return outputs
        for output in engine.step():
            outputs[output.id] = output
            talk = talks[output.id[:2]]
            if talk.receive(output):
                ready.append(talk)
            else:
                engine.release([output.id])
    raise AssertionError("requests are left that never run")


def cases() -> Iterator[tuple]:
    for seed in range(12):
        rng = random.Random(seed)
        blocks, rows, budget = rng.choice([6, 8, 12]), rng.choice([2, 5, 1024]), rng.choice([None, 40])
        yield seed, blocks, rng.choice([8, 32, 128]), rows, budget, SAMPLINGS[seed % 2], rng.random() < 0.5


@pytest.mark.parametrize(
    ("seed", "blocks", "segment", "rows", "budget", "sampling", "in_rounds"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] >= 5)) for case in cases()],
)
def test_a_tight_cache_changes_no_token(module, seed, blocks, segment, rows, budget, sampling, in_rounds):
    tight = native(module, blocks, segment, max_num_seqs=rows, max_num_batched_tokens=budget)
    wanted = converse(native(module, 10_000), seed, sampling, in_rounds=in_rounds)
    found = converse(tight, seed, sampling, in_rounds=in_rounds)
    assert found.keys() == wanted.keys() and max(turn for _, _, turn in wanted) >= 1
    for id, output in wanted.items():
        assert found[id].token_ids == output.token_ids, id
        np.testing.assert_allclose(found[id].log_probs, output.log_probs, atol=1e-4)
    assert tight.pool.used == 0, "turns that ended hold no blocks, and those that continued left none behind"


def test_the_pool_never_hands_out_blocks_that_it_does_not_have(module):
    engine = native(module, 4)
    with pytest.raises(AssertionError, match="5 blocks"):
        engine.pool.take(5)


def test_half_of_the_room_is_enough_for_nine_of_ten_turns_to_continue_from_the_cache(module):
    rows, prompt, response = 16, 32, 256
    engine = native(module, rows * (prompt + response) // 32 // 2)
    ids = {row: [row // 4 + 1, *range(3, 2 + prompt)] for row in range(rows)}
    left, stops = dict.fromkeys(range(rows), response), tuple(range(50, 60))
    for turn in range(5):
        for row in range(rows):
            parent = (row, turn - 1) if turn else None
            sampling = Sampling(max_tokens=left[row], stop_token_ids=stops)
            engine.submit(Request((row, turn), ids[row], sampling, 100 * row + turn, parent, keep=True))
        while engine.has_work():
            for output in engine.step():
                row = output.id[0]
                ids[row] = [*ids[row], *output.token_ids, 7, 8, 9]
                left[row] = max(1, left[row] - len(output.token_ids) - 3)
    assert engine.queue.turns == 4 * rows
    assert engine.queue.continued >= 0.9 * engine.queue.turns


def test_a_row_that_is_preempted_keeps_its_tokens_and_their_versions(module):
    engine = native(module, 6, segment=8)
    requests = [Request(row, [row + 1, 2, 3], Sampling(max_tokens=70), row) for row in range(4)]
    for request in requests:
        engine.submit(request)
    while not any(prompt.progress for prompt in engine.queue.prompts.values()):
        engine.step()
    (waiting,) = [prompt for prompt in engine.queue.prompts.values() if prompt.progress][:1]
    made = len(waiting.progress.tokens)
    engine.load_weights([], version=1)
    (aborted,) = engine.abort([waiting.waiting[0].id])
    assert made and len(aborted.token_ids) == len(aborted.log_probs) == made and aborted.versions == [(0, made)]
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert len(outputs) == 3 and engine.pool.used == 0
    for output in outputs:
        assert len(output.token_ids) == 70 == sum(count for _, count in output.versions)

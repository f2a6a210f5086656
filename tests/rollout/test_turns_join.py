"""A turn that is ready is admitted between two decode steps of the others; in rounds it waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from posttrain.commands.generation.loop import Requests
from posttrain.config.root import PPOConfig
from posttrain.conversations.opening import open_conversations
from posttrain.conversations.tools.registry import register_tool
from posttrain.models.embedded import byte_tokenizer
from posttrain.rollout.base import Output, Request, RolloutEngine, Sampling
from posttrain.rollout.generate import admission_deadline, advance

LONG, STEP_S, TOOL_S = 400, 0.005, 0.1
CALL = '<tool_call>{"name": "slow", "arguments": {"word": "x"}}</tool_call><|end|>'


class OneTokenAStep(RolloutEngine):
    """Writes `CALL` to the first prompt at once, a long text to the second, and a short one behind a tool's answer."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.running, self.steps = tokenizer, {}, 0

    def submit(self, request: Request) -> None:
        read = self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        text = "done<|end|>" if "<tool_response>" in read else CALL if "call" in read else "a" * LONG
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.running[request.id] = (ids, [])

    def step(self) -> list[Output]:
        time.sleep(STEP_S)
        self.steps += 1
        ended = []
        for id, (ids, made) in list(self.running.items()):
            made.append(ids[len(made)])
            if len(made) == len(ids):
                del self.running[id]
                ended.append(Output(id, ids, [0.0] * len(ids), "stop", [(0, len(ids))]))
        return ended

    def has_work(self) -> bool:
        return bool(self.running)

    def abort(self, ids): ...
    def release(self, ids): ...
    def score(self, token_ids, *, temperature=1.0): ...
    def load_weights(self, weights, version): ...
    def cache_bytes(self): ...
    def _give_back(self): ...
    def _take(self, stage): ...


@contextmanager
def conversations(*, in_rounds: bool) -> Iterator[tuple[Requests, OneTokenAStep]]:
    @register_tool("slow")
    def slow(word: str) -> str:
        """Takes its time."""
        time.sleep(TOOL_S)
        return word

    config, tokenizer = PPOConfig(), byte_tokenizer()
    config.actor_rollout_ref.rollout.multi_turn = {"enable": True, "tools": ["slow"]}
    config.data.max_response_length = 2 * LONG
    device = torch.device("cpu" if in_rounds else "cuda")  # nothing is computed here
    engine = OneTokenAStep(tokenizer)
    with open_conversations(config, tokenizer, device, lambda _: None) as loop:
        requests = Requests(engine, Sampling(max_tokens=2 * LONG), loop)
        row = dict.fromkeys(("raw_prompt", "data_source", "ground_truth", "extra_info", "index"))
        for sample, text in enumerate(("call", "long")):
            requests.submit((0, sample), tokenizer(text)["input_ids"], sample, row)
        yield requests, engine


@pytest.mark.parametrize("in_rounds", [False, True])
def test_a_turn_that_is_ready_does_not_wait_for_the_end_of_another_row(in_rounds):
    ended = {}
    with conversations(in_rounds=in_rounds) as (requests, engine):
        while requests.has_work():
            for output in requests.advance():
                ended[output.id] = engine.steps
    before = ended[0, 0] < ended[0, 1]
    # Rounds admit turns in an order that no clock decides, so there the turn behind the tool comes after the long one.
    assert before is not in_rounds
    if not in_rounds:  # the call (77 steps), the tool, the moment until turns may join, the short answer, and slack
        assert ended[0, 0] <= len(CALL) + 5 + 3 * TOOL_S / STEP_S


def test_ranks_that_hold_an_engine_together_make_the_same_steps_whatever_their_clocks_say():
    engines = [OneTokenAStep(byte_tokenizer()) for _ in range(2)]
    for engine, pause in zip(engines, (0.0, 0.02), strict=True):
        engine.ranks = 2
        engine.submit(Request("a", byte_tokenizer()("long")["input_ids"], Sampling(max_tokens=LONG), 0))
        until = admission_deadline(engine)
        time.sleep(pause)
        assert advance(engine, until) == []
    assert engines[0].steps == engines[1].steps > 0


def test_no_step_begins_while_the_device_is_busy_with_earlier_ones():
    engine = OneTokenAStep(byte_tokenizer())
    engine.submit(Request("a", byte_tokenizer()("long")["input_ids"], Sampling(max_tokens=LONG), 0))
    engine.ahead_s = lambda: 60.0
    assert advance(engine, admission_deadline(engine)) == []  # it returns all the same, so that others can be admitted
    assert engine.steps == 0
    engine.ahead_s = lambda: -1.0
    advance(engine, admission_deadline(engine))
    assert engine.steps > 0

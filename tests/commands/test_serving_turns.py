"""`posttrain serve` continues a conversation from the KV cache of its last turn, and finds it by its tokens."""

from __future__ import annotations

import asyncio

import pytest
import torch

from posttrain.commands.serving_model import EndedTurns, KeepingServer, keep_turns
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.conversations.server import Server
from posttrain.models.loading import load_causal_lm
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native

PROMPT, SAID = [*range(60, 100)], [101, 102, 103]


@pytest.fixture
def module(tiny_model):
    return load_causal_lm(ModelConfig(path=str(tiny_model)), dtype=torch.float32, device=torch.device("cpu"))


def talk(engine, turns, first=PROMPT, cache_tokens=0):
    """The tokens of all turns of one conversation."""

    async def main():
        made, ids = [], list(first)
        async with Server(engine) as plain:
            server = keep_turns(plain, cache_tokens)
            for turn in range(turns):
                output = await server.generate(Request((first[-1], turn), list(ids), Sampling(max_tokens=8), turn))
                made.append(output.token_ids)
                ids += [*output.token_ids, 65 + turn, 66]
        return made

    return asyncio.run(main())


def test_a_turn_computes_only_what_is_new_and_samples_the_same(module):
    plain, keeping = (build_native(module, RolloutConfig(kv_cache_gb=0.1), decode=None)[0] for _ in range(2))
    assert talk(plain, 4) == talk(keeping, 4, cache_tokens=keeping.cache_tokens())
    assert plain.prompt_tokens == sum(len(PROMPT) + 10 * turn for turn in range(4))
    assert keeping.prompt_tokens == len(PROMPT) + 3 * 3  # two new tokens, and the one that was sampled last
    hf = HFEngine(module, pad_token_id=0)  # keeps nothing
    assert not isinstance(keep_turns(Server(hf), hf.cache_tokens()), KeepingServer)


def test_a_turn_is_continued_once_and_only_by_a_prompt_that_begins_with_its_whole_prompt():
    turns = EndedTurns(1000)
    assert turns.add("a", PROMPT, SAID) == []
    assert turns.take(PROMPT[:-1]) is None and turns.take([*PROMPT[:-1], 7, 8]) is None
    assert turns.take([*PROMPT, *SAID, 9]) == "a"
    assert turns.take([*PROMPT, *SAID, 9]) is None and turns.tokens == 0


def test_of_candidates_the_one_that_comes_back_is_continued():
    turns = EndedTurns(1000)
    for name, said in (("a", [1, 2]), ("b", [1, 3]), ("c", [4])):
        turns.add(name, PROMPT, said)
    assert turns.take([*PROMPT, 1, 3, 9]) == "b"
    assert turns.take([*PROMPT, 4, 9]) == "c"
    assert turns.take([*PROMPT, 50]) == "a"  # spelled anew by a client: the prompt is still there


def test_the_oldest_turns_go_where_there_are_too_many_tokens(module):
    turns = EndedTurns(2 * len(PROMPT) + 8)
    assert [turns.add(name, [*PROMPT, place], SAID) for place, name in enumerate("abc")] == [[], [], ["a"]]
    assert [*turns.turns] == ["b", "c"] and turns.tokens == 2 * len(PROMPT) + 8
    engine = build_native(module, RolloutConfig(kv_cache_gb=0.1), decode=None)[0]

    async def main():
        async with Server(engine) as plain:
            server = KeepingServer(plain, most=60)
            for number in range(3):
                await server.generate(Request(number, [*PROMPT, number], Sampling(max_tokens=8), 0))
            return server

    assert (
        len(asyncio.run(main()).ended.turns) == 1 and len(engine.queue.kept.turns) == 2
    )  # the last is freed with the next step

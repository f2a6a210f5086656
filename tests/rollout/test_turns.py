"""Turns of a conversation: what the turn before left in the cache is not computed again, and changes nothing."""

import pytest
import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.generate import advance
from posttrain.rollout.native.build import build_native
from tests.rollout.tiny import RECURRENT, tiny

KINDS = ["qwen2", "qwen2-window", "qwen3", "gemma3", "gpt2", "gemma2", "gpt-oss", "deepseek-v3", *RECURRENT]
FIRST, MORE = list(range(3, 40)), [7, 8, 9]


def native(kind="qwen2", gigabytes=0.05):
    return build_native(tiny(kind), RolloutConfig(kv_cache_gb=gigabytes), decode=None)[0]


def run(engine, *requests):
    """The outputs, and how many tokens of prompts were computed for them."""
    before, outputs = engine.prompt_tokens, {}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        outputs |= {output.id: output for output in advance(engine)}
    return [outputs[request.id] for request in requests], engine.prompt_tokens - before


def conversation(engine, *, keep, turns=3):
    """(outputs of the turns, prompt tokens that each computed), with a user's tokens between them."""
    prompt, found, counts = FIRST, [], []
    for turn in range(turns):
        parent = turn - 1 if keep and turn else None
        (output,), count = run(engine, Request(turn, prompt, Sampling(max_tokens=20), turn, parent=parent, keep=keep))
        prompt = [*prompt, *output.token_ids, *MORE]
        found.append(output)
        counts.append(count)
    return found, counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_computes_only_what_is_new_and_samples_the_same(kind):
    plain, whole = conversation(native(kind), keep=False)
    kept, new = conversation(native(kind), keep=True)
    assert whole == [37, 37 + 23, 37 + 46]
    assert new == [37, 4, 4]  # the last token of the response, which was not yet fed, and the user's
    for mine, theirs in zip(kept, plain, strict=True):
        assert mine.token_ids == theirs.token_ids
        torch.testing.assert_close(torch.tensor(mine.log_probs), torch.tensor(theirs.log_probs), atol=1e-5, rtol=0)


def test_several_requests_may_go_on_from_one_and_a_prompt_that_differs_takes_what_is_equal():
    engine = native()
    (first,), _ = run(engine, Request("a", FIRST, Sampling(max_tokens=20), 0, keep=True))
    said = [*FIRST, *first.token_ids]
    follow = [Request(n, [*said[: 50 - 10 * n], 90 + n], Sampling(max_tokens=8), n, parent="a") for n in range(3)]
    mine, count = run(engine, *follow)
    plain, whole = run(native(), *follow)
    assert [output.token_ids for output in mine] == [output.token_ids for output in plain]
    assert (count, whole) == (3, 51 + 41 + 31)


def test_what_was_left_is_given_back_when_released_or_when_weights_change_or_room_is_needed():
    engine = native()
    empty = engine.pool.used
    run(engine, Request("a", FIRST, Sampling(max_tokens=20), 0, keep=True))
    assert engine.pool.used > empty
    engine.release(["a", "never there"])
    assert engine.pool.used == empty
    run(engine, Request("b", FIRST, Sampling(max_tokens=20), 0, keep=True))
    engine.load_weights([], version=1)
    assert engine.pool.used == empty
    _, count = run(engine, Request("c", [*FIRST, 1], Sampling(max_tokens=2), 0, parent="b"))
    assert count == 38  # keys and values of other weights would be wrong

    small = native(gigabytes=1e-4)
    blocks = small.pool.limit
    for number in range(3 * blocks):
        run(small, Request(number, [number % 90 + 1, *FIRST], Sampling(max_tokens=20), 0, keep=True))
    assert small.pool.used <= blocks


def test_an_aborted_row_can_be_continued_from_where_it_stood():
    engine, request = native(), Request("a", FIRST, Sampling(max_tokens=60), 5, keep=True)
    engine.rounds.tokens_per_step = 1
    engine.submit(request)
    for _ in range(11):
        engine.step()
    (part,) = engine.abort(["a"])
    said = [*FIRST, *part.token_ids]
    _, count = run(engine, Request("b", said, Sampling(max_tokens=4), 6, parent="a"))
    assert len(part.token_ids) == 11 and count == 1

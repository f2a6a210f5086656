"""The plan by which recurrent layers go through packed sequences: every token once, behind the state that it needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.kernels.segments import segment_plan
from posttrain.kernels.train import ends_of_responses

CPU = torch.device("cpu")


def paths_of(lengths, end_T):
    """Each token with all that come before it and that it sees."""
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return {
        token: tuple(before for before in range(starts[token], token + 1) if end_T[before] > token)
        for token in range(len(end_T))
    }


# Behind "p" the responses of a prompt; some have a common beginning of one token or of several.
CASES = {
    "no branch": ([4, 3], [[0, 0, 0, 0], [0, 0, 0]]),
    "a prompt with three responses": ([9], [[0, 0, 0, 1, 1, 2, 3, 3, 3]]),
    "two prompts": ([6, 5], [[0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 3]]),
}


def ends_of(lengths, segments):
    return ends_of_responses(lengths, np.concatenate([np.array(one) for one in segments]))


def trees():
    for name, (lengths, segments) in CASES.items():
        yield pytest.param(lengths, ends_of(lengths, segments), id=name)
    # p p p | a | b b | c c | d d: responses a bb, a cc, and dd; they share "a".
    yield pytest.param([10], np.array([10, 10, 10, 8, 6, 6, 8, 8, 10, 10]), id="a shared token within responses")
    yield pytest.param([10], np.array([10, 10, 10, 8, 8, 7, 7, 8, 10, 10]), id="a shared beginning of two tokens")
    yield pytest.param([6], np.array([6, 6, 5, 4, 5, 6]), id="single tokens within single tokens")
    yield pytest.param([4], np.array([4, 2, 3, 4]), id="a prompt of one token")


@pytest.mark.parametrize("can_continue", [True, False])
@pytest.mark.parametrize(("lengths", "end_T"), list(trees()))
def test_every_token_is_computed_behind_exactly_the_tokens_that_it_sees(lengths, end_T, can_continue):
    plan = segment_plan(lengths, end_T, CPU, can_continue=can_continue)
    behind, outputs = {}, []
    for group in plan.groups:
        for row, number in enumerate(group.numbers):
            before = () if group.parents is None else behind[group.parents[row]]
            tokens = group.token_BL[row].tolist()
            if group.has_children:
                behind[number] = (*before, *tokens)
            outputs.append([(*before, *tokens[: place + 1]) for place in range(len(tokens))])
        flat = [seen for row in outputs[-len(group.numbers) :] for seen in row]
        outputs[-len(group.numbers) :] = [[flat[place] for place in group.output_N.tolist()]]
        if group.parents is not None:
            assert can_continue and group.token_BL.shape[1] > 1, "a single token would change the state in place"
    seen = [one for row in outputs for one in row]
    assert len(seen) == len(end_T), "no output is computed and then dropped or missing"
    assert {token: seen[place] for token, place in enumerate(plan.order_T.tolist())} == paths_of(lengths, end_T)


def test_a_prompt_is_computed_once_and_responses_of_similar_length_together():
    lengths = [20 + 8 + 8 + 7 + 2]
    segments = [[0] * 20 + [1] * 8 + [2] * 8 + [3] * 7 + [4] * 2]
    prompt, long, short = segment_plan(lengths, ends_of(lengths, segments), CPU).groups
    assert prompt.token_BL.shape == (1, 20) and prompt.has_children and prompt.parents is None
    assert long.token_BL.shape == (3, 8) and short.token_BL.shape == (1, 2) and not long.has_children
    assert long.parents == [prompt.numbers[0]] * 3


def test_without_shared_beginnings_sequences_are_rectangles_of_their_own():
    plan = segment_plan([5, 4, 1], None, CPU)
    assert [tuple(group.token_BL.shape) for group in plan.groups] == [(2, 5), (1, 1)]
    assert sorted(plan.order_T.tolist()) == list(range(10))

"""A conversation of several turns becomes one response, with the log-probs of what each turn was sampled from."""

from __future__ import annotations

import pytest
import torch

from posttrain.algorithms import sampled_from
from posttrain.conversations.conversation import Conversation
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch


def turn(ids: list[int], log_probs: list[float], sampled: list[float] | None = None) -> Output:
    return Output("a", ids, log_probs, "stop", [(0, len(ids))], sampled)


def conversation(*turns: Output) -> Output:
    """The turns as one response, with two tokens of an observation between them."""
    record = Conversation(("a", 0), [1, 2, 3], seed=0, how={})
    for number, output in enumerate(turns):
        if number:
            record.add_observation([8, 9])
        record.add_sampled(output)
    return record.output("stop")


FILTERED = turn([4, 5], [-2.0, -3.0], [-0.5, -1.0])
PLAIN = turn([6], [-1.5])


def test_log_probs_of_filters_come_through_all_turns_and_unfiltered_turns_keep_their_own():
    for turns, wanted in (
        ((FILTERED, PLAIN), [-0.5, -1.0, 0.0, 0.0, -1.5]),
        ((PLAIN, FILTERED), [-1.5, 0.0, 0.0, -0.5, -1.0]),
        ((FILTERED,), [-0.5, -1.0]),
    ):
        whole = conversation(*turns)
        assert list(whole.sampling_log_probs) == pytest.approx(wanted)
        batch = to_batch([[1, 2, 3]], [whole], pad_token_id=0).batch
        assert sampled_from(batch)[0].tolist() == pytest.approx(wanted)
        assert torch.equal(batch["rollout_log_probs"][0], torch.tensor(whole.log_probs))
        assert not torch.equal(sampled_from(batch), batch["rollout_log_probs"])


def test_without_filters_there_are_no_second_log_probs():
    whole = conversation(PLAIN, PLAIN)
    assert whole.sampling_log_probs is None
    batch = to_batch([[1, 2, 3]], [whole], pad_token_id=0).batch
    assert sampled_from(batch)[0].tolist() == pytest.approx([-1.5, 0.0, 0.0, -1.5])

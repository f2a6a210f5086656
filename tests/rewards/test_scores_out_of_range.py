"""Scores that no training can hold, and values without a text: recorded failures, never a traceback."""

from __future__ import annotations

import pytest

from posttrain.config import ConfigError, load_config
from posttrain.rewards.combined import Combined
from posttrain.rewards.signatures import call_and_read, read_result, text_of
from posttrain.rewards.types import RewardPart, RewardSpec

HUGE = 10**5000  # str() of it raises


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


BEYOND = {"1e308": 1e308, "-1e308": -1e308, "1e19": 1e19, "huge": HUGE, "-huge": -HUGE, "in a dict": {"score": HUGE}}


@pytest.mark.parametrize("name", BEYOND)
def test_a_score_beyond_what_training_can_square_is_a_failure_that_names_it(name):
    score, parts, error = read_result(BEYOND[name])
    assert (score, parts) == (0.0, {})
    assert error is not None and "scores end at 1e+18" in error


def test_the_largest_score_counts():
    assert read_result(-1e18) == (-1e18, {}, None)


def test_parts_out_of_range_are_recorded_as_texts():
    _, parts, error = read_result({"score": 1, "large": 1e308, "long": HUGE, HUGE: 2, "fine": 10**10})
    assert error is None and parts["fine"] == 1e10
    assert parts["large"] == "1e+308" and parts["long"] == "an integer of some 5000 digits"


def test_an_exception_without_a_text_is_named_by_its_type():
    def fails(items):
        raise ValueError(HUGE) if items[0] == "huge" else Silent()

    for item, name in (("huge", "ValueError"), ("silent", "Silent")):
        [(_, _, error)] = call_and_read(fails, [item], "pair")  # pyright: ignore[reportArgumentType]
        assert error is not None and error.startswith(f"{name}: a {name} that has no text")
    assert text_of("x" * 9, 3) == "xxx"


def test_a_weighted_sum_out_of_range_fails_the_response():
    parts = [(RewardPart(name, 1e18, None, RewardSpec()), lambda items: [(1.0, {}, None)]) for name in ("a", "b")]
    [(_, kept, error)] = Combined(parts)([("", "", "", None, None)])
    assert error is not None and "the weighted sum is 2e+18" in error and kept["a"] == 1.0


@pytest.mark.parametrize("key", ["reward.failure_score", "reward.overlong_buffer.penalty_factor"])
def test_settings_of_that_size_are_refused(key):
    with pytest.raises(ConfigError, match=key):
        load_config(["algorithm=grpo", f"{key}=1e308"])

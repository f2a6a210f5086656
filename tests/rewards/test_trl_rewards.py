"""Reward functions written for TRL's and Unsloth's trainers, as they are: their arguments, and the sum of several."""

from __future__ import annotations

import json
import math
import random
import re
from functools import partial

import numpy as np
import pytest

from posttrain.commands.reward_try import main
from posttrain.config.rollout import CustomRewardConfig
from posttrain.rewards import RewardError, RewardItem, RewardPool, resolve_reward
from posttrain.rewards.types import RewardList

USER = [{"role": "user", "content": "2 + 3?"}]


def scored(given, items, **settings):
    """Results of these items, which are one group."""
    spec = resolve_reward(CustomRewardConfig(**settings), function=given)
    for item in items:
        item.group, item.group_size = "g", len(items)
    with RewardPool(spec, num_workers=1, failure_score=-9.0) as pool:
        pool.submit_many(list(enumerate(items)))
        results = pool.wait_all()
    return [results[number] for number in range(len(items))]


def items_of(texts, *, prompt=USER, **columns):
    return [
        RewardItem(
            "math", text, "5", {name: values[row] for name, values in columns.items()}, prompt=prompt,
            token_ids=[*text.encode()], progress=(3, 10),
        )
        for row, text in enumerate(texts)
    ]  # fmt: skip


# -- functions as their pages have them ----------------------------------------------------------------------------


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def format_reward_func(completions, **kwargs) -> list[float]:
    """Unsloth's and TRL's: completions are lists of messages."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    assert all(prompt[-1]["content"] == "2 + 3?" for prompt in prompts) and kwargs["level"] == [1, 2]
    return [2.0 if response == a else 0.0 for response, a in zip(responses, answer, strict=True)]


def keyword_only(*, completions, ground_truth, **_):
    return [float(c[0]["content"] == t) for c, t in zip(completions, ground_truth, strict=True)]


def without_more(completions, answer):
    return [float(completion[0]["content"] == a) for completion, a in zip(completions, answer, strict=True)]


async def later(completions, answer, **kwargs):
    import asyncio

    await asyncio.sleep(0)
    return [float(completion[0]["content"] == a) for completion, a in zip(completions, answer, strict=True)]


def by_prompts(prompts, **kwargs):
    return [float(len(kwargs["completions"][row][0]["content"])) for row in range(len(prompts))]


def on_ids(completion_ids, **kwargs):
    return np.array([float(sum(ids)) for ids in completion_ids])


def weighed(completions, answer, factor, **kwargs):
    return [factor * score for score in without_more(completions, answer)]


class Exact:
    __name__ = "exact"

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, completions, answer, **kwargs):
        return [self.factor * score for score in without_more(completions, answer)]


CALLS = {
    "messages": (correctness_reward_func, [2.0, 0.0]),
    "format": (format_reward_func, [0.0, 0.0]),
    "keyword only": (keyword_only, [1.0, 0.0]),
    "no kwargs": (without_more, [1.0, 0.0]),
    "async": (later, [1.0, 0.0]),
    "prompts alone": (by_prompts, [1.0, 2.0]),
    "token ids": (on_ids, [53.0, 109.0]),
    "partial": (partial(weighed, factor=0.5), [0.5, 0.0]),
    "object": (Exact(3.0), [3.0, 0.0]),
    "class": (Exact, [1.0, 0.0]),
    "method": (Exact(4.0).__call__, [4.0, 0.0]),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_function_of_trl_is_called_with_lists_of_a_whole_group_and_columns_by_name(kind):
    function, wanted = CALLS[kind]
    results = scored(function, items_of(["5", "67"], answer=["5", "6"], level=[1, 2]))
    assert [(result.score, result.error) for result in results] == [(score, None) for score in wanted]


def test_completions_are_texts_where_prompts_are_texts():
    found = scored(reward_len, items_of(["5", "six"], prompt="2 + 3?"))
    assert [result.score for result in found] == [-19, -17]

    def prompts_too(prompts, completions, **kwargs):
        return [float(prompt == "2 + 3?" and isinstance(text, str)) for prompt, text in zip(prompts, completions)]  # noqa: B905

    assert [one.score for one in scored(prompts_too, items_of(["a", "b"], prompt="2 + 3?"))] == [1.0, 1.0]


def test_everything_that_trl_gives_is_there_and_what_is_logged_lies_with_the_samples():
    def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
        assert sorted(kwargs) == ["answer", "data_source", "extra_info", "ground_truth"]
        log_extra("seen", [completion[0]["content"] for completion in completions])
        log_metric("length", 1.0)
        log_metric("length", 4.0)
        return [trainer_state.global_step / trainer_state.max_steps, len(completion_ids[1])]

    found = scored(everything, items_of(["5", "67"], answer=["5", "6"]))
    assert [one.score for one in found] == [0.3, 2.0]
    assert [one.parts for one in found] == [{"seen": "5", "length": 2.5}, {"seen": "67", "length": 2.5}]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completions, **kwargs: None, "returned None, not a list of 2 scores"),
        (lambda completions, **kwargs: [1.0], "returned 1 scores for 2 responses"),
        (lambda completions, **kwargs: [1.0, "x"], "returned a str ('x') instead of a number"),
        (lambda completions, **kwargs: [1.0, math.inf], "returned inf"),
        (lambda completions, **kwargs: [1.0, None], "no reward function applies to this response"),
        (lambda completions, **kwargs: [1.0, math.nan], "no reward function applies to this response"),
        (lambda completions, **kwargs: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_such_a_function_cannot_return_is_said_of_its_response(function, said):
    assert said in (scored(function, items_of(["5", "67"]))[1].error or "")


# -- several functions ---------------------------------------------------------------------------------------------


def trl_sum(rewards_per_func: list[list[float | None]], weights: list[float]) -> list[float]:
    """TRL's: None is NaN, a weighted sum without NaN, and NaN where no function applies."""
    table = np.array([[math.nan if one is None else one for one in row] for row in rewards_per_func], np.float64)
    total = np.nansum(table * np.array(weights), axis=1)
    total[np.isnan(table).all(axis=1)] = np.nan
    return total.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_the_sum_of_several_functions_is_trls_with_weights_none_and_nan(seed):
    draw = random.Random(seed)
    count, responses = draw.randint(1, 4), draw.randint(1, 6)
    values = [0.0, 1.0, -2.5, 0.125, None, math.nan]
    table = [[draw.choice(values) for _ in range(count)] for _ in range(responses)]
    weights = [draw.choice([1.0, 0.5, -2.0, 0.0]) for _ in range(count)] if seed % 2 else None

    def function_of(place):
        def column(completions, **kwargs):
            return [table[int(completion[0]["content"])][place] for completion in completions]

        return column

    given = RewardList([function_of(place) for place in range(count)], weights)
    found = scored(given, items_of([str(row) for row in range(responses)]))
    for wanted, result, row in zip(trl_sum(table, weights or [1.0] * count), found, table, strict=True):
        if math.isnan(wanted):
            assert result.score == -9.0 and "no reward function applies" in (result.error or "")
            continue
        assert result.error is None and result.score == pytest.approx(wanted)
        names = ["column", *(f"column_{place}" for place in range(2, count + 1))]
        applied = {n: one for n, one in zip(names, row, strict=True) if one is not None and not math.isnan(one)}
        assert {name: value for name, value in result.parts.items() if name != "acc"} == applied


def test_functions_of_all_forms_are_summed_and_one_that_fails_is_named():
    def pair(response, ground_truth):
        return float(response == ground_truth)

    def fails(completions, **kwargs):
        raise ValueError("no such room")

    given = RewardList([pair, without_more, lambda completions, ground_truths: [10.0, 20.0]], [1.0, 0.5, 1.0])
    found = scored(given, items_of(["5", "67"], answer=["5", "6"]))
    assert [one.score for one in found] == [11.5, 20.0]
    assert [sorted(one.parts) for one in found] == [["acc", "pair", "reward", "without_more"]] * 2
    (failed, _) = scored(RewardList([pair, fails]), items_of(["5", "67"]))
    assert "fails: ValueError: no such room" in (failed.error or "")


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        (RewardList([]), {}, "the list of reward functions is empty"),
        (RewardList([reward_len, "Qwen/RM"]), {}, "'Qwen/RM' is no function"),
        ("my_reward.py", {}, "'my_reward.py' is no function"),
        (RewardList([reward_len], [1.0, 2.0]), {}, "2 weights are given for 1 reward functions"),
        (RewardList([reward_len], [math.nan]), {}, "the weight nan of reward_len is not a finite number"),
        (RewardList([reward_len]), {"path": "x.py"}, "two rewards are named: function objects and"),
        (lambda completion, answer: 0, {}, "none of the known signatures"),
        (lambda completion, answer: 0, {}, r"or as TRL's: (prompts, completions, COLUMN, ..., **kwargs)"),
        (lambda completions, /: 0, {}, "positional-only"),
        (reward_len, {"reward_kwargs": {"completions": 1}}, "which the run itself gives"),
        (without_more, {"reward_kwargs": {"bonus": 1}}, "which without_more does not take"),
    ],
)
def test_what_cannot_be_called_is_refused_in_words_before_a_run(given, settings, said):
    with pytest.raises(RewardError) as caught:
        resolve_reward(CustomRewardConfig(**settings), function=given)
    assert said in str(caught.value) and caught.value.todo


@pytest.mark.parametrize(
    ("function", "form", "columns"),
    [
        (lambda completions, ground_truths: 0, "list", []),
        (lambda completions, ground_truths, **kwargs: 0, "list", []),
        (lambda prompts, completions, ground_truths: 0, "batch", []),
        (lambda completions, ground_truths, answer: 0, "batch", ["answer"]),
        (lambda completions, ground_truth: 0, "batch", []),
        (lambda completions, response, ground_truth, level=1: 0, "batch", ["response"]),
        (lambda completions, solution_str, **kwargs: 0, "batch", ["solution_str"]),
        (lambda response, ground_truth: 0, "pair", []),
        (lambda solution_str, ground_truth, **kwargs: 0, "source", []),
        (lambda **kwargs: 0, "source", []),
    ],
)
def test_one_name_decides_the_form_so_that_no_function_has_two(function, form, columns):
    spec = resolve_reward(CustomRewardConfig(), function=function)
    assert (spec.form, spec.columns) == (form, columns)


# -- in files ------------------------------------------------------------------------------------------------------

FILE = """
import re

def correctness_reward_func(prompts, completions, answer, **kwargs):
    assert isinstance(prompts[0], list)
    said = [completion[0]["content"] for completion in completions]
    return [2.0 if text == a else None if text == "" else 0.0 for text, a in zip(said, answer)]
"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}?"}], "answer": str(n), "ground_truth": str(n)} for n in range(3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(FILE)
    return tmp_path


def test_reward_try_handles_them(data, capsys):
    assert main(["rewards.py", "rows.jsonl"]) in (0, 1)
    said = capsys.readouterr().out
    assert (
        "correctness_reward_func in" in said
        and "reference answers scored against themselves (best spelling): mean 2.000" in said
    )
    (data / "rewards.py").write_text(
        FILE.replace("answer, **", "anser, **").replace("completions, answer)", "completions, anser)")
    )
    assert main(["rewards.py", "rows.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "takes anser, and the rows have no such column; did you mean answer?" in said and "to do:" in said


def test_a_file_may_hold_an_object_a_partial_function_or_several_functions(data):
    (data / "rewards.py").write_text(
        "class Exact:\n    def __call__(self, completions, **kw): return [0.5] * len(completions)\nexact = Exact()\n"
    )
    assert resolve_reward(CustomRewardConfig(path="rewards.py")).name == "Exact"
    (data / "rewards.py").write_text(
        FILE + "\nfrom functools import partial\nother = partial(correctness_reward_func, bonus=1)\n"
    )
    with pytest.raises(
        RewardError, match=r"(?s)2 of its functions could be the reward.*or sum several by reward.functions"
    ):
        resolve_reward(CustomRewardConfig(path="rewards.py"))
    for name in ("other", "correctness_reward_func"):
        found = resolve_reward(CustomRewardConfig(path="rewards.py", name=name))
        assert (found.form, found.name, found.columns) == ("batch", "correctness_reward_func", ["answer"])
    both = {
        "a": {"path": "rewards.py", "name": "other"},
        "b": {"path": "rewards.py", "name": "correctness_reward_func", "weight": 0.5},
    }
    spec = resolve_reward(CustomRewardConfig(), functions=both)
    assert (spec.form, spec.columns) == ("batch", ["answer"])

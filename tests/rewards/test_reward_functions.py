"""`reward.functions`: several rewards with weights, the form and length of a response, and mistakes in the settings."""

import pytest

from posttrain.commands.reward_try import main as try_reward_command
from posttrain.config import load_config
from posttrain.config.rollout import CustomRewardConfig
from posttrain.rewards import RewardError, RewardItem, RewardPool, resolve_reward

TAGGED = "<think>6 times 7</think>\n<answer>42</answer>"
MINE = """
def compute_score(solution_str, ground_truth, bonus=1.0):
    if "fail" in solution_str:
        raise ValueError("no")
    return {"score": bonus * ("!" in solution_str), "loud": "!" in solution_str}

def ranks(completions, ground_truths):
    order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
    return [order.index(i) / 10 for i in range(len(completions))]
"""


def resolve(functions):
    return resolve_reward(CustomRewardConfig(), functions=functions)


def scored(functions, texts, *, truth="42", tokens=None, group=False, **options):
    with RewardPool(resolve(functions), num_workers=1, **options) as pool:
        for key, text in enumerate(texts):
            item = RewardItem("gsm8k", text, truth, group="g" if group else None, group_size=len(texts))
            item.tokens = tokens
            pool.submit(key, item)
        results = pool.wait_all()
    return [results[key] for key in range(len(texts))]


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def test_scores_are_summed_by_weight_and_each_is_recorded_by_name(mine):
    functions = {
        "right": 1.0,
        "form": {"tags": ["think", "answer"], "weight": 0.25},
        "mine": {"path": mine, "name": "compute_score", "reward_kwargs": {"bonus": 2}, "weight": -0.5},
    }
    results = scored(functions, [TAGGED, "#### 42!", "#### 41"])
    assert [result.score for result in results] == [1.25, 0.0, 0.0]
    assert results[0].parts == {"right": 1.0, "form": 1.0, "mine": 0.0, "mine_loud": 0.0, "acc": 1.0, "pred": "42"}
    assert results[1].parts["mine"] == 2.0 and results[1].parts["acc"] == 1.0
    assert results[2].parts["acc"] == 0.0


def test_one_function_that_fails_fails_the_response_and_is_named(mine):
    functions = {"right": {"data_source": "math"}, "mine": {"path": mine, "name": "compute_score"}}
    failed, fine = scored(functions, ["fail: #### 42", "42"], failure_score=-1.0)
    assert failed.score == -1.0 and failed.parts["right"] == 1.0
    assert failed.error.startswith("mine: ValueError: no") and fine.error is None and fine.score == 1.0


def test_a_function_of_the_list_form_gets_the_whole_group(mine):
    functions = {"right": 1, "rank": {"path": mine, "name": "ranks"}}
    results = scored(functions, ["#### 42", "42", "so it is 41"], group=True)
    assert [result.score for result in results] == [1.1, 1.0, 0.2]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (TAGGED, 1.0),
        ("6 times 7</think><answer>42</answer>\n", 1.0),  # the template has written <think> already
        ("<answer>42</answer><think>so</think>", 0.0),
        (TAGGED + " and more", 0.0),
        (TAGGED + TAGGED, 0.0),
        ("<think>6 times 7<answer>42</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_stand_in_their_order_with_nothing_around_them(text, score):
    assert scored({"form": {"tags": ["think", "answer"]}}, [text])[0].score == score


def test_a_pattern_and_a_length_in_tokens():
    assert [r.score for r in scored({"boxed": {"pattern": r"\\boxed\{.+\}"}}, ["\\boxed{4}", "4"])] == [1.0, 0.0]
    limits = {"min_tokens": 10, "free_tokens": 100, "max_tokens": 200}
    lengths = {0: 0.0, 5: 0.5, 10: 1.0, 100: 1.0, 150: 0.5, 200: 0.0, 900: 0.0}
    for tokens, score in lengths.items():
        assert scored({"short": limits}, ["x"], tokens=tokens)[0].score == score, tokens
    assert scored({"short": {"max_tokens": 10}}, ["x" * 20])[0].score == 0.5  # no tokens: a quarter of its bytes


def test_needs_counts_a_part_only_where_the_answer_is_right():
    functions = {"right": 1, "short": {"max_tokens": 100, "needs": "right", "weight": 0.5}}
    assert [r.score for r in scored(functions, ["42", "41"], tokens=50)] == [1.25, 0.0]


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ({"a": {"wieght": 1}}, "did you mean weight?"),
        ({"a": {"weight": "much"}}, "not a finite number"),
        ({"a": {"tags": ["x"], "pattern": "x"}}, "tags and pattern are given for one function"),
        ({"a": {"pattern": "("}}, "no regular expression"),
        ({"a": {"needs": "b"}}, "names no other function"),
        ({"a": {"path": "nowhere.py"}}, "reward.functions.a: reward file"),
        ({"a": {"data_source": "gsm8"}}, "did you mean 'gsm8k'?"),
        ({"a": {"free_tokens": 9, "max_tokens": 9}}, "does not lie above"),
        ({"a": {"max_tokens": 1.5}}, "not a count of tokens"),
        ({"acc": {"tags": ["x"]}}, "cannot be named"),
        ({"a": "mine.py"}, "describes no reward"),
        ({"a": {"name": "f"}}, "give its path"),
    ],
)
def test_mistakes_are_answered_with_place_and_what_to_do(functions, said):
    with pytest.raises(RewardError) as caught:
        resolve(functions)
    text = str(caught.value)
    assert said in text and "to do:" in text and "set in:" in text


def test_two_rewards_are_refused(mine):
    with pytest.raises(RewardError, match="two rewards are named"):
        resolve_reward(CustomRewardConfig(path=mine), functions={"right": 1})


def test_the_command_line_and_reward_try_take_them(tmp_path, capsys):
    settings = ["+reward.functions.right.weight=0.8", "+reward.functions.form={tags: [think, answer], weight: 0.2}"]
    config = load_config(["algorithm.adv_estimator=grpo", *settings]).config
    wanted = {"right": {"weight": 0.8}, "form": {"tags": ["think", "answer"], "weight": 0.2}}
    assert config.reward.functions == wanted
    data = tmp_path / "rows.jsonl"
    data.write_text(
        '{"data_source": "gsm8k", "ground_truth": "42", "response": "<think>x</think><answer>42</answer>"}\n'
    )
    assert try_reward_command(["--data", str(data), "reward.num_workers=1", *settings]) == 0
    said = capsys.readouterr().out
    assert "0.8 x right (built-in scorers, by data_source) + 0.2 x form (tags=['think', 'answer'])" in said
    assert "responses: 1, mean 1.000" in said and "nothing suspicious" in said

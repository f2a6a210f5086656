"""`posttrain reward try`: what it reports about data and rewards before a run."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from posttrain.commands.reward_try import main
from posttrain.config.rollout import CustomRewardConfig
from posttrain.rewards import resolve_reward, try_reward
from posttrain.rewards.try_report import timing
from posttrain.rewards.tryout import examine


@pytest.fixture(autouse=True)
def _one_worker(monkeypatch):
    """Where a test asks for no number: one on each core would only take longer to start than to score these rows."""
    monkeypatch.setattr("posttrain.rewards.pool.MOST", 1)


def rows(source, truths):
    return [{"data_source": source, "ground_truth": truth} for truth in truths]


def spec_of(function):
    return resolve_reward(CustomRewardConfig(), function=function)


def seed_1(completions, ground_truths):
    import re

    def one(text, truth):
        match = re.search(r"\\boxed\{(.+?)\}", text)
        return -0.5 if match is None else 1.0 if match.group(1) == truth else -1.0

    return [one(*pair) for pair in zip(completions, ground_truths, strict=True)]


def seed_4(response, ground_truth):
    import re

    found = [re.search(r"#### (\d+)", text) for text in (response, ground_truth)]
    return 1.0 if all(found) and int(found[0][1]) == int(found[1][1]) else 0.0


def test_unmatched_source_is_reported_with_its_count():
    text = try_reward(rows("gsm8k", ["1", "2"]) + rows("my_task", ["3", "4", "5"]), num_workers=1)
    assert "! 3 rows have data_source 'my_task'" in text and "gsm8k" in text
    assert "reference answers scored against themselves (best spelling): mean 1.000, min 1, max 1; 1: 2" in text


def test_unmatched_source_is_seen_through_a_function_that_asks_the_built_in_scorers():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        from posttrain.rewards import score_by_source

        return score_by_source(data_source, solution_str, ground_truth)

    found = examine(rows("gsm8k", ["1"]) + rows("my_task", ["3"]), spec_of(compute_score), num_workers=1)
    assert dict(found.unmatched) == {"my_task": 1} and not found.errors


def anywhere(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)


def at_the_end(data_source, solution_str, ground_truth, extra_info=None):
    import re

    found = re.findall(r"-?[0-9]+", solution_str)
    return float(bool(found) and found[-1] == ground_truth)


def test_a_reward_that_pays_lists_of_answers_is_named_and_one_that_reads_the_last_is_not():
    data = rows("mine", [str(n) for n in range(31, 71, 3)])
    text = try_reward(data, spec_of(anywhere), num_workers=1)
    assert (
        "! A response that lists many answers, one of them right, scores as much as the right answer in 14 of 14"
        in text
    )
    text = try_reward(data, spec_of(at_the_end), num_workers=1)
    assert "many answers listed                         0.000" in text and "nothing suspicious found" in text


def test_of_a_whole_solution_the_answer_that_it_ends_with_is_tried_too():
    def in_a_box(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == f"\\boxed{{{ground_truth.split('####')[-1].strip()}}}")

    data = rows("mine", [f"There are 3 of {n}, which is <<3*{n}={3 * n}>>{3 * n}.\n#### {3 * n}" for n in range(4, 12)])
    text = try_reward(data, spec_of(in_a_box), num_workers=1)
    assert "its final answer, \\boxed{}                  1.000" in text and "nothing suspicious found" in text


def test_a_reward_that_draws_random_numbers_is_seen_though_workers_seed_them_by_the_response():
    def draws(data_source, solution_str, ground_truth, extra_info=None):
        import random

        return float(solution_str == ground_truth) + random.random()

    assert examine(rows("mine", ["31", "45"]), spec_of(draws), num_workers=1).flaky
    assert not examine(rows("mine", ["31", "45"]), spec_of(draws), num_workers=1, times=1).flaky
    assert not examine(rows("mine", ["31", "45"]), spec_of(at_the_end), num_workers=1).flaky


def test_responses_without_an_extracted_answer_are_counted_with_examples():
    data = rows("gsm8k", ["1", "2", "3"])
    responses = [{**row, "response": text} for row, text in zip(data, ["#### 1", "I give up", "#### 4"], strict=True)]
    text = try_reward(data, responses=responses, num_workers=1)
    assert "responses: 3, mean 0.333, min 0, max 1; 0: 2, 1: 1" in text
    assert "! 1 of 3 responses gave no extracted answer" in text and "row 1: 'I give up'" in text


def test_truths_that_do_not_score_against_themselves_are_named():
    found = examine(rows("qa", ["Paris", "---", "Rome"]), resolve_reward(CustomRewardConfig()), num_workers=1)
    assert found.unscored == [(1, "---", 0.0)] and not found.ok


def test_function_that_wants_the_marker_in_the_truth_scores_no_bare_truth():
    text = try_reward(rows("gsm8k", ["42", "7"]), spec_of(seed_4), num_workers=1)
    assert "! 2 of 2 reference answers do not score 1 against themselves" in text and "row 0: '42' scores 0" in text
    assert examine(rows("gsm8k", ["so #### 42", "so #### 7"]), spec_of(seed_4), num_workers=1).ok


def test_truths_that_a_function_cannot_score_are_shown():
    found = examine(rows("", ["#### 42", "#### -5"]), spec_of(seed_4), num_workers=1)
    assert [truth for _, truth, _ in found.unscored] == ["#### -5"]
    found = examine(rows("", ["42", "\\frac{1}{2}"]), spec_of(seed_1), num_workers=1)
    assert [truth for _, truth, _ in found.unscored] == ["\\frac{1}{2}"]


def test_rows_without_a_reference_answer_are_counted_and_not_scored_as_if_it_were_the_word_none():
    data = [{"data_source": "math_reasoning", "prompt": f"1 + {n} = ?"} for n in range(3)]
    found = examine(data, resolve_reward(CustomRewardConfig()), num_workers=1)
    assert found.truthless == 3 and not found.best and not found.ok
    assert "! 3 rows have no reference answer (column ground_truth): the reward gets None" in try_reward(data)
    half = [*data[:1], {**data[1], "ground_truth": "2"}, {**data[2], "ground_truth": "3"}]
    found = examine(half, resolve_reward(CustomRewardConfig()), num_workers=1)
    assert found.truthless == 1 and found.best == [1.0, 1.0] and len(found.score_gaps) == 2 and not found.ok


def test_the_column_answer_is_no_reference_answer_for_built_in_scorers_as_in_a_run():
    data = [{"data_source": "math_reasoning", "prompt": f"1 + {n} = ?", "answer": str(n + 1)} for n in range(3)]
    text = try_reward(data, num_workers=1)
    assert "! 3 rows have no reference answer" in text and "rename their column `answer` to ground_truth" in text


def test_a_function_that_reads_the_column_answer_is_tried_with_it_and_gets_no_ground_truth():
    def correctness_reward(completions, answer, **kwargs):
        return [float(text == a) for text, a in zip(completions, answer, strict=True)]

    def by_truth(data_source, solution_str, ground_truth, extra_info=None):
        return float(ground_truth is None and solution_str == extra_info["answer"])

    data = [{"prompt": f"1 + {n} = ?", "answer": str(n + 1)} for n in range(3)]
    for function in (correctness_reward, by_truth):
        found = examine(data, spec_of(function), num_workers=1)
        assert found.best == [1.0, 1.0, 1.0] and found.ok and not found.truthless


def test_a_function_that_needs_no_reference_answer_is_tried_without_one():
    def is_short(response, ground_truth):
        return float(len(response) < 9)

    found = examine([{"prompt": "How are you?"}, {"prompt": "Why is the sky blue?"}], spec_of(is_short), num_workers=1)
    assert found.ok and found.truthless == 2 and found.by_form["empty response"] == [1.0, 1.0]
    text = try_reward([{"prompt": "Why is the sky blue?"}], spec_of(is_short), num_workers=1)
    assert "\n1 row has no reference answer" in text and "nothing suspicious found" in text


def test_a_reward_that_always_fails_is_not_said_to_score_0():
    def text_of(response, ground_truth):
        return "1.0"

    text = try_reward(rows("mine", ["1", "2"]), spec_of(text_of), num_workers=1)
    assert "! 2 of 2 reference answers were not scored: every call failed" in text
    assert "returned a str" in text and "do not score 1" not in text


def test_rows_that_name_no_data_source_are_told_what_to_set():
    text = try_reward([{"prompt": "1 + 1 =", "ground_truth": "2"}], num_workers=1)
    assert "! 1 row has no data_source (known: " in text and "set the column data_source to one of these" in text


def test_times_are_written_without_exponents():
    assert timing([0.361]).startswith("time of a call: 361 ms on average")
    assert timing([0.0994]).startswith("time of a call: 99 ms") and timing([12.3]).startswith("time of a call: 12 s")


def test_means_by_form_show_a_wrong_box_below_no_box():
    found = examine(rows("", ["42", "7"]), spec_of(seed_1), num_workers=1)
    means = {form: sum(scores) / len(scores) for form, scores in found.by_form.items()}
    assert means["reference answer, \\boxed{}"] == 1.0 and means["reference answer, bare"] == -0.5
    assert means["another row's reference answer, \\boxed{}"] == -1.0 and means["empty response"] == -0.5
    text = try_reward(rows("", ["42", "7"]), spec_of(seed_1), num_workers=1)
    assert "another row's reference answer, \\boxed{}" in text and "-1.000" in text


def test_means_by_part_are_shown():
    def parts(response, ground_truth):
        return {"score": 1.0, "format": float(len(response) > 1), "pred": response}

    data = [{"ground_truth": "1", "response": text} for text in ("a", "bb", "ccc", "dddd")]
    text = try_reward(data, spec_of(parts), num_workers=1)
    assert "mean by part:" in text and "format" in text and "0.750" in text


def test_failing_calls_are_reported_with_their_error():
    def broken(response, ground_truth):
        return 1 / len(response)

    text = try_reward(rows("", ["1"]), spec_of(broken), num_workers=1)
    assert "! 1 call failed: ZeroDivisionError: division by zero" in text and "in broken" in text


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_command_reads_files_and_its_status_says_whether_something_was_found(tmp_path, capsys, kind):
    def write(name, data):
        path = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(data), path)
        else:
            path.write_text(json.dumps(data) if kind == "json" else "\n".join(map(json.dumps, data)))
        return str(path)

    nested = [{"data_source": "openai/gsm8k", "reward_model": {"ground_truth": str(n)}} for n in range(3)]
    data = write("data", nested)
    assert main(["--data", data]) == 0
    assert "nothing suspicious found" in capsys.readouterr().out
    responses = write("responses", [{"response": text} for text in ("#### 0", "#### 1", "no")])
    assert main(["--data", data, "--responses", responses]) == 1
    assert "1 of 3 responses gave no extracted answer" in capsys.readouterr().out


def test_command_says_what_is_wrong_with_its_files(tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text('{"data_source": "gsm8k", "ground_truth": "1"}')
    assert main(["--data", str(tmp_path / "none.jsonl")]) == 2
    assert "There is no file" in capsys.readouterr().err
    assert main(["--data", str(data), "--reward_func", str(tmp_path / "none.py")]) == 2
    assert "--reward_func" in capsys.readouterr().err


def test_a_row_whose_response_is_its_truth_is_tried_as_training_reads_it(tmp_path):
    """Rows with `prompt` and `response` alone train with the response as truth."""
    data = [{"data_source": "gsm8k", "response": "1 + 1 = 2\n#### 2"}, {"data_source": "gsm8k", "response": "#### 7"}]
    found = examine(data, resolve_reward(CustomRewardConfig()), num_workers=1)
    assert found.best == [1.0, 1.0] and not found.responses and found.ok
    (tmp_path / "said.jsonl").write_text('{"response": "#### 2"}\n{"response": "#### 8"}\n')
    (tmp_path / "data.json").write_text(json.dumps(data))
    assert main(["--data", str(tmp_path / "data.json"), "--responses", str(tmp_path / "said.jsonl")]) == 0
    joined = examine(data, resolve_reward(CustomRewardConfig()), responses=_joined(tmp_path), num_workers=1)
    assert joined.responses == [1.0, 0.0]


def _joined(folder):
    from posttrain.commands.reward_try import _with_truths
    from posttrain.data.rows import load_rows

    return _with_truths(load_rows(folder / "said.jsonl").rows, load_rows(folder / "data.json").rows)


COUNTS = """
calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    return float(calls)
"""
SLEEPS = """
import time

def by_name(solution_str, ground_truth):
    time.sleep(0.02)
    is_right = float(solution_str == ground_truth)
    return {"score": is_right, "acc": is_right, "short": float(len(solution_str) < 2)}
"""


@pytest.fixture
def desk(tmp_path):
    (tmp_path / "counts.py").write_text(COUNTS)
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    data = [{"data_source": "mine", "prompt": f"{n} + 1 =", "ground_truth": str(n + 1)} for n in range(8, 11)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    return tmp_path


def test_function_and_data_stand_without_flags_and_a_score_that_changes_is_named(desk, capsys):
    assert main([str(desk / "counts.py"), str(desk / "data.jsonl"), "reward.num_workers=1"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"reward: compute_score in {desk / 'counts.py'}")
    assert "! row 0, reference answer, bare: scored 1, and" in said and "when asked again" in said
    assert "33 scores of the same response differ: a run could not be repeated" in said  # every one: 3 rows x 11 forms
    assert main([str(desk / "counts.py"), str(desk / "data.jsonl"), "--times", "1"]) == 1  # no truth scores 1
    assert "when asked again" not in capsys.readouterr().out


def test_time_parts_and_a_named_function_are_shown(desk, capsys):
    assert main([f"{desk / 'sleeps.py'}:by_name", str(desk / "data.jsonl"), "--times", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("reward: by_name in")
    took = re.search(r"time of a call: (\S+) (ms|s) on average", said)
    assert took and float(took[1]) * {"ms": 1, "s": 1000}[took[2]] >= 20  # it sleeps that long
    table = said[said.index("mean by part:") :].splitlines()
    assert table[0].split() == ["mean", "by", "part:", "reference", "another", "row's"]
    assert table[1].split() == ["acc", "1.000", "0.000"] and table[2].split()[0] == "short"


def test_words_that_do_not_say_what_is_meant_are_answered(desk, capsys):
    for words, said in (
        ([str(desk / "counts.py")], "give both"),
        ([], "DATA is missing"),
        (["a.py", "b.json", "c.json"], "one word too many"),
        (["a.py", "b.json", "--model", "embedded", "--responses", "c.json"], "one of the two"),
        (["a.py", "b.json", "--model", "embedded", "-k", "0"], "at least 1"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_samples_of_a_model_tell_how_many_groups_would_carry_signal(desk, capsys):
    answers = {"9": ["9", "9", "1"], "10": ["11", "12", "13"], "11": ["11", "11", "11"]}

    def sample(options, rows):
        assert options.model == "some/model" and options.k == 3
        return [
            {**row, "response": text, "group": i} for i, row in enumerate(rows) for text in answers[row["ground_truth"]]
        ]

    words = [f"{desk / 'sleeps.py'}:by_name", str(desk / "data.jsonl"), "--model", "some/model", "-k", "3"]
    assert main(words, sample=sample) == 0
    said = capsys.readouterr().out
    assert "responses: 9 of some/model, mean 0.556, min 0, max 1; 1: 5, 0: 4" in said
    assert "groups that would carry signal: 1 of 3 (33%); all right 1, all wrong 1" in said
    assert "the reward agrees with the ground truth on 9 of 9 answers that can be read (100%)" in said
    answers["9"] = ["9", "9", "9"]
    assert main(words, sample=sample) == 1
    said = capsys.readouterr().out
    assert (
        "! groups that would carry signal: 0 of 3 (0%); all right 2, all wrong 1" in said and "harder prompts" in said
    )


def test_a_group_of_samples_is_given_to_a_group_reward_together(desk, capsys):
    (desk / "group.py").write_text(
        "def compute_score(completions, ground_truths):\n    return [1.0 / len(completions)] * len(completions)\n"
    )
    sample = lambda options, rows: [{**row, "response": "9", "group": i} for i, row in enumerate(rows) for _ in "ab"]  # noqa: E731
    main([str(desk / "group.py"), str(desk / "data.jsonl"), "--model", "m", "-k", "2"], sample=sample)
    assert "responses: 6 of m, mean 0.500" in capsys.readouterr().out


def test_agreement_says_which_way_a_reward_errs():
    def generous(response, ground_truth):
        return 1.0 if response else 0.0

    data = rows("gsm8k", ["1", "2"])
    responses = [{**row, "response": text} for row, text in zip(data, ["#### 1", "#### 7"], strict=True)]
    text = try_reward(data, spec_of(generous), responses=responses, num_workers=1)
    assert "on 1 of 2 answers that can be read (50%); it counts 1 wrong answers as right" in text

"""`posttrain eval`: the same scores as training, reports, samples, resuming, and the comparison of two reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from runs import run

from posttrain import cli
from posttrain.commands.evaluation.report import compare, notes, read_report
from posttrain.commands.generation import files as parts_module
from posttrain.data.rows import load_rows
from posttrain.trainer import main_eval
from posttrain.trainer.main_generation import cli as entry

REWARD = Path(__file__).parents[1] / "trainer" / "light_rewards.py"
EVEN = ["--reward-func", str(REWARD), "--reward-name", "even_share", "reward.num_workers=1"]


@pytest.fixture
def evaluate(tiny_model: Path, sums: dict[str, Path], tmp_path: Path):
    """`evaluate(name, *args)`: the report on the 12 test sums."""

    def evaluated(name: str, *args: str, model: Path = tiny_model, reward=EVEN) -> dict:
        command = ["eval", str(model), "--data", str(sums["test"]), "--out", str(tmp_path / name), *reward]
        assert cli.main([*command, *args]) == 0
        return read_report(tmp_path / name)

    return evaluated


def values(report: dict, source: str = "math_reasoning") -> dict[str, float]:
    return {name: entry["value"] for name, entry in report["results"][source]["metrics"].items()}


def test_a_checkpoint_scores_what_its_run_validated(tiny_model, sums, tmp_path, evaluate):
    from light_rewards import fingerprint

    more = {"actor_rollout_ref__actor__optim__lr": 0.05, "data__val_files": str(sums["test"])}
    result = run(tiny_model, sums, tmp_path / "runs", reward=fingerprint, **more)
    before, after = (result.validation[i][1]["val/math_reasoning/mean@1"] for i in (0, -1))
    assert before != after  # the weights moved far enough to give other responses
    reward = ["--reward-func", str(REWARD), "--reward-name", "fingerprint", "reward.num_workers=1"]
    report = evaluate("out", model=result.path / "checkpoints" / "global_step_2", reward=reward)
    assert values(report)["reward"] == pytest.approx(after, abs=1e-12)
    assert (tmp_path / "out" / "samples" / "step_2.parquet").is_file()


def test_a_runs_limit_on_its_validation_does_not_limit_an_evaluation(tiny_model, sums, tmp_path, evaluate):
    more = {"trainer__total_training_steps": 1, "data__val_files": str(sums["test"]), "data__val_max_samples": 3}
    result = run(tiny_model, sums, tmp_path / "runs", **more)
    report = evaluate("out", "--limit", "5", model=result.path / "checkpoints" / "global_step_1")
    assert report["data"]["rows"] == 5
    assert evaluate("all", model=result.path / "checkpoints" / "global_step_1")["data"]["rows"] == 12


def test_generate_then_eval_gives_the_same_numbers_as_eval(evaluate, tiny_model, sums, tmp_path):
    report = evaluate("whole", "--n", "4", "--max-tokens", "6")
    out = str(tmp_path / "responses.parquet")
    command = ["generate", str(tiny_model), "--data", str(sums["test"]), "--out", out, "--n", "4", "--max-tokens", "6"]
    assert cli.main(command) == 0
    assert cli.main(["eval", "--responses", out, "--out", str(tmp_path / "apart"), *EVEN]) == 0
    apart = read_report(tmp_path / "apart")
    assert apart["results"] == report["results"] and apart["prompts"] == report["prompts"]
    samples = str(tmp_path / "whole" / "samples" / "step_0.parquet")
    assert cli.main(["eval", "--responses", samples, "--out", str(tmp_path / "samples"), *EVEN]) == 0
    assert read_report(tmp_path / "samples")["results"] == report["results"]


def test_the_report_says_what_was_done_and_the_samples_are_those_of_a_run(evaluate, tmp_path, capsys):
    report = evaluate("out", "--n", "2", "--max-tokens", "6", "data.max_prompt_length=40")
    shown = capsys.readouterr().out
    assert "math_reasoning       reward" in shown and "12 prompts, 24 responses, truncated" in shown
    assert report["settings"]["temperature"] == 1.0 and report["settings"]["max_prompt_tokens"] == 40
    assert report["versions"].keys() == {"posttrain", "python", "torch", "transformers"}
    assert report["config"]["custom_reward_function"]["name"] == "even_share" and "even_share" in report["reward"]
    entry = report["results"]["math_reasoning"]["metrics"]["reward"]
    assert entry["low"] <= entry["value"] <= entry["high"] and entry["interval"] == "bootstrap"
    assert report["data"]["rows"] == 12 and report["data"]["dropped"] == 0
    rows = load_rows(tmp_path / "out" / "samples" / "step_0.parquet").rows
    assert len(rows) == 24 and [row["sample"] for row in rows[:4]] == [0, 1, 0, 1]
    assert rows[0]["prompt"].startswith("<|user|>") and len(rows[0]["response_ids"]) == len(rows[0]["response_mask"])
    by_prompt = [sum(row["score"] for row in rows if row["uid"] == f"eval-{i}") / 2 for i in range(12)]
    assert report["prompts"]["reward"] == pytest.approx(by_prompt)


def test_samples_have_the_columns_of_a_runs_samples(evaluate, tiny_model, sums, tmp_path):
    result = run(tiny_model, sums, tmp_path / "runs", trainer__total_training_steps=1)
    evaluate("out", "--max-tokens", "6")
    theirs = pq.read_schema(result.path / "samples" / "step_1.parquet")
    ours = pq.read_schema(tmp_path / "out" / "samples" / "step_0.parquet")
    only_in_training = {"rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "entropy"}
    only_in_training |= {"new_log_probs"}
    only_in_training |= {"advantage", "mismatch"}  # made of those
    assert set(theirs.names) - only_in_training == set(ours.names)
    assert all(ours.field(name).type == theirs.field(name).type for name in ours.names)


def test_an_interrupted_evaluation_goes_on_and_ends_with_the_same_numbers(
    evaluate, tiny_model, sums, tmp_path, monkeypatch
):
    straight = evaluate("straight", "--n", "2", "--max-tokens", "6")
    plain, seen = parts_module.Parts.add, []

    def stop(self, answers):
        plain(self, answers)
        seen.append(answers)
        if len(seen) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(parts_module.Parts, "add", stop)
    command = ["eval", str(tiny_model), "--data", str(sums["test"]), "--out", str(tmp_path / "cut"), *EVEN]
    command += ["--n", "2", "--max-tokens", "6"]
    assert cli.main(command) == 130
    assert not (tmp_path / "cut" / "report.json").exists()
    assert cli.main(command) == 0 and len(seen) == 12
    again = read_report(tmp_path / "cut")
    assert again["results"] == straight["results"] and again["prompts"] == straight["prompts"]
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {"report.json", "samples"}


RESPONSES = [
    {"prompt": "1 + 1 = ?", "ground_truth": "2", "data_source": "math_reasoning", "responses": ["2", "3"]},
    {"prompt": "Who?", "reward_model": {"ground_truth": "Ann"}, "data_source": "nq_open", "responses": ["Ann", "Ann"]},
    {
        "prompt": "Add.",
        "ground_truth": json.dumps({"test_list": ["assert add(1, 2) == 3"]}),
        "data_source": "mbpp",
        "responses": [
            "```python\ndef add(a, b):\n    return a + b\n```",
            "```python\ndef add(a, b):\n    return 0\n```",
        ],
    },
]


def test_responses_of_several_sources_are_scored_by_their_own_scorers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed.json").write_text(json.dumps(RESPONSES))
    settings = ["reward.num_workers=1", "reward.sandbox.mode=unsafe"]
    assert cli.main(["eval", "--responses", "mixed.json", *settings]) == 0
    report = read_report(tmp_path / "outputs" / "eval" / "mixed")
    assert [values(report, name)["accuracy"] for name in ("math_reasoning", "nq_open", "mbpp")] == [0.5, 1.0, 0.5]
    assert values(report, "all") == {"reward": 2 / 3, "accuracy": 2 / 3, "pass@2": 1.0, "maj@2": 2 / 3}
    assert cli.main(["eval", "--responses", "mixed.json", *settings]) == 0
    assert (tmp_path / "outputs" / "eval" / "mixed-2" / "report.json").is_file()
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["main_eval", "data.path=mixed.json", "data.response_key=responses", *settings])
    assert entry(main_eval.main) == 0
    assert (
        "{'test_score/math_reasoning': 0.5, 'test_score/nq_open': 1.0, 'test_score/mbpp': 0.5"
        in capsys.readouterr().out
    )


def test_verls_column_names_are_read(tmp_path, monkeypatch, capsys):
    rows = [{"q": "1 + 1", "where": "gsm8k", "truth": {"ground_truth": "2"}, "said": ["#### 2", "#### 3"]}]
    (tmp_path / "own.json").write_text(json.dumps(rows))
    keys = {"path": tmp_path / "own.json", "prompt_key": "q", "response_key": "said", "data_source_key": "where"}
    args = [f"data.{key}={value}" for key, value in (keys | {"reward_model_key": "truth"}).items()]
    monkeypatch.setattr(sys, "argv", ["main_eval", *args, "reward.num_workers=1"])
    assert entry(main_eval.main) == 0
    assert "{'test_score/gsm8k': 0.5}" in capsys.readouterr().out


def test_a_reward_that_does_not_say_what_it_read_still_has_majorities(tmp_path, capsys):
    """As the default reward file, which gives a number alone: answers are read as they usually stand."""
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    (tmp_path / "plain.py").write_text(f"{head}    return float(ground_truth in solution_str)\n")
    said = ["so it is 2", "the answer is 2", "I think 3", "2"]
    (tmp_path / "r.json").write_text(json.dumps([{**RESPONSES[0], "responses": said}]))
    command = ["eval", "--responses", str(tmp_path / "r.json"), "--reward-func", str(tmp_path / "plain.py")]
    assert cli.main([*command, "--out", str(tmp_path / "out"), "reward.num_workers=1"]) == 0
    found = read_report(tmp_path / "out")["results"]["math_reasoning"]
    assert found["metrics"]["maj@4"]["value"] == 1.0 and found["without_answer"] == 0.0
    assert "without an answer 0.0%" in capsys.readouterr().out


def test_validation_has_majorities_for_a_reward_that_gives_a_number_alone(tiny_model, sums, tmp_path):
    def digits(solution_str, ground_truth):
        return 1.0

    val = {"n": 2, "do_sample": True, "temperature": 1.0}
    more = {f"actor_rollout_ref__rollout__val_kwargs__{name}": value for name, value in val.items()}
    rows = [{"prompt": "which of these?", "ground_truth": "a", "data_source": "qa"}]  # the response is the answer
    (tmp_path / "val.json").write_text(json.dumps(rows))
    more |= {"data__val_files": str(tmp_path / "val.json"), "trainer__val_only": True}
    (_, found) = run(tiny_model, sums, tmp_path, reward=digits, **more).validation[0]
    assert found["val/qa/maj@2"] == 1.0


def test_where_no_answer_can_be_read_nothing_is_said_about_answers(tmp_path, capsys):
    (tmp_path / "words.json").write_text(json.dumps([{**RESPONSES[0], "responses": ["a long story", "another one"]}]))
    (tmp_path / "plain.py").write_text("def compute_score(solution_str, ground_truth):\n    return 1.0\n")
    command = ["eval", "--responses", str(tmp_path / "words.json"), "--reward-func", str(tmp_path / "plain.py")]
    assert cli.main([*command, "--out", str(tmp_path / "out"), "reward.num_workers=1"]) == 0
    found = read_report(tmp_path / "out")["results"]["math_reasoning"]
    assert found["without_answer"] is None and not any(name.startswith("maj@") for name in found["metrics"])
    assert "without an answer" not in capsys.readouterr().out


def failing(tmp_path: Path, condition: str) -> list[str]:
    """`posttrain eval` over the two responses of RESPONSES[0], by a reward that fails under a condition."""
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    (tmp_path / "bad.py").write_text(f"{head}    if {condition}: 1/0\n    return 1.0\n")
    (tmp_path / "r.json").write_text(json.dumps(RESPONSES[:1]))
    command = ["eval", "--responses", str(tmp_path / "r.json"), "--reward-func", str(tmp_path / "bad.py")]
    return [*command, "--out", str(tmp_path / "out"), "reward.num_workers=1"]


def test_a_failing_reward_is_counted_and_said(tmp_path, capsys):
    first = RESPONSES[0]["responses"][0]
    assert cli.main(failing(tmp_path, f"solution_str == {first!r}")) == 0
    assert "! 1 scores failed" in capsys.readouterr().out
    assert read_report(tmp_path / "out")["results"]["math_reasoning"]["reward_failures"] == 1


def test_a_reward_that_always_fails_makes_no_report(tmp_path, capsys):
    assert cli.main(failing(tmp_path, "True")) == 2
    said = capsys.readouterr().err
    assert "failed on all 2 responses" in said and "ZeroDivisionError" in said and "reward try" in said
    assert not (tmp_path / "out").exists()


def report_of(rows: dict[str, tuple[str, float]], **settings) -> dict:
    return {
        "settings": settings,
        "model": "m",
        "prompts": {
            "key": list(rows),
            "data_source": [source for source, _ in rows.values()],
            "n": [1] * len(rows),
            "accuracy": [value for _, value in rows.values()],
        },
    }


def test_two_reports_are_compared_prompt_by_prompt_whatever_their_order():
    first = report_of({"a": ("x", 0.0), "b": ("x", 0.0), "c": ("y", 1.0), "d": ("y", 0.5)}, seed=1, n=1)
    second = report_of(
        {"d": ("y", 0.5), "c": ("y", 0.0), "b": ("x", 1.0), "a": ("x", 1.0), "e": ("y", 1.0)}, seed=2, n=1
    )
    found = {entry["data_source"]: entry for entry in compare(first, second)}
    assert found["x"]["difference"] == 1.0 and (found["x"]["better"], found["x"]["worse"]) == (2, 0)
    assert found["x"]["p"] == 0.5 and (found["x"]["low"], found["x"]["high"]) == (1.0, 1.0)
    assert found["y"]["difference"] == -0.5 and found["all"]["prompts"] == 4
    assert found["all"]["difference"] == 0.25 and found["all"]["low"] < 0.25 < found["all"]["high"]
    said = " ".join(notes(first, second))
    assert "compared are the 4 prompts that both hold; 0 are only in the first, 1 only in the second" in said
    assert "seed differs: 1; 2" in said and "n differs" not in said


def test_compare_prints_a_table_and_refuses_what_cannot_be_compared(evaluate, tmp_path, capsys):
    evaluate("one", "--max-tokens", "6")
    evaluate("two", "--max-tokens", "6", "--temperature", "1")
    capsys.readouterr()
    assert cli.main(["eval", "compare", str(tmp_path / "one"), str(tmp_path / "two" / "report.json")]) == 0
    shown = capsys.readouterr().out
    assert "temperature differs: 0.0; 1.0" in shown and "second - first" in shown and "/ 12" in shown
    (tmp_path / "r.json").write_text(json.dumps(RESPONSES[:1]))
    settings = ["--out", str(tmp_path / "three"), "reward.num_workers=1"]
    assert cli.main(["eval", "--responses", str(tmp_path / "r.json"), *settings]) == 0
    assert cli.main(["eval", "compare", str(tmp_path / "one"), str(tmp_path / "three")]) == 2
    assert "share no prompt" in capsys.readouterr().err
    assert cli.main(["eval", "compare", str(tmp_path / "one"), str(tmp_path / "r.json")]) == 2
    assert "is no report" in capsys.readouterr().err
    assert cli.main(["eval", "compare", str(tmp_path / "one"), str(tmp_path / "gone")]) == 2
    assert f"There is no report {tmp_path / 'gone'}." in (said := capsys.readouterr().err) and "Errno" not in said


WRONG = {
    "no scorer": (["{model}", "--data", "{data}"], "no built-in scorer"),
    "no reward file": (["{model}", "--data", "{data}", "--reward-func", "none.py"], "none.py"),
    "existing report": (["{model}", "--data", "{data}", "--out", "{folder}"], "holds an evaluation"),
    "no responses": (["--responses", "{data}"], "has no responses in its column 'response'"),
    "idle key": (["--responses", "{data}", "actor_rollout_ref.rollout.top_p=0.5"], "has no effect here"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_answered_before_weights_are_loaded(case, tiny_model, tmp_path, monkeypatch, capsys):
    from posttrain.commands.generation import session as models

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load_causal_lm", lambda *args, **named: pytest.fail("weights were loaded"))
    (tmp_path / "data.json").write_text('[{"prompt": "a", "ground_truth": "b", "data_source": "zebra"}]')
    (tmp_path / "report.json").write_text("{}")
    places = {"model": tiny_model, "data": tmp_path / "data.json", "folder": tmp_path}
    given, message = WRONG[case]
    assert cli.main(["eval", *(word.format(**places) for word in given)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give a MODEL with --data, or --responses"),
        (["m", "--responses", "x.json"], "one of the two"),
        (["m"], "--data is missing"),
        (["--responses", "x.json", "--n", "2"], "--n has no effect with --responses"),
    ],
)
def test_a_command_line_that_says_too_much_or_too_little(args, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", *args])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_file_of_responses_without_a_list_is_grouped_by_its_prompt(tmp_path):
    from posttrain.commands.evaluation.evaluate import answered_prompts
    from posttrain.config.trainer import DataConfig

    rows = [{"prompt": "a", "response": "1", "ground_truth": "1"}, {"prompt": "b", "response": "2"}]
    rows.append({"prompt": "a", "response": "3", "ground_truth": "1"})
    (tmp_path / "r.json").write_text(json.dumps(rows))
    found = answered_prompts(load_rows(tmp_path / "r.json"), DataConfig())
    assert [(one.responses, one.fields.ground_truth) for one in found] == [(["1", "3"], "1"), (["2"], None)]

"""`posttrain runs`, `samples` and `plot` show run directories as they are, and say what is missing."""

from __future__ import annotations

import pytest

from posttrain.cli import main
from posttrain.tracking.loggers import JsonlLogger
from posttrain.tracking.rundir import RunDirectory, read_before, write_before
from posttrain.tracking.samples import write_samples
from posttrain.tracking.status import write_status

METRIC = "val/sums/mean@1"


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """Two runs below outputs/: one with validation, samples of steps 1 and 3 and an end, one with a loss alone."""
    monkeypatch.chdir(tmp_path)
    for name, metric, values in (("grpo-1", METRIC, [0.25, 0.5, 0.75]), ("sft-1", "train/loss", [2.0, 1.5, 1.25])):
        with RunDirectory("outputs", "project", name) as run:
            run.write_config({})
            logger = JsonlLogger(run.metrics)
            for step, value in enumerate(values, start=1):
                logger.log(step, {metric: value, "perf/throughput": 10.0})
            logger.close()
            write_status(run.path, "finished", 3, 3)
            if name == "grpo-1":
                for step in (1, 3):
                    write_samples(run.samples, step, batch(step))
    return tmp_path / "outputs"


def batch(step: int) -> dict:
    ids = [[1, 2], [1, 3], [4, 5]]
    return {
        "responses": ids,
        "response_mask": [[1, 1]] * 3,
        "token_level_scores": [[0.0, 0.0], [0.0, 1.0], [0.0, 0.5]],
        "uid": ["a", "a", "b"],
        "prompt": ["first?", "first?", "second?"],
        "ground_truth": ["42", "42", None],
        "response": [f"wrong at {step}", f"right at {step}\x1b[31m", "half"],
        "reward_error": [None, None, "ValueError: no"],
    }


def test_runs_lists_every_run_with_its_status_and_what_it_reached(outputs, capsys):
    assert main(["runs"]) == 0
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == ["run", "status", "step", "reached", "written"]
    assert first.split()[:5] == ["project/grpo-1", "finished", "3/3", METRIC, "0.750"]
    assert second.split()[:5] == ["project/sft-1", "finished", "3/3", "train/loss", "1.250"]
    assert main(["runs", "elsewhere"]) == 2 and "There is no folder elsewhere/" in capsys.readouterr().err
    (outputs.parent / "elsewhere").mkdir()
    assert main(["runs", "elsewhere"]) == 2 and "There is no run in elsewhere/" in capsys.readouterr().err


def test_runs_names_a_run_that_has_not_begun_to_train(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunDirectory("outputs", "embedded", "grpo-1"):
        assert main(["runs"]) == 2
    said = capsys.readouterr().err
    assert "No run in outputs/ has made a step." in said and "outputs/embedded/grpo-1 (logs/run.log)." in said


def test_samples_shows_the_newest_or_the_asked_step_best_first_and_steers_no_terminal(outputs, capsys):
    assert main(["samples", "grpo-1"]) == 0
    shown = capsys.readouterr().out
    assert (
        shown.index("first?")
        < shown.index("reference answer: 42")
        < shown.index("1 │ right at 3")
        < shown.index("wrong at 3")
    )
    assert "\x1b" not in shown and "! ValueError: no" in shown
    assert main(["samples", "project/grpo-1", "--step", "1", "--count", "1"]) == 0
    shown = capsys.readouterr().out
    assert "right at 1" in shown and "second?" not in shown
    assert main(["samples", "grpo-1", "--step", "2"]) == 2
    assert "no samples of step 2" in (said := capsys.readouterr().err) and "nearest: 1, 3" in said
    assert main(["samples", "sft-1"]) == 2 and "holds no samples: the run has made no step" in capsys.readouterr().err
    for freq, why in (
        (10, "samples_freq=10 keeps those of every 10 steps, and it is at step 3; tracking.samples_freq=1 keeps all."),
        (0, "keeps none"),
    ):
        with RunDirectory("outputs", "project", "sft-1") as run:
            run.write_config({"tracking": {"samples_freq": freq}})
        assert main(["samples", "sft-1"]) == 2 and why in capsys.readouterr().err
    (outputs / "empty").mkdir()
    assert (
        main(["samples", "outputs/empty"]) == 2 and "The folder outputs/empty holds no run." in capsys.readouterr().err
    )
    assert main(["samples", "grpo-7"]) == 2
    assert "There is no run `grpo-7`" in (said := capsys.readouterr().err) and "outputs/project/grpo-1" in said


def test_plot_draws_what_a_run_is_judged_by_or_the_asked_metric(outputs, capsys):
    assert main(["plot", "grpo-1"]) == 0
    assert f"grpo-1: {METRIC}, 0.75 at step 3" in capsys.readouterr().out
    assert main(["plot", "grpo-1", "sft-1", "--metric", "perf/throughput", "--svg", "both.svg"]) == 0
    shown = capsys.readouterr().out
    assert "grpo-1: perf/throughput" in shown and "sft-1: perf/throughput" in shown
    assert "sft-1" in (outputs.parent / "both.svg").read_text()
    assert main(["plot", "grpo-1", "sft-1"]) == 2
    assert f"sft-1 has no metric `{METRIC}`. It has: perf/throughput, train/loss" in capsys.readouterr().err


def test_the_first_word_of_a_metric_is_answered_with_those_that_begin_with_it(outputs, capsys):
    assert main(["plot", "grpo-1", "--metric", "val"]) == 2
    assert f"has no metric `val`. Did you mean `{METRIC}`? It has" in capsys.readouterr().err


def test_a_mistyped_metric_is_answered_with_the_nearest(outputs, capsys):
    assert main(["plot", "grpo-1", "--metric", "val/sums/mean@2"]) == 2
    assert f"Did you mean `{METRIC}`? It has: " in capsys.readouterr().err
    assert main(["plot", "grpo-1", "--metric", "zzz"]) == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_curves_of_several_runs_have_one_scale(outputs, capsys):
    with RunDirectory("outputs", "project", "grpo-2") as run:
        logger = JsonlLogger(run.metrics)
        logger.log(1, {"reward_mean": 100.0})
        logger.log(2, {"reward_mean": 300.0})
        logger.close()
    with RunDirectory("outputs", "project", "grpo-3") as run:
        logger = JsonlLogger(run.metrics)
        logger.log(1, {"reward_mean": 900.0})
        logger.log(2, {"reward_mean": 500.0})
        logger.close()
    assert main(["plot", "grpo-2", "grpo-3"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows if "┤" in row] == ["900", "500", "100"] * 2


def test_what_a_model_answered_at_first_is_kept_and_damage_is_no_error(tmp_path):
    samples = [{"prompt": "1 + 1", "response": "\ud800", "score": 0.0}]
    write_before(tmp_path, 0, samples)
    assert read_before(tmp_path) == (0, samples)
    for damage in ("[]", "{", '{"step": 0, "samples": [{}]}'):
        (tmp_path / "before.json").write_text(damage)
        assert read_before(tmp_path) is None

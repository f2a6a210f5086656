"""`posttrain bench algorithms`: what it trains, what it keeps, how it goes on, and what it shows."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from posttrain import cli
from posttrain.bench import algorithms
from posttrain.bench.algorithms import (
    BEGIN,
    COMMON,
    END,
    TUNED,
    Algorithm,
    Process,
    Run,
    all_algorithms,
    as_text,
    between,
    fill_page,
    gains,
    markdown,
    without_folders,
)
from posttrain.bench.output import mean_curve, write_panels
from posttrain.bench.systems import choose
from posttrain.config import load_config
from posttrain.config.choices import ESTIMATORS, POLICY_LOSSES, PRESETS
from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files
from posttrain.errors import UserError
from posttrain.kernels import compiled
from posttrain.models.embedded import write_model
from posttrain.trainer.embedded import embedded_folder

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
SESSION = {
    "command": "posttrain bench algorithms",
    "date": "2026-01-01T00:00:00",
    "cpu": "a CPU",
    "cores": 2,
}
SESSION |= {"jobs": 1, "threads": 2, "python": "3.11", "packages": {"torch": "2.13"}}


def made(name: str, seed: int, *accuracies: float, step_s: float = 0.5) -> dict:
    """A run as the file keeps it: an accuracy every ten steps."""
    steps = 10 * (len(accuracies) - 1)
    run = Run(choose(all_algorithms(), name)[0], seed, steps)
    return {**run.identity, "curve": [[10 * i, a] for i, a in enumerate(accuracies)], "step_s": step_s, "session": 0}


def test_every_preset_estimator_and_loss_is_trained_once_and_its_settings_select_it():
    chosen = {row.name: load_config([*COMMON, *row.settings]) for row in all_algorithms()}
    assert len(chosen) == len(all_algorithms())
    assert {config.value("algorithm.adv_estimator") for config in chosen.values()} == set(ESTIMATORS)
    assert {config.value(LOSS) for config in chosen.values()} == set(POLICY_LOSSES)
    assert {f"algorithm/{name}" for name in chosen} >= {name for name in PRESETS if name.startswith("algorithm/")}
    for row in all_algorithms():
        if row.kind == "loss":
            assert chosen[row.name].value(LOSS) == row.name.removesuffix("_loss")
    assert all(config.value("actor_rollout_ref.rollout.n") == 5 for config in chosen.values())


def test_settings_beside_a_preset_have_a_reason_and_change_something():
    assert set(TUNED) <= {row.name for row in all_algorithms()}
    for row in all_algorithms():
        settings, why = row.tuned
        assert bool(settings) == bool(why)
        plain = load_config([*COMMON, *row.chosen]).values()
        for setting in settings:
            assert load_config([*COMMON, *row.chosen, setting]).values() != plain, setting


def test_only_names_known_algorithms():
    assert [row.name for row in choose(all_algorithms(), "gspo, ppo,grpo")] == ["grpo", "gspo", "ppo"]
    with pytest.raises(UserError, match=r"--only names dpo; known: cispo, dapo"):
        choose(all_algorithms(), "dpo,grpo")
    with pytest.raises(UserError, match="--only names nothing"):
        choose(all_algorithms(), " ,")


@pytest.fixture
def tiny_task(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded task with an untrained model, in the test's own cache."""
    monkeypatch.setenv("POSTTRAIN_COMPILE", "0")  # the kernels would be compiled into it
    monkeypatch.setattr(compiled, "_functions", lambda: None)  # this process must not remember that
    folder = embedded_folder()
    write_files(folder, arithmetic_rows(max_operand=30, val_size=20))
    write_model(folder / "model", hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2)


@pytest.mark.slow
def test_runs_are_made_kept_and_not_made_again(tiny_task, tmp_path: Path, capsys, monkeypatch, forked):
    monkeypatch.setattr(sys, "executable", forked.python)
    file, picture = tmp_path / "algorithms.json", tmp_path / "algorithms.svg"
    size = ("--steps", "2", "--seeds", "1", "--threads", "1", "--json", str(file))
    command = ["bench", "algorithms", "--only", "rloo", *size, "--svg", str(picture)]
    assert cli.main(command) == 0
    shown = capsys.readouterr()
    assert re.search(r"^rloo +preset +0\.\d+ +0\.\d+ +[+-]0\.\d+", shown.out, re.M)
    assert "rloo seed 1: " in shown.err and "1 of 1 runs" in shown.err
    kept = json.loads(file.read_text())
    (run,) = kept["runs"]
    assert (run["algorithm"], run["seed"], run["steps"], run["settings"]) == ("rloo", 1, 2, ["algorithm=rloo"])
    assert [step for step, _ in run["curve"]] == [0, 2] and run["step_s"] > 0
    assert kept["sessions"][run["session"]]["packages"]["torch"] and picture.read_text().startswith("<svg")

    monkeypatch.setattr(algorithms, "Process", None)  # a run would fail
    assert cli.main(command) == 0 and json.loads(file.read_text()) == kept
    # Another setting is another run, which fails here before it starts anything heavy.
    monkeypatch.setattr(algorithms, "Process", Process)
    monkeypatch.setitem(TUNED, "rloo", (("actor_rollout_ref.rollout.n=1",), "a wrong one"))
    assert cli.main(command) == 1
    shown = capsys.readouterr()
    assert "rloo seed 1 failed: status 2: " in shown.out and "algorithms-rloo-1.log" in shown.out


def test_a_stopped_bench_leaves_no_process(tmp_path: Path, tiny_task, monkeypatch):
    started = []

    class Watched(Process):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            started.append(self)

        def steps_done(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(algorithms, "Process", Watched)
    assert cli.main(["bench", "algorithms", "--only", "grpo", "--threads", "1"]) == 130
    (process,) = started
    assert process.process.returncode is not None


def test_the_row_of_an_algorithm_is_the_mean_over_its_seeds_with_the_extremes():
    runs = [made("grpo", 1, 0.3, 0.5, 0.7, step_s=0.5), made("grpo", 2, 0.4, 0.4, 0.5, step_s=0.25)]
    short = made("grpo", 3, 0.3, 0.9)  # of another length
    row, empty = gains(choose(all_algorithms(), "grpo,ppo"), {"steps": 20, "runs": [*runs, short]})
    assert row.cells() == ["0.350", "0.600", "+0.250", "+0.100", "+0.400", "2", "2.67"]
    assert empty.cells() == ["-", "-", "-", "-", "-", "0", "-"]
    assert mean_curve(row.curves) == [[0, 0.35], [10, 0.45], [20, 0.6]]


def test_a_page_is_filled_between_its_markers_and_the_rest_stays(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    record = {"steps": 10, "sessions": [SESSION], "runs": [made("ppo", 1, 0.3, 0.5)]}
    found = gains(choose(all_algorithms(), "ppo,gspo"), record)
    for _ in range(2):
        fill_page(page, markdown(found, record))
        text = page.read_text()
        assert text.startswith("above\n") and text.endswith("\nbelow\n") and "old" not in text
    assert "| ppo | preset | 0.300 | 0.500 | +0.200 | +0.200 | +0.200 | 1 | 2.00 |" in between(text)
    assert "| gspo | preset | - |" in text and "`critic.optim.lr=1e-3`" in text and "torch 2.13" in text
    assert "`posttrain bench algorithms`, 2026-01-01: a CPU" in text
    (tmp_path / "other.md").write_text("nothing\n")
    with pytest.raises(UserError, match=r"other.md: not a page with the lines"):
        fill_page(tmp_path / "other.md", "x")


def test_the_picture_has_a_panel_per_algorithm_and_a_line_per_seed(tmp_path: Path):
    runs = [made("grpo", 1, 0.3, 0.7), made("grpo", 2, 0.4, 0.5), made("ppo", 1, 0.3, 0.5)]
    found = gains(choose(all_algorithms(), "grpo,ppo"), {"steps": 10, "runs": runs})
    write_panels(tmp_path / "a.svg", {gain.algorithm.name: gain.curves for gain in found}, "Title")
    text = (tmp_path / "a.svg").read_text()
    assert text.count("<path") == 3 + 2 and all(f">{name}</text>" in text for name in ("grpo", "ppo", "Title"))


def test_the_command_is_kept_without_folders_of_this_machine():
    given = "posttrain bench algorithms --json /some/where/a.json --svg docs/a.svg"
    assert without_folders(given) == "posttrain bench algorithms --json a.json --svg docs/a.svg"


def test_the_file_has_a_line_per_run_and_reads_back():
    record = {"steps": 10, "sessions": [SESSION], "runs": [made("ppo", seed, 0.3, 0.5) for seed in (1, 2)]}
    assert json.loads(as_text(record)) == record and len(as_text(record).splitlines()) == 10


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--from", "nowhere.json"), "nowhere.json: not a file that `posttrain bench algorithms --json` wrote"),
        (("--json", "/no/such/folder/x.json"), "its folder must exist"),
        (("--markdown", "nowhere.md"), "nowhere.md: not a page with the lines"),
        (("--only", "dpo"), "--only names dpo"),
    ],
)
def test_wrong_options_are_answered_before_anything_is_trained(args, words, capsys):
    assert cli.main(["bench", "algorithms", *args]) == 2
    assert words in capsys.readouterr().err


def test_an_entry_without_tuning_has_only_what_selects_it():
    assert Algorithm("grpo", "preset", ("algorithm=grpo",)).settings == ("algorithm=grpo",)


def test_a_file_without_runs_is_said_to_be_one(tmp_path: Path, capsys):
    file = tmp_path / "none.json"
    file.write_text('{"steps": 0, "sessions": [], "runs": []}')
    assert cli.main(["bench", "algorithms", "--from", str(file)]) == 1
    assert f"{file}: there are no runs in it" in capsys.readouterr().out

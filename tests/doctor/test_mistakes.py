"""The doctor finds what users do wrong, and nothing on runs that are right."""

from __future__ import annotations

import json

import pytest

from posttrain.cli import main
from posttrain.doctor.case import ERROR, WARNING
from posttrain.doctor.command import examine
from tests.doctor import mistakes, sound_runs
from tests.doctor.desk import Desk

QUICK = ["configuration", "tools", "data", "template", "batch", "resources"]
"""What costs no worker process and no pass over the model."""
AREAS = {"reward": ["data", "reward"], "resources": ["data", "batch", "memory", "resources"]}
CASES = [(area, mistake) for area, found in mistakes.ALL.items() for mistake in found]


@pytest.fixture
def desk(tmp_path, tiny_model):
    return Desk(tmp_path / "desk", tiny_model)


def look(desk: Desk, areas: list[str] | None, monkeypatch: pytest.MonkeyPatch | None = None) -> list[str]:
    """Errors and warnings as texts."""
    if monkeypatch and "time.sleep" in (desk.reward or ""):  # its time is known after a few calls
        monkeypatch.setattr("posttrain.doctor.reward.PATIENCE_S", 4.0)
    if areas is not None and desk.program == "train" and desk.reward is None:
        areas = [*areas, "reward"]  # built-in scorers need no worker
    args = desk.lay()
    program = [] if desk.program == "train" else [desk.program]
    report = examine([*program, *args], areas)
    return [str(finding) for finding in report.findings if finding.level in (ERROR, WARNING)]


@pytest.mark.parametrize(("area", "mistake"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_mistake_is_found_and_named(desk, monkeypatch, area, mistake):
    mistake.make(desk, monkeypatch)
    found = look(desk, AREAS.get(area, QUICK), monkeypatch)
    assert any(all(word.lower() in text.lower() for word in mistake.words) for text in found), found


def test_what_is_missing_is_named_once_and_what_it_kept_from_being_looked_at_is_said(desk):
    desk.settings |= {"data.train_files": "nowhere.json", "data.val_files": "nowhere.json"}
    desk.settings |= {"actor_rollout_ref.model.path": "/no/such/model", "custom_reward_function.path": "no_reward.py"}
    report = examine(desk.lay())
    named = [finding.what for finding in report.findings if finding.level == ERROR]
    for key in ("data.train_files", "data.val_files", "actor_rollout_ref.model.path", "custom_reward_function.path"):
        assert [what for what in named if f"`{key}`" in what] and len(named) == 4, named
    assert report.facts["data"] == ["Not looked at, as nowhere.json does not exist."]
    assert report.facts["template"] == ["Not looked at, as /no/such/model does not exist."]


def test_what_is_wrong_in_several_areas_is_said_once_without_advice_that_is_refused(desk, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    desk.settings["trainer.device"] = "cuda"
    said = [text for text in look(desk, [*QUICK, "memory", "time"]) if "GPU" in text]
    assert len(said) == 2 and "shows no GPU" in said[0] and "posttrain plan --gpu_gb" in said[1], said


def renamed(desk: Desk, column: str, to: str) -> None:
    for rows in (desk.train, desk.val):
        for row in rows:
            row[to] = row.pop(column)


def test_rows_without_a_prompt_are_told_of_and_not_taken_for_the_same_row_again_and_again(desk):
    renamed(desk, "prompt", "question")
    assert len(said := look(desk, QUICK)) == 2 and all("column 'prompt'" in text for text in said), said


@pytest.mark.parametrize("program", ["train", "sft"])
def test_conversations_of_sharegpt_come_with_what_to_do(desk, program):
    if program == "sft":
        sound_runs.ALL["sft on prompts with responses"](desk)
    renamed(desk, "prompt", "conversations")
    for row in (*desk.train, *desk.val):
        row["conversations"] = [{"from": "human", "value": row["conversations"]}]
    first = look(desk, ["data"])[0]
    key = "data.multiturn.messages_key" if program == "sft" else "data.prompt_key"
    assert "'from' to 'role'" in first and "'value' to 'content'" in first and f"{key}=conversations" in first


def test_a_template_that_fails_on_any_prompt_is_one_error_of_the_template(desk):
    desk.template = "{{ raise_exception('no') }}"
    (said,) = {text.split("row 1")[0] for text in look(desk, QUICK)}
    assert said.startswith("error, template: The chat template refused the prompt of ")


def test_a_missing_file_of_the_weights_is_one_error_however_many_checks_stumble_over_it(desk):
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    desk.spoil.append(lambda desk: (desk.model / "model.safetensors.index.json").write_text(json.dumps(index)))
    report = examine(desk.lay(), [*QUICK, "memory"])
    (error,) = [finding.what for finding in report.findings if finding.level == ERROR]
    assert "model-00002-of-00002.safetensors" in error
    assert any("names files that are not there" in fact for fact in report.facts["template"])


@pytest.mark.parametrize("name", sound_runs.ALL)
def test_nothing_is_invented_on_a_sound_run(desk, monkeypatch, name):
    sound_runs.ALL[name](desk)
    assert look(desk, None, monkeypatch) == []


def test_the_command_prints_a_report_that_scripts_can_read_and_its_status_tells_the_worst(desk, capsys):
    desk.settings["actor_rollout_ref.actor.optim.lr"] = 0.01
    args = desk.lay()
    assert main(["doctor", "--json", *args]) == 1
    report = json.loads(capsys.readouterr().out)
    (found,) = [finding for finding in report["findings"] if finding["level"] != "note"]
    assert found["area"] == "configuration" and "optim.lr=0.01" in found["what"] and found["where"] and found["do"]
    assert report["exit_status"] == 1 and any(
        "8 prompts per step, each answered 4 times" in f for f in report["facts"]["batch"]
    )
    assert main(["doctor", *args, "data.train_bath_size=8"]) == 2
    shown = capsys.readouterr().out
    assert "1 error: the run would not work." in shown and "what to do: did you mean `data.train_batch_size`?" in shown


@pytest.mark.parametrize("program", ["train", "sft"])
def test_a_dry_run_of_a_training_command_reports_and_writes_nothing(desk, capsys, program):
    if program == "sft":
        sound_runs.ALL["sft on prompts with responses"](desk)
    args = [program, *desk.lay(), "trainer.dry_run=true"]
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert "No problem was found." in shown and "steps per epoch" in shown
    assert not (desk.folder / "outputs").exists()

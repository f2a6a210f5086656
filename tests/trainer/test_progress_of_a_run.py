"""Inside a step a run says how far it is: to the row on the terminal, and to status.json."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime

import pytest
from runs import run

from posttrain import pulse
from posttrain.explain import metric_text
from posttrain.tracking import status
from posttrain.tracking.status import run_state, write_status
from posttrain.trainer.fsdp_sft_trainer import run_sft
from posttrain.trainer.run.writer import RunWriter


@pytest.fixture
def seen(monkeypatch):
    """status.json at every count of a run, written at once instead of every two seconds."""
    found: list[dict] = []
    writers: list[RunWriter] = []
    start, advance = RunWriter.start, pulse.Work.advance

    def started(self, step):
        writers.append(self)
        start(self, step)

    def advanced(self, *counts, **more):
        advance(self, *counts, **more)
        if writers:
            writers[-1]._refresh_status()
            found.append(json.loads((writers[-1].run.path / "status.json").read_text()))

    monkeypatch.setattr(RunWriter, "start", started)
    monkeypatch.setattr(pulse.Work, "advance", advanced)
    return found


def is_explained(name: str) -> bool:
    return metric_text(name) is not None


def last_of(seen: list[dict], step: int) -> dict[str, tuple[str, int, int]]:
    """By stage of the step that followed `step`: what was counted, how much of how much."""
    return {one["stage"]: (one["unit"], one["done"], one["of"]) for one in seen if one["step"] == step}


def test_every_long_stage_of_an_rl_run_counts_to_its_end(tiny_model, sums, tmp_path, seen):
    result = run(
        tiny_model,
        sums,
        tmp_path,
        algorithm__adv_estimator="gae",
        actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__actor__ppo_epochs=2,
        actor_rollout_ref__actor__ppo_mini_batch_size=2,
        actor_rollout_ref__actor__old_log_probs="trainer",
        data__val_files=str(sums["test"]),
        data__val_batch_size=4,
        data__val_max_samples=9,
    )
    before = last_of(seen, 0)
    assert before["validation"] == ("responses", 9, 9)  # three batches, counted as one stretch
    assert before["check"][1] == before["check"][2]
    rows = ("rows", 12, 12)
    expected = {"gen": ("responses", 12, 12), "old_log_prob": rows, "ref": rows, "values": rows}
    expected |= {"update_critic": ("rows", 24, 24), "update_actor": ("rows", 24, 24)}
    assert {stage: before[stage] for stage in expected} == expected
    assert last_of(seen, 1)["gen"] == ("responses", 12, 12)
    generated = [one for one in seen if one["stage"] == "gen"]
    assert generated[-1]["tokens"] > 0 and generated[-1]["tokens_per_s"] > 0
    assert all((one["pid"], one["host"], one["status"]) == (os.getpid(), platform.node(), "running") for one in seen)
    times = [datetime.fromisoformat(one["time"]) for one in seen]
    assert times == sorted(times) and times[0].tzinfo == UTC
    unknown = {name for line in result.metrics for name in line if not is_explained(name)}
    assert not unknown, "give these a sentence in posttrain/explain/prose/families.md"
    assert str(result) == f"finished at step 2, val/math_reasoning/mean@1 0.000: {result.path}"
    final = status.read_status(result.path)
    assert (final["status"], final["step"], final["stage"]) == ("finished", 2, None)


def test_supervised_steps_count_too(tiny_model, tmp_path, seen):
    rows = [{"prompt": f"{n} + 1 = ?", "response": str(n + 1)} for n in range(8)]
    settings = {"model.path": str(tiny_model), "data.train_batch_size": 8, "trainer.total_training_steps": 1}
    settings |= {"trainer.default_local_dir": str(tmp_path), "trainer.device": "cpu", "trainer.export_hf": "none"}
    run_sft(settings, data=rows, val_data=rows[:3])
    assert last_of(seen, 0) == {"validation": ("rows", 3, 3), "update": ("rows", 8, 8)}


def test_a_run_whose_process_is_gone_was_killed(tmp_path, monkeypatch):
    write_status(tmp_path, "running", 3, 10)
    assert run_state(tmp_path) == "running"
    monkeypatch.setattr(status.os, "getpid", lambda: 2**22 + 1)  # above every pid there can be
    write_status(tmp_path, "running", 3, 10)
    assert run_state(tmp_path) == "killed"
    write_status(tmp_path, "finished", 10, 10)
    assert run_state(tmp_path) == "finished" and run_state(tmp_path / "nowhere") == "unknown"

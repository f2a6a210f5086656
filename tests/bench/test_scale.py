"""`posttrain bench scale`: which layouts it runs and how, and what its table shows of them."""

from __future__ import annotations

import json
import sys

import pytest

from posttrain import cli, cores
from posttrain.bench import scale
from posttrain.bench.scale import COMMON, Layout, layouts, medians, parts, table
from posttrain.config import load_config
from posttrain.config.trainer import one_process, rollout_workers_of, workers_of
from posttrain.trainer import main_ppo
from posttrain.trainer.run import process


def step(seconds: float, **stages: float) -> dict[str, float]:
    return {"step": 1, "timing_s/step": seconds, **{f"timing_s/{name}": value for name, value in stages.items()}}


def measured(*seconds: float, start_s: float = 3.0) -> dict:
    steps = [parts(step(value, gen=value / 2, update_actor=value / 4, sync=0.01)) for value in seconds]
    return {"start_s": start_s, "steps": steps}


def test_every_number_of_workers_is_colocated_and_separate_and_one_is_with_ray_and_without():
    found = [(row.name, row.training, row.generating, row.in_ray) for row in layouts([1, 2, 4])]
    assert found == [
        ("one process", 1, 0, False),
        ("in Ray", 1, 0, True),
        ("colocated", 2, 0, True),
        ("separate", 1, 1, True),
        ("colocated", 4, 0, True),
        ("separate", 2, 2, True),
    ]
    for row in layouts([1, 4]):
        config = load_config([*COMMON, *row.settings]).config
        assert (workers_of(config), rollout_workers_of(config)) == (row.training, row.generating)


def test_stages_and_the_rest_add_up_to_a_step_and_the_first_steps_do_not_count():
    found = parts(step(2.0, gen=0.5, reward=0.1, old_log_prob=0.2, ref=0.1, update_actor=0.6, sync=0.25))
    assert found["log-probs"] == pytest.approx(0.3) and found["other"] == pytest.approx(0.25)
    assert medians([measured(9.0, 9.0, 1.0, 2.0), measured(9.0, 9.0, 3.0, start_s=5.0)]) == pytest.approx(
        {"step": 2.0, "best": 1.0, "rollout": 1.0, "update": 0.5, "sync": 0.01, "other": 0.49, "start": 4.0}
        | {"reward": 0.0, "log-probs": 0.0}
    )
    assert medians([{"problem": "status 2"}]) == {}


def test_the_table_compares_with_one_process_and_marks_too_many_workers_and_failures():
    one, four, failed = layouts([4])
    shown = table({one: [measured(9, 9, 1)], four: [measured(9, 9, 3)], failed: [{"problem": "status 2: no"}]}, 2)
    lines = shown.splitlines()
    assert "1.00x" in lines[2] and "3.00x" in lines[3] and lines[3].endswith("more workers than the 2 cores")
    assert lines[4].startswith("separate") and "2 + 2" in lines[4] and lines[4].endswith("status 2: no")
    assert "more workers" not in table({one: [measured(9, 9, 1)], four: [measured(9, 9, 3)]}, None)  # of GPUs


def test_the_command_prints_the_table_and_writes_the_file(monkeypatch, tmp_path, capsys):
    made = []

    def run(row: Layout, options, place, shown) -> dict:
        made.append((row.name, options.settings))
        return measured(9, 9, 1) if row.name != "separate" else {"problem": "status 2: no"}

    monkeypatch.setattr(scale, "run", run)
    path = tmp_path / "scale.json"
    given = ["bench", "scale", "--workers", "2", "--repeat", "2", "--device", "cpu", "--json", str(path)]
    assert cli.main([*given, "data.train_batch_size=8"]) == 1
    assert [name for name, _ in made] == ["one process", "colocated", "separate"] * 2
    assert all(settings == ["data.train_batch_size=8"] for _, settings in made)
    assert "status 2: no" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [len(row["runs"]) for row in rows] == [2, 2, 2] and rows[1]["step"] == 1 and "step" not in rows[2]
    assert cli.main([*given[:2], "--steps", "2"]) == 2
    assert "--steps 2: the first 2 do not count" in capsys.readouterr().err


def test_a_run_is_given_ray_for_one_worker_and_more_workers_than_cores(monkeypatch):
    monkeypatch.setattr(process, "one_process", one_process)
    monkeypatch.setattr(cores, "usable", lambda: 2)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(main_ppo, "cli", lambda: 7)
    config = load_config(COMMON).config
    assert scale._train("1", "0", "a=b") == 7 and sys.argv[1:] == ["a=b"]
    assert process.one_process(config) and cores.usable() == 2
    scale._train("4", "1")
    assert not process.one_process(config) and cores.usable() == 4

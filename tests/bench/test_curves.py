"""scripts/smollm_curves.py: what a run's clock counts, and where the accuracies of two trainers stand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "smollm_curves.py"


def test_validation_is_left_out_of_the_clock_and_all_curves_begin_alike(tmp_path: Path, capsys):
    spec = importlib.util.spec_from_file_location("smollm_curves", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    ours, peer = tmp_path / "grpo-1", tmp_path / "trl"
    ours.mkdir()
    accuracy = script.ACCURACY
    lines = [
        {"step": 0, "time": 100.0, accuracy: 0.0, "timing_s/validation": 9.0},
        {"step": 1, "time": 102.0, "reward_mean": 0.1},
        {"step": 2, "time": 109.0, "reward_mean": 0.3, accuracy: 0.08, "timing_s/validation": 5.0},
        {"step": 3, "time": 111.0, "reward_mean": 0.2},
    ]
    (ours / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (peer / "step_2" / "eval").mkdir(parents=True)
    steps = [{"step": 1, "seconds": 9.0, "reward": 0.1}, {"step": 2, "seconds": 18.0, "reward": 0.2}]
    (peer / "curve.json").write_text(json.dumps({"name": "TRL", "steps": steps}))
    report = {"results": {"gsm8k": {"metrics": {"accuracy": {"value": 0.07}}}}}
    (peer / "step_2" / "eval" / "report.json").write_text(json.dumps(report))

    script.main(str(tmp_path / "curves"), str(ours), str(peer))

    first, second = json.loads((tmp_path / "curves.json").read_text())
    assert [line["seconds"] for line in first["steps"]] == pytest.approx([0.0, 2.0, 4.0, 6.0])
    assert [(line["seconds"], line.get("accuracy")) for line in second["steps"]] == [(0, 0.0), (9, None), (18, 0.07)]
    out = capsys.readouterr().out
    assert "grpo-1: 3 steps, 2.00 s a step" in out and "TRL: 2 steps, 9.00 s a step" in out
    assert (tmp_path / "curves.svg").read_text().count("<svg") == 3, "two charts in one picture"

"""Each service's own package, offline, receives every metric of every step; skipped where it is not installed."""

from __future__ import annotations

import math
import os
import time

import pytest

from posttrain.tracking.loggers import open_loggers
from posttrain.tracking.rundir import RunDirectory

METRICS = [{"reward_mean": 0.25, "val/math/mean@1": 0.5}, {"reward_mean": 0.75, "val/math/mean@1": 1.0}]
SETTINGS = {"trainer": {"seed": 3}, "search": {"api_key": "hidden!!"}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "SWANLAB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "p" / "e" / "trackio"))
    with RunDirectory(tmp_path, "p", "e") as directory:
        yield directory


def written(run, name: str) -> list[str]:
    """Log two steps; what was said."""
    said: list[str] = []
    loggers = open_loggers([name], run, SETTINGS, say=said.append)
    for step, metrics in enumerate(METRICS, start=1):
        loggers.log(step, {**metrics, "nan": math.nan} if name != "trackio" else metrics)
    loggers.close()
    assert not any("left out" in text for text in said), said
    assert not any(b"hidden!!" in path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    return said


def test_wandb_records_both_steps_offline(run):
    pytest.importorskip("wandb")
    assert "WANDB_API_KEY" in written(run, "wandb")[0]
    (record,) = run.path.glob("wandb/offline-run-*/*.wandb")
    wanted = (b"val/math/mean@1", b"reward_mean")
    for _ in range(100):  # its own process writes the file after `finish` has returned
        if all(name in record.read_bytes() for name in wanted):
            return
        time.sleep(0.1)
    raise AssertionError(record.read_bytes())


def test_mlflow_records_both_steps_into_its_file(run):
    mlflow = pytest.importorskip("mlflow")
    written(run, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run.path / 'mlflow.db'}")
    identity = (run.path / "mlflow_id").read_text()
    history = client.get_metric_history(identity, "val/math/mean_1")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 1.0)]
    assert client.get_run(identity).data.params["trainer.seed"] == "3"


def test_swanlab_records_both_steps_offline(run):
    pytest.importorskip("swanlab")
    assert "SWANLAB_API_KEY" in written(run, "swanlab")[0]
    stored = b"".join(path.read_bytes() for path in (run.path / "swanlab").rglob("*") if path.is_file())
    assert b"reward_mean" in stored and b"mean@1" in stored


def test_trackio_records_both_steps_into_its_folder(run):
    pytest.importorskip("trackio")
    written(run, "trackio")
    stored = b"".join(path.read_bytes() for path in (run.path / "trackio").rglob("*") if path.is_file())
    assert b"reward_mean" in stored and b"mean@1" in stored

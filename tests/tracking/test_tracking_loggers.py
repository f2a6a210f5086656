"""Metrics reach every logger exactly; a logger that is missing or fails never ends a run."""

from __future__ import annotations

import json
import math
import sys

import pytest

from posttrain.config.choices import LOGGERS as config_names
from posttrain.errors import UserError
from posttrain.tracking.loggers import LOGGERS, JsonlLogger, open_loggers, read_metrics
from posttrain.tracking.rundir import RunDirectory

METRICS = {"reward_mean": 0.1 + 0.2, "tiny": 5e-324, "count": 3.0, "nan": math.nan, "inf": -math.inf}


@pytest.fixture
def run(tmp_path):
    with RunDirectory(tmp_path, "p", "e") as directory:
        yield directory


def test_jsonl_has_step_first_and_floats_to_the_bit(run):
    logger = JsonlLogger(run.metrics)
    logger.log(1, METRICS)
    logger.log(2, {"step": 99, "reward_mean": 1})
    lines = run.metrics.read_text().splitlines()  # readable before close
    logger.close()
    assert lines[0].startswith('{"step": 1, "reward_mean": 0.30000000000000004, "tiny": 5e-324')
    assert lines[1] == '{"step": 2, "reward_mean": 1}'
    assert json.loads(lines[0], parse_constant=lambda _: pytest.fail("not JSON")) is not None
    first, _ = read_metrics(run.metrics)
    assert first["reward_mean"] == 0.1 + 0.2 and math.isnan(first["nan"]) and first["inf"] == -math.inf


def test_line_cut_off_by_a_kill_is_not_read(run):
    run.metrics.write_bytes(b'{"step": 1}\n{"step": 2')
    assert list(read_metrics(run.metrics)) == [{"step": 1}]


@pytest.mark.parametrize("damaged", ["{oops", "5", ""])
def test_a_damaged_line_is_named_with_its_file_and_number(run, damaged):
    run.metrics.write_text(f'{{"step": 1, "loss": 2.0}}\n{damaged}\n{{"step": 3}}\n')
    lines = read_metrics(run.metrics)
    assert next(lines) == {"step": 1, "loss": 2.0}
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        next(lines)


def test_numbers_of_arrays_are_written_as_numbers(run):
    import numpy as np

    logger = JsonlLogger(run.metrics)
    logger.log(1, {"a": np.float32(0.5), "b": np.int64(3)})
    assert run.metrics.read_text() == '{"step": 1, "a": 0.5, "b": 3}\n'


def test_details_show_every_metric_and_where_the_time_went_in_rows_of_100_columns(run):
    said: list[str] = []
    loggers = open_loggers(["console", "details"], run, {}, say=said.append)
    many = {f"group/metric_number_{i}": i / 7 for i in range(40)}
    loggers.log(4, {**METRICS, **many, "timing_s/gen": 3.0, "timing_s/step": 4.0})
    rows = said[0].splitlines()
    assert rows[0] == "  time: rollout 75%" and rows[1].startswith("  reward_mean 0.3  tiny 4.941e-324")
    assert all(f"  {name} " in said[0] for name in {**METRICS, **many}) and max(map(len, rows)) <= 100


def test_the_loggers_that_can_be_opened_are_those_that_can_be_set():
    assert config_names == LOGGERS, "add the name to LOGGERS in posttrain/config/choices.py too"


def test_unknown_logger_is_refused(run):
    with pytest.raises(
        ValueError, match=r"trainer\.logger names comet; known are console, details, tensorboard, wandb, mlflow"
    ):
        open_loggers(["console", "comet"], run, {})


def test_missing_package_is_said_and_the_run_goes_on(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    said: list[str] = []
    loggers = open_loggers(["details", "wandb"], run, {}, say=said.append)
    loggers.log(1, {"a": 1.0})
    loggers.close()
    assert "wandb is left out" in said[0] and "posttrain[wandb]" in said[0] and said[1] == "  a 1"
    assert list(read_metrics(run.metrics)) == [{"step": 1, "a": 1.0}]


class FakeWandb:
    """The part of wandb that is used."""

    Settings = dict

    def __init__(self) -> None:
        self.started: dict = {}
        self.logged: list = []
        self.fail = False

    def init(self, **kwargs):
        self.started = kwargs
        return self

    def log(self, metrics, step):
        if self.fail:
            raise ConnectionError("no route")
        self.logged.append((step, metrics))

    def finish(self):
        pass


def test_wandb_receives_every_metric_and_records_offline_without_a_key(run, monkeypatch):
    fake, said = FakeWandb(), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    loggers = open_loggers(["wandb"], run, {"search": {"api_key": "hidden!!"}}, say=said.append)
    loggers.log(3, {"a": 1.0, "b": 2.0})
    assert fake.logged == [(3, {"a": 1.0, "b": 2.0})]
    assert fake.started["mode"] == "offline" and fake.started["config"] == {"search": {"api_key": "***"}}
    assert (fake.started["project"], fake.started["name"]) == ("p", "e") and "WANDB_API_KEY" in said[0]
    first_id = fake.started["id"]

    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    open_loggers(["wandb"], run, {}, say=said.append)
    assert fake.started["mode"] == "online" and fake.started["id"] == first_id  # a resumed run continues its record
    written = [p.read_bytes() for p in run.path.rglob("*") if p.is_file()]
    assert not any(b"0123456789abcdef" in data for data in written)


def test_failing_logger_is_named_once_and_left_out(run, monkeypatch):
    fake, said = FakeWandb(), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    loggers = open_loggers(["wandb", "details"], run, {}, say=said.append)
    fake.fail = True
    loggers.log(1, {"a": 1.0})
    fake.fail = False
    loggers.log(2, {"a": 1.0})
    loggers.close()
    assert fake.logged == [] and sum("wandb failed" in text and "no route" in text for text in said) == 1
    assert [line["step"] for line in read_metrics(run.metrics)] == [1, 2]
    assert said.count("  a 1") == 2


def test_tensorboard_receives_every_metric(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = open_loggers(["tensorboard"], run, {}, say=pytest.fail)
    loggers.log(1, {"a": 0.5, "b/c": 2.0})
    loggers.close()
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]} == {"a": 0.5, "b/c": 2.0}

"""`trainer.profile_steps`: a trace of each named step, with the stages as ranges."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from runs import run

from posttrain.trainer.run.writer import StepTraces


def ranges(path: Path) -> set[str]:
    """Names of the ranges that somebody named, in a trace."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def test_named_steps_leave_a_trace_with_their_stages_and_no_other_does(tiny_model, sums, tmp_path, capsys):
    result = run(tiny_model, sums, tmp_path, trainer__profile_steps=[2, 9], trainer__total_training_steps=3)
    folder = result.path / "traces"
    assert [path.name for path in folder.iterdir()] == ["step_2.json.gz"]
    assert {"gen", "reward", "adv", "update_actor", "sync"} <= ranges(folder / "step_2.json.gz")
    said = capsys.readouterr().out
    assert f"Trace of step 2: {folder}/step_2*.json.gz; open it in https://ui.perfetto.dev" in said
    assert "trainer.profile_steps names [9], but the steps 1 to 3 are made" in said


def test_a_step_that_fails_leaves_no_trace_and_the_profiler_is_over(tmp_path):
    traces = StepTraces([1, 2], tmp_path)
    with pytest.raises(ValueError), traces.of(1), traces.stage("gen"):
        raise ValueError
    assert list(tmp_path.rglob("*.gz")) == [] and not traces.active
    with traces.of(2), traces.stage("ref"):
        pass
    assert ranges(tmp_path / "traces" / "step_2.json.gz") == {"ref"}
    with traces.of(3), traces.stage("gen"):
        pass
    assert len(list(tmp_path.rglob("*.gz"))) == 1


def test_each_rank_writes_a_trace_of_the_calls_that_it_answered(tmp_path):
    """The host of a rank as Ray would call it, in this process."""
    from posttrain.controller.rank_host import RankHost, pack, unpack

    host = RankHost.__new__(RankHost)
    host.rank, host.workers, host.spans, host.profiler = 1, {"actor": "a worker"}, [], None
    host.call("actor", "upper", pack(()))
    host.begin_trace()
    assert unpack(host.call("actor", "upper", pack(()))) == "A WORKER"
    path = tmp_path / "elsewhere" / "step_1.rank_1.json.gz"
    assert unpack(host.end_trace(str(path))) is None
    assert ranges(path) == {"actor.upper"} and host.profiler is None

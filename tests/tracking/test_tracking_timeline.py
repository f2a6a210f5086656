"""Lanes of a run's timeline, and that stages which overlap are not added up."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from posttrain import pulse
from posttrain.config.root import PPOConfig
from posttrain.tracking.rundir import RunDirectory
from posttrain.trainer.run import writer
from posttrain.trainer.run.writer import RunWriter


class Clock:
    """A clock that the test moves on."""

    now = 100.0

    def time(self) -> float:
        return self.now

    perf_counter = monotonic = time


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(pulse, "time", made)
    monkeypatch.setattr(writer, "time", made)
    return made


def test_a_lane_is_busy_from_the_first_item_to_the_last_and_near_spans_are_one(clock):
    lane = pulse.Lane("reward", "rewards")
    for at, is_busy in ((100, True), (101, True), (102, False), (102.01, True), (103, False), (104, False)):
        clock.now = at
        lane.note(is_busy)
    for at, until in ((105, 105.5), (107, 107.0001)):  # nothing is to be seen of the second
        clock.now = at
        lane.note(True)
        clock.now = until
        lane.note(False)
    assert lane.take() == [["reward", 100, 3.0, "rewards"], ["reward", 105, 0.5, "rewards"]] and lane.take() == []


def test_what_is_under_way_between_two_steps_is_cut_there_and_goes_on(clock):
    lane = pulse.Lane("agents", "agents, tools")
    lane.note(True)
    clock.now = 103
    assert lane.take() == [["agents", 100, 3, "agents, tools"]]
    clock.now = 105
    lane.note(False)
    assert lane.take() == [["agents", 103, 2, "agents, tools"]]


def test_a_step_takes_its_wall_time_however_its_stages_overlap(clock, tmp_path):
    made = RunWriter(PPOConfig(), RunDirectory(tmp_path, "p", "e"), 1, stored_config=PPOConfig())
    made.run.path.mkdir(parents=True)
    with made.stage("gen"):
        clock.now += 2
        with made.stage("reward"):  # within the other one
            clock.now += 3
    clock.now += 1  # no stage
    with made.stage("update_actor"):
        clock.now += 4
    assert made.take_times() == {"reward": 3, "gen": 5, "update_actor": 4, "step": 10} and made.take_times() == {}
    made.write_timeline(1)
    (line,) = [json.loads(line) for line in (made.run.path / "timeline.jsonl").read_text().splitlines()]
    assert line["stages"] == [["reward", 102, 3], ["gen", 100, 5], ["update_actor", 106, 4]]


def test_a_checkpoint_that_is_written_during_several_steps_is_in_the_lines_of_all_of_them(clock, tmp_path):
    config = PPOConfig()
    config.trainer.async_save = True
    made, given = RunWriter(config, RunDirectory(tmp_path, "p", "e"), 9, stored_config=config), {}
    made.run.path.mkdir(parents=True)
    made._metric, made._linked = (lambda step: None), True
    made.checkpoints = SimpleNamespace(
        save=lambda step, **rest: given.update(rest), wait=lambda: None, is_writing=False
    )
    made.save(1, roles={}, state={}, export=None)
    for step in (2, 3, 4):
        clock.now += 2
        if step == 3:
            given["on_saved"](tmp_path)
        made.write_timeline(step)
    lines = [json.loads(line)["stages"] for line in (made.run.path / "timeline.jsonl").read_text().splitlines()]
    beside = [[span for span in line if len(span) > 3] for line in lines]
    assert beside == [[["save_checkpoint", at, 2, "disk"]] for at in (100, 102)] + [[]]

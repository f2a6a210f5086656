"""A run that loses a worker goes on from its newest checkpoint, bitwise; errors of the user's own end it. No Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import metrics_of, run

from posttrain.controller.incidents import Incident, WorkerDied, death_of
from posttrain.controller.pool import LocalWorkers
from posttrain.errors import UserError
from posttrain.trainer.ppo import runner
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
from posttrain.trainer.run.recovery import Restarts

SIX = {"trainer__total_training_steps": 6, "trainer__save_freq": 2, "trainer__n_gpus_per_node": 2}
WHO = "Rank 1 (process 7 on vm)"


def lost(who: str = WHO) -> WorkerDied:
    death = WorkerDied(f"{who} died: kill -9. The same command continues from the newest checkpoint.")
    death.who = who
    death.incident = Incident(
        who, {who: "actor.update_actor"}, {who: "gone"}, {"Rank 0": "in all_reduce"}, ["its last"]
    )
    return death


@pytest.fixture
def failing(monkeypatch):
    """`failing(errors)`: so many updates of a step (by its number) fail with an error; the workers are this process."""

    def prepare(errors: dict[int, list[Exception]]) -> list[int]:
        update, steps = RayPPOTrainer._update_actor, []

        def failing_update(self, batch, **given):
            steps.append(step := self.step + 1)
            if errors.get(step):
                raise errors[step].pop(0)
            return update(self, batch, **given)

        monkeypatch.setattr(RayPPOTrainer, "_update_actor", failing_update)
        monkeypatch.setattr(runner, "open_workers", lambda *_: LocalWorkers())
        return steps

    return prepare


def final_files(path: Path) -> dict[str, bytes]:
    folder = path / "checkpoints" / "global_step_6"
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_that_loses_workers_goes_on_from_its_checkpoint_to_the_bit(failing, tiny_model, sums, tmp_path, capsys):
    failing({})
    straight = run(tiny_model, sums, tmp_path / "straight", **SIX)
    steps = failing({1: [lost()], 4: [lost()], 6: [lost()]})
    result = run(tiny_model, sums, tmp_path / "lost", **SIX, trainer__resume_mode="disable")
    assert steps == [1, 1, 2, 3, 4, 3, 4, 5, 6, 5, 6]
    assert result.restarts == 3 and straight.restarts == 0 and result.status == "finished"
    assert metrics_of(result.path) == metrics_of(straight.path) and final_files(result.path) == final_files(
        straight.path
    )
    assert not (straight.path / "incidents").exists()
    pages = sorted((result.path / "incidents").iterdir())
    assert [page.name for page in pages] == ["001.md", "002.md", "003.md"]
    page = pages[1].read_text()
    for known in (
        WHO,
        "step: 4, stage: update_actor",
        "actor.update_actor",
        "in all_reduce",
        "its last",
        "Restart 1 of 3",
    ):
        assert known in page
    said = capsys.readouterr().out
    assert f"{WHO} died in step 4, stage update_actor. Restart 1 of 3" in said and str(pages[1]) in said
    assert "started again 3 time(s)" in said


def test_the_same_step_is_tried_so_many_times_and_no_more(failing, tiny_model, sums, tmp_path):
    steps = failing({2: [lost() for _ in range(9)]})
    with pytest.raises(WorkerDied, match=r"2 restart\(s\) led to no step after step 1 .*003\.md"):
        run(tiny_model, sums, tmp_path, **SIX, trainer__max_restarts=2)
    assert steps == [1, 2] * 3  # nothing was saved yet: each attempt begins at the first step


def test_without_restarts_it_ends_at_once_and_leaves_its_page(failing, tiny_model, sums, tmp_path):
    steps = failing({2: [lost()]})
    with pytest.raises(WorkerDied, match=r"Rank 1 .*newest checkpoint.*trainer\.max_restarts is 0.*001\.md"):
        run(tiny_model, sums, tmp_path, **SIX, trainer__max_restarts=0)
    assert steps == [1, 2]


MEMORY = death_of(RuntimeError("Task was killed due to the node running low on memory."))


@pytest.mark.parametrize("error", [UserError("wrong setting"), ValueError("a bug"), MemoryError("full"), MEMORY])
def test_errors_that_would_come_again_are_not_tried_again(failing, tiny_model, sums, tmp_path, error):
    steps = failing({2: [error]})
    with pytest.raises((UserError, ValueError)):
        run(tiny_model, sums, tmp_path, **SIX)
    assert steps == [1, 2]


def test_a_run_that_was_asked_to_stop_is_not_started_again(failing, tiny_model, sums, tmp_path, monkeypatch):
    from posttrain.trainer.run.result import GracefulStop

    def asked(self: Any) -> Any:
        self.requested = 2
        return self

    monkeypatch.setattr(GracefulStop, "__enter__", asked)
    monkeypatch.setattr(RayPPOTrainer, "_validate_at_start", lambda self: (_ for _ in ()).throw(lost()))
    steps = failing({})
    with pytest.raises(WorkerDied, match="asked to stop"):
        run(tiny_model, sums, tmp_path, **SIX)
    assert steps == []


def test_only_a_step_that_no_attempt_had_reached_is_progress():
    restarts = Restarts(2)
    assert [restarts.another(step) for step in (5, 3, 5, 6, 6, 7, 7, 0)] == [
        *(True, True, False),
        *(True, True),
        *(True, True, False),
    ]

"""A run that loses a worker continues from its newest checkpoint, bitwise; errors of the user's own end it. No Ray."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import metrics_of, run

from posttrain.config import load_config
from posttrain.config.resolved import ConfigError
from posttrain.config.trainer import ENGINE_SIZE, ENGINE_STAGES, machines_for
from posttrain.controller.incidents import Incident, NoRoom, WorkerDied, death_of
from posttrain.controller.pool import LocalWorkers
from posttrain.errors import UserError
from posttrain.tracking.rundir import RunDirectory
from posttrain.tracking.status import write_status
from posttrain.trainer.ppo import runner
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
from posttrain.trainer.run import recovery
from posttrain.trainer.run.recovery import Restarts, _decide

SIX = {"trainer__total_training_steps": 6, "trainer__save_freq": 2, "trainer__n_gpus_per_node": 2}
SIX["trainer__async_save"] = False  # a save that is under way is lost with its workers
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
    """`failing(errors)`: so many updates of a step (by its number) fail with an error; the workers are this process.
    Without `snapshots` a restart finds checkpoints only; with them, one of every step."""

    def prepare(errors: dict[int, list[Exception]], *, with_snapshots: bool = False) -> list[int]:
        if with_snapshots:
            monkeypatch.setattr(recovery, "SHARE", math.inf)
        else:
            monkeypatch.setattr(recovery, "MEMORY", Path("/nowhere"))
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


def wait_for_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were written at once: otherwise the next step may come before one is in its place."""
    take = recovery.Snapshots.take

    def complete(self: Any, step: int, **given: Any) -> None:
        take(self, step, **given)
        self.end()

    monkeypatch.setattr(recovery.Snapshots, "take", complete)


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
    assert "Workers were lost: all were started again 3 time(s). See" in said


def test_snapshots_let_only_the_step_in_flight_be_repeated_and_are_gone_with_the_run(
    failing, tiny_model, sums, tmp_path, monkeypatch, capsys
):
    unsaved = {**SIX, "trainer__save_freq": -1}
    failing({})
    straight = run(tiny_model, sums, tmp_path / "straight", **unsaved)
    memory = tmp_path / "memory"
    memory.mkdir()
    steps = failing({4: [lost()], 6: [lost()]}, with_snapshots=True)
    monkeypatch.setattr(recovery, "MEMORY", memory)
    wait_for_snapshots(monkeypatch)
    result = run(tiny_model, sums, tmp_path / "lost", **unsaved)
    assert steps == [1, 2, 3, 4, 4, 5, 6, 6]
    assert "Restart 1 of 3 after step 3" in capsys.readouterr().out
    assert metrics_of(result.path) == metrics_of(straight.path) and final_files(result.path) == final_files(
        straight.path
    )
    assert list(memory.iterdir()) == []


def test_snapshots_are_as_rare_as_they_are_slow_and_end_where_there_is_no_room(tmp_path, capsys):
    now, facts = [0.0], SimpleNamespace(parameters=1000)
    group: Any = SimpleNamespace(group=SimpleNamespace(once=lambda name: facts))

    def write(folder: Path) -> str:
        now[0] += 2.0
        folder.mkdir()
        return "this engine writes at once"

    made = recovery.Snapshots(tmp_path, lambda: now[0])
    given = {"roles": {"actor": group}, "writers": {"actor": write}, "state": {}}
    assert made.is_due()
    made.take(1, **given)
    now[0] += 199.0
    assert not made.is_due()
    now[0] += 2.0
    assert made.is_due() and made.newest() == tmp_path / "global_step_1"
    facts.parameters = 10**15
    made.take(2, **given)
    assert "no snapshots are kept in memory" in capsys.readouterr().out and not made.is_due()


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


def test_a_worker_that_is_replaced_alone_is_noted_at_its_step_whatever_the_status_says_still(tmp_path, capsys):
    directory = RunDirectory(tmp_path, "test", "run").open()
    directory.metrics.write_text("{}")
    write_status(directory.path, "running", 0, 9)  # it is written every few seconds
    restarts = Restarts(1)
    for step in (3, 4):
        recovery._note_replacement(directory, restarts, lost(), step)
    pages = [page.read_text() for page in sorted(directory.incidents.iterdir())]
    assert "- step: 4," in pages[0] and "- step: 5," in pages[1] and "died in step 5" in capsys.readouterr().out
    with pytest.raises(WorkerDied):
        recovery._note_replacement(directory, restarts, lost(), 4)
    directory.close()


def test_over_several_machines_the_run_ends_where_the_others_leave_with_its_ray():
    assert "RAY_ADDRESS" in _decide(lost(), Restarts(3, keeps_machines=False), 4, 2)
    assert _decide(lost(), Restarts(3), 4, 2).startswith("Restart 1 of 3 after step 2")


# -- fewer machines ---------------------------------------------------------------------------------------------------


def no_room(machines: int) -> NoRoom:
    full = NoRoom("Ray had no room for the training workers within 300 s.")
    full.machines = machines
    return full


def clustered(failing, monkeypatch, refused: dict[int, NoRoom]) -> list[int | None]:
    """Runs find a cluster, and no room in these attempts; gives the machines that every attempt was told are left."""
    failing({4: [lost(), lost()]})
    asked: list[int | None] = []

    def opened(config: Any, device: Any, external: Any, logs: Any, machines: int | None, *_: Any) -> LocalWorkers:
        asked.append(machines)
        if len(asked) in refused:
            raise refused[len(asked)]
        return LocalWorkers()

    monkeypatch.setattr(runner, "open_workers", opened)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    return asked


MACHINES = {**SIX, "trainer__nnodes": 4}


def test_a_run_goes_on_with_the_machines_that_are_left_and_no_others_take_their_place(
    failing, tiny_model, sums, tmp_path, monkeypatch, capsys
):
    asked = clustered(failing, monkeypatch, {2: no_room(3), 3: no_room(2)})
    result = run(tiny_model, sums, tmp_path, **MACHINES, trainer__min_nnodes=1)
    # All were asked for twice; then the three that had room, of which one was lost too, and so on.
    assert asked == [None, None, 3, 2, 2] and result.status == "finished"
    said, page = capsys.readouterr().out, (result.path / "incidents" / "001.md").read_text()
    for words in (said, page):
        assert "goes on with 3 of 4 machines (trainer.min_nnodes)" in words
        assert "goes on with 2 of 4 machines (trainer.min_nnodes)" in words
    assert "nnodes: 4" in (result.path / "config.yaml").read_text()  # the same command asks for all of them again


@pytest.mark.parametrize("least, room", [(None, 3), (3, 2)])
def test_without_enough_machines_the_run_ends_with_what_is_missing(
    failing, tiny_model, sums, tmp_path, monkeypatch, least, room
):
    asked = clustered(failing, monkeypatch, {2: no_room(room)})
    given = {"trainer__min_nnodes": least} if least else {}
    with pytest.raises(NoRoom, match="no room"):
        run(tiny_model, sums, tmp_path, **MACHINES, **given)
    assert asked == [None, None]


def test_fewer_machines_are_rejected_with_a_ray_that_the_run_starts_as_machines_leave_it(
    failing, tiny_model, sums, tmp_path, monkeypatch
):
    asked = clustered(failing, monkeypatch, {})
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_HEAD_ADDRESS", "auto")  # one that runs on this machine; there is none
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: None)
    with pytest.raises(UserError, match=r"trainer.min_nnodes=1 needs a Ray that runs already.* RAY_ADDRESS"):
        run(tiny_model, sums, tmp_path, **MACHINES, trainer__min_nnodes=1)
    assert asked == []  # nothing was started


def test_a_run_that_never_had_its_machines_does_not_begin_with_fewer(failing, tiny_model, sums, tmp_path, monkeypatch):
    asked = clustered(failing, monkeypatch, {1: no_room(3)})
    with pytest.raises(NoRoom):
        run(tiny_model, sums, tmp_path, **MACHINES, trainer__min_nnodes=1)
    assert asked == [None]


ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
ON_GPUS = ["trainer.nnodes=4", "trainer.n_gpus_per_node=2"]


def test_as_many_machines_are_used_as_the_sizes_of_the_layout_divide():
    def left(most: int, *given: str) -> int | None:
        return machines_for(load_config([*ON_GPUS, "trainer.min_nnodes=1", *given]).config, most)

    assert left(3) == 3 and left(1) == 1 and left(0) is None
    assert left(3, "trainer.min_nnodes=2", f"{ACTOR}.fsdp_config.fsdp_size=4") == 2
    assert left(1, "trainer.min_nnodes=2", f"{ACTOR}.fsdp_config.fsdp_size=4") is None
    assert left(3, "trainer.min_nnodes=2", f"{ENGINE_SIZE}=4") == 2
    apart = "actor_rollout_ref.rollout.n_workers=4"  # then their number does not change
    assert left(3, "trainer.min_nnodes=1", f"{ENGINE_SIZE}=4", apart) == 3
    stages = ["actor_rollout_ref.rollout.name=vllm", f"{ENGINE_SIZE}=2", f"{ENGINE_STAGES}=2"]
    assert left(3, "trainer.min_nnodes=2", *stages) == 2
    by_megatron = [f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron_config.pipeline_parallel_size=2"]
    assert left(3, "trainer.min_nnodes=1", *by_megatron) == 3
    assert left(3, "trainer.min_nnodes=2", *by_megatron, f"{ACTOR}.megatron_config.tensor_parallel_size=2") == 2
    assert left(3, "trainer.min_nnodes=2", *by_megatron, f"{ACTOR}.megatron_config.expert_parallel_size=2") == 2


@pytest.mark.parametrize(
    "given, words",
    [
        (["trainer.min_nnodes=5"], "more than trainer.nnodes=4"),
        (["trainer.min_nnodes=1", "trainer.max_restarts=0"], "trainer.max_restarts=0 ends the run"),
        (["trainer.min_nnodes=1", f"{ACTOR}.fsdp_config.fsdp_size=4"], "leaves 2 worker"),
        (["trainer.min_nnodes=1", f"{ENGINE_SIZE}=4"], "leaves 2 worker"),
        (
            ["trainer.min_nnodes=1", f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron_config.tensor_parallel_size=4"],
            r"leaves 2 worker\(s\), too few for actor_rollout_ref.actor.megatron_config: tensor x pipeline x context=4",
        ),
        (["trainer.min_nnodes=1", "actor_rollout_ref.rollout.colocated_workers=4"], "leaves 2 worker"),
    ],
)
def test_layouts_that_cannot_shrink_so_far_are_rejected_at_the_start(given, words):
    with pytest.raises(ConfigError, match=words):
        load_config([*ON_GPUS, *given])
    load_config([*ON_GPUS, "trainer.min_nnodes=2", f"{ACTOR}.fsdp_config.fsdp_size=4"])

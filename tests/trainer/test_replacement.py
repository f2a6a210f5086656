"""A rollout worker that is lost is replaced alone: its requests are issued again, and the others go on. No Ray."""

from __future__ import annotations

import re
from typing import Any

import pytest
from runs import metrics_of, run
from test_experience import Echo, Letters, Words, prompts

from posttrain.config.root import PPOConfig
from posttrain.controller.group import WorkerGroup, register
from posttrain.controller.incidents import Incident, WorkerDied
from posttrain.controller.pool import ROLLOUT, Finished, LocalWorkerGroup, LocalWorkers
from posttrain.controller.rank_host import RankHost, unpack
from posttrain.errors import UserError
from posttrain.trainer.ppo import runner
from posttrain.trainer.ppo.experience import Experience
from posttrain.trainer.ppo.reward import RewardManager
from posttrain.workers.groups import RolloutGroup
from posttrain.workers.rollout import RolloutWorker
from posttrain.workers.update_plan import by_groups


class SpreadEcho(Echo):
    submit = register(by_groups)(Echo.submit.function)  # pyright: ignore


def lost(name: str, what: str = "died") -> WorkerDied:
    death = WorkerDied(f"{name} {what}: kill -9. The same command continues from the newest checkpoint.")
    death.who, death.worker, death.incident = name, name, Incident(name, {name: "rollout.advance"}, {name: "gone"})
    return death


class Crew(WorkerGroup):
    """Workers of one process as ranks of a group. Those in `dead` fail; `fails(rank, name)` is asked at every call."""

    overlaps = False

    def __init__(self, make: Any, count: int) -> None:
        self.make, self.ranks, self.dead = make, [make() for _ in range(count)], set[int]()
        self.worker_class, self.world_size, self.config = type(self.ranks[0]), count, self.ranks[0].config
        self.calls: list[tuple[int, str]] = []
        self.versions: list[int] = []  # of the weights that the last rank was sent
        self.fails: Any = lambda rank, name: False

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Finished:
        self.calls.append((rank, name))
        if (rank, name) == (self.world_size - 1, "take_bucket"):
            self.versions.append(arguments[-1])
        if self.fails(rank, name):
            self.dead.add(rank)

        def call() -> Any:
            if rank in self.dead:
                raise lost(f"{ROLLOUT} {rank}")
            return getattr(self.ranks[rank], name)(*arguments)

        return Finished(call)

    def _joined(self, parts: Any, join: Any) -> Finished:
        return Finished(lambda: join([part.result() for part in parts]))

    def wait_any(self, futures: Any) -> None:
        pass

    def replace(self, number: int) -> None:
        self.ranks[number] = self.make()
        self.dead.discard(number)


@pytest.fixture
def crew():
    group = Crew(SpreadEcho, 2)
    pool = Letters()
    made = Experience(PPOConfig(), Words(), RolloutGroup(group), RewardManager(pool, Words()))  # pyright: ignore
    replaced: list[str] = []

    def replace(death: WorkerDied) -> int:
        replaced.append(death.worker)
        group.replace(number := int(death.worker.split()[-1]))
        return number

    made.replace = replace
    return made, group, pool, replaced


def answers(experience: Experience, rows: Any) -> tuple[list[Any], list[Any]]:
    done = experience.wait_for_scores(experience.wait_for_responses(rows))
    return done.batch["responses"].tolist(), list(done.non_tensor_batch["reward_score"])


WANTED = ([[10, 1], [10, 2], [20, 1], [20, 2], [30, 1], [30, 2]], [11, 12, 21, 22, 31, 32])


@pytest.mark.parametrize("at", [("submit", 1), ("advance", 1), ("advance", 2)])
def test_what_a_lost_worker_was_asked_for_is_issued_again_and_scored_once(crew, at):
    experience, group, pool, replaced = crew
    name, count = at
    group.fails = lambda rank, called: not replaced and group.calls.count((1, name)) == count and rank == 1
    scored: list[Any] = []
    submit = pool.submit_many
    pool.submit_many = lambda items: (scored.extend(key for key, _ in items), submit(items))
    rows = experience.ask(experience.number(prompts(10, 20, 30)), 2)
    assert answers(experience, rows) == WANTED
    assert replaced == ["rollout 1"] and len(scored) == len(set(scored)) == 6
    assert group.calls.count((0, "submit")) == 1 and group.calls.count((1, "submit")) == 2
    assert not (experience._asked or experience._prompts or experience._outputs)


def test_a_worker_that_is_lost_again_while_requests_are_issued_again_is_replaced_again(crew):
    experience, group, _, replaced = crew
    group.fails = lambda rank, called: rank == 1 and len(replaced) < 3 and called == "submit"
    assert answers(experience, experience.ask(experience.number(prompts(10, 20, 30)), 2)) == WANTED
    assert replaced == ["rollout 1"] * 3


def answering(group: Crew, at: tuple[int, str], error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on calls of this method on this rank end with the error."""
    send = group._send

    def sent(rank: int, name: str, arguments: Any) -> Finished:
        return Finished(lambda: (_ for _ in ()).throw(error)) if (rank, name) == at else send(rank, name, arguments)

    monkeypatch.setattr(group, "_send", sent)


def test_the_error_of_one_worker_is_raised_though_another_was_lost_at_the_same_time(crew, monkeypatch):
    experience, group, _, replaced = crew
    group.fails = lambda rank, called: rank == 0 and called == "submit" and not replaced
    answering(group, (1, "submit"), UserError("this prompt cannot be had"), monkeypatch)
    with pytest.raises(UserError, match="cannot be had"):
        experience.ask(experience.number(prompts(10, 20, 30)), 2)
    assert replaced == ["rollout 0"]


def test_an_answer_that_was_lost_with_another_worker_than_its_own_ends_the_attempt(crew, monkeypatch):
    """As where a worker reports that it could not talk to one that has died."""
    experience, group, _, replaced = crew
    rows = experience.ask(experience.number(prompts(10, 20, 30)), 2)
    answering(group, (0, "advance"), lost("rollout 1"), monkeypatch)
    with pytest.raises(WorkerDied, match="rollout 1"):
        experience.wait_for_responses(rows)
    assert replaced == ["rollout 1"]


def test_a_process_that_took_the_place_of_a_lost_one_has_no_trace_of_the_step(tmp_path):
    host = RankHost.__new__(RankHost)
    host.rank, host.profiler = 1, None
    assert unpack(host.end_trace(str(tmp_path / "step_3.rollout_1.json.gz"))) is None
    assert not list(tmp_path.iterdir())


def test_without_a_replacement_the_loss_ends_the_attempt(crew):
    experience, group, _, _ = crew
    experience.replace = None
    group.fails = lambda rank, called: rank == 1 and called == "advance"
    rows = experience.ask(experience.number(prompts(10, 20, 30)), 2)
    with pytest.raises(WorkerDied, match="rollout 1"):
        experience.wait_for_responses(rows)
    assert experience._asked == []


# -- whole runs -------------------------------------------------------------------------------------------------------


class TwoGenerate(LocalWorkers):
    """Trains in this process, and has two workers for rollout in it."""

    def __init__(self) -> None:
        self.crew: Crew | None = None
        self.replaced: list[int] = []

    def create(self, role: str, worker: type, *arguments: Any, **named: Any) -> WorkerGroup:
        if role != ROLLOUT:
            return LocalWorkerGroup(worker(*arguments, **named))
        self.crew = Crew(lambda: worker(*arguments, **named), 2)
        return self.crew

    def own_size(self, role: str) -> int:
        return 2 if role == ROLLOUT else 0

    def replace_alone(self, role: str) -> bool:
        return role == ROLLOUT

    def number_of_lost(self, role: str, death: WorkerDied) -> int:
        if not death.worker.startswith(role):
            raise death
        return int(death.worker.split()[-1])

    def replace(self, role: str, number: int) -> None:
        assert self.crew is not None
        self.replaced.append(number)
        self.crew.replace(number)


FOUR = {
    "trainer__total_training_steps": 4,
    "trainer__save_freq": 10,
    "trainer__n_gpus_per_node": 1,
    "actor_rollout_ref__rollout__n_workers": 2,
    "trainer__device": "cpu",
}


@pytest.fixture
def disturbed(tiny_model, sums, tmp_path, monkeypatch):
    """`disturbed(name, fails)`: a run whose workers fail so; (its result, its workers of every attempt)."""

    def start(name: str, fails: Any, **more: Any) -> tuple[Any, list[TwoGenerate]]:
        made: list[TwoGenerate] = []

        def opened(*_: Any) -> TwoGenerate:
            made.append(TwoGenerate())
            create = made[-1].create

            def created(role: str, *given: Any, **named: Any) -> Any:
                group = create(role, *given, **named)
                if isinstance(group, Crew):
                    group.fails = lambda rank, called: fails(made[-1], rank, called)
                return group

            made[-1].create = created  # pyright: ignore
            return made[-1]

        monkeypatch.setattr(runner, "open_workers", opened)
        monkeypatch.setattr("posttrain.cores.usable", lambda: 4)
        return run(tiny_model, sums, tmp_path / name, **FOUR, **more), made

    return start


@pytest.mark.parametrize(
    "name, call",
    [
        ("advance", 3),
        *(
            pytest.param(*at, marks=pytest.mark.slow)
            for at in (("submit", 2), ("take_bucket", 3), ("rollout_scores", 2))
        ),
    ],
)
def test_a_rollout_worker_lost_in_any_stage_is_replaced_alone_and_no_bit_changes(disturbed, capsys, name, call):
    straight, _ = disturbed("straight", lambda *_: False)

    def fails(workers: TwoGenerate, rank: int, called: str) -> bool:
        here = rank == 1 and called == name and not workers.replaced
        return here and workers.crew is not None and workers.crew.calls.count((1, name)) == call

    result, attempts = disturbed("lost", fails)
    assert len(attempts) == 1 and attempts[0].replaced == [1]  # those that train were not started again
    assert (result.restarts, result.replaced, straight.replaced) == (0, 1, 0)
    assert metrics_of(result.path) == metrics_of(straight.path)
    page = (result.path / "incidents" / "001.md").read_text()
    stage = "gen" if name in ("submit", "advance") else "sync"
    assert "Replacement 1 of 3: it alone is started again" in page and f"stage: {stage}" in page
    said = capsys.readouterr().out
    assert re.search(rf"rollout 1 died in step \d, stage {stage}\. Replacement 1 of 3", said)
    assert "Workers were lost: 1 worker(s) were replaced alone. See" in said


def test_other_workers_that_generate_are_sent_nothing_while_one_is_replaced(disturbed):
    def fails(workers: TwoGenerate, rank: int, called: str) -> bool:
        crew = workers.crew
        return rank == 1 and called == "advance" and crew is not None and not workers.replaced and len(crew.calls) > 30

    _, (workers,) = disturbed("lost", fails)
    assert workers.crew is not None and workers.replaced == [1]
    calls = workers.crew.calls
    taken = [[call for call in calls if call == (rank, "take_bucket")] for rank in (0, 1)]
    assert len(taken[1]) == len(taken[0]) * 6 // 5  # 5 syncs of both, and one of the new worker
    versions = workers.crew.versions
    assert versions == sorted(versions) and set(versions) == set(range(5))  # it got those that it had lost
    assert all(isinstance(rank, RolloutWorker) and rank.engine.version == 4 for rank in workers.crew.ranks)


def test_replacements_count_as_restarts_do_and_then_all_are_started_again_or_the_run_ends(disturbed):
    def always(workers: TwoGenerate, rank: int, called: str) -> bool:
        return rank == 1 and called == "advance"

    with pytest.raises(WorkerDied, match=r"2 restart\(s\) led to no step after step 0"):
        disturbed("lost", always, trainer__max_restarts=2)
    with pytest.raises(WorkerDied, match=r"trainer\.max_restarts is 0"):
        disturbed("never", always, trainer__max_restarts=0)


def test_asynchronous_runs_start_all_workers_again(disturbed):
    def once(workers: TwoGenerate, rank: int, called: str) -> bool:
        return rank == 1 and called == "advance" and len(attempts) == 0 and not attempts.append(workers)

    attempts: list[TwoGenerate] = []
    result, made = disturbed("lost", once, trainer__one_step_off=True)
    assert len(made) == 2 and result.restarts == 1 and result.replaced == 0

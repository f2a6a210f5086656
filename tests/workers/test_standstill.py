"""Workers that stand still: who is reported, what ends a run, and who is left alone. No Ray."""

from __future__ import annotations

import itertools
import math
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from patience import until

from posttrain.config import ConfigError, load_config
from posttrain.controller.incidents import (
    EVERY_S,
    IDLE_S,
    PeerLost,
    Process,
    StallWatch,
    State,
    WorkerDied,
    WorkersHung,
    WorkerStopped,
    starting_states,
    state_of,
    this_process,
)
from posttrain.controller.rank_host import Identity

ONE, TWO = "Rank 0 (process 11 on a)", "Rank 1 (process 22 on b)"


class Watched:
    """A Standstill with a clock of its own: `look` lets some seconds pass, and shows two processes' states."""

    def __init__(self, limit_s: float = 300.0, hung_s: float = math.inf) -> None:
        self.now, self.told, self.used = 0.0, [], 0.0
        self.standstill = StallWatch(limit_s, self.told.append, lambda: self.now, hung_s)

    def look(self, letters: str, *, looks: int = 1, passed: float = EVERY_S, load: float = 1.0) -> None:
        """`load` is the share of a core that the second process uses."""
        for _ in range(looks):
            self.now += passed
            self.used += load * passed
            states = {ONE: State(letters[0], 5.0), TWO: State(letters[1], self.used)}
            self.standstill.look(states, [ONE, TWO])


def test_a_stopped_worker_is_named_within_seconds_and_ends_the_run_at_the_limit():
    watched = Watched(limit_s=60)
    watched.look("ST", looks=4)
    assert watched.told == []
    watched.look("ST", looks=2)
    (said,) = watched.told
    assert TWO in said and ONE not in said and "kill -CONT" in said and "trainer.stopped_worker_timeout_s" in said
    with pytest.raises(
        WorkerStopped, match=r"Rank 1 \(process 22 on b\) has been stopped since \d.* 60 s .* newest che"
    ):
        watched.look("ST", looks=30)
    assert watched.now == 60 and len(watched.told) == 1


def test_a_worker_that_goes_on_is_told_of_and_its_time_begins_anew():
    watched = Watched(limit_s=60)
    for _ in range(4):  # two minutes in all, but never 60 s
        watched.look("ST", looks=20)
        watched.look("SS")
    assert [TWO in said and "no longer stopped" in said for said in watched.told] == [False, True] * 4


def test_a_run_that_was_stopped_as_a_whole_blames_nobody():
    """Ctrl-Z, an hour, `fg`: the driver looks before all workers go on."""
    watched = Watched(limit_s=60)
    watched.look("SS")
    watched.look("TT", passed=3600)
    watched.look("SS")
    assert watched.told == []


def test_a_worker_in_a_debugger_is_told_of_and_never_ends_the_run():
    watched = Watched(limit_s=5)
    watched.look("St", looks=1000)
    assert len(watched.told) == 1 and "debugger" in watched.told[0]


@pytest.mark.parametrize("letters", ["SR", "SS", "SD"])
def test_a_worker_that_computes_is_never_told_of(letters):
    """However long it does not answer, and although the other one waits for it."""
    watched = Watched()
    watched.look(letters, looks=5000, load=0.2)
    assert watched.told == []


def test_workers_that_neither_answer_nor_compute_are_told_of_more_and_more_rarely():
    watched = Watched()
    watched.look("SD", looks=int(20 * IDLE_S / EVERY_S), load=0.01)
    assert len(watched.told) == 5  # after 1, 2, 4, 8 and 16 times the limit
    assert ONE in watched.told[0] and TWO in watched.told[0] and "py-spy" in watched.told[0]
    watched.standstill.answered()
    watched.look("SD", looks=int(IDLE_S / EVERY_S) - 1, load=0.01)
    assert len(watched.told) == 5


def test_workers_that_neither_answer_nor_compute_are_taken_for_hung_at_the_limit_and_not_if_one_computes():
    watched = Watched(hung_s=600)
    watched.look("SD", looks=5000, load=0.2)
    watched.look("SD", looks=int(600 / EVERY_S) - 1, load=0.01)
    assert "up to 600 s (trainer.hung_worker_timeout_s)" in watched.told[0]
    with pytest.raises(WorkersHung, match=r"Rank 0 .*Rank 1 .* 600 s \(trainer\.hung_worker_timeout_s\)") as hung:
        watched.look("SD", load=0.01)
    assert hung.value.who == f"{ONE}, {TWO}"


def test_a_stopped_worker_that_was_replaced_does_not_hide_that_the_others_hang():
    watched = Watched(limit_s=10, hung_s=600)
    with pytest.raises(WorkerStopped):
        watched.look("ST", looks=10)
    with pytest.raises(WorkersHung, match="Rank 0"):
        for _ in range(int(600 / EVERY_S) + 1):
            watched.now += EVERY_S
            watched.standstill.look({ONE: State("S", 5.0)}, [ONE])  # the new one has another process, and so a new name


def test_nothing_is_said_where_nothing_is_known():
    watched = Watched()
    for _ in range(1000):
        watched.now += EVERY_S
        watched.standstill.look({ONE: None, TWO: None}, [ONE, TWO])
    assert watched.told == []


def test_the_kernel_tells_a_stopped_process_from_one_that_computes_whatever_holds_its_lock():
    """`re` holds the interpreter's lock for the whole of its search."""
    if not os.path.exists("/proc/self/stat"):
        pytest.skip("needs /proc")
    code = "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        try:
            with open(f"/proc/{child.pid}/stat") as file:
                process = Process(child.pid, int(file.read().rpartition(")")[2].split()[19]))
            until(lambda: (state := state_of(process)) and state.letter == "R" and state.seconds > 0.2, "for its work")
            own = this_process()
            assert own.pid == os.getpid() and (mine := state_of(own)) and mine.seconds > 0.2  # with what is below it
            child.send_signal(signal.SIGSTOP)
            until(lambda: (state := state_of(process)) and state.letter == "T", "for its stop")
            child.send_signal(signal.SIGCONT)
            until(lambda: (state := state_of(process)) and state.letter == "R", "for its going on")
            assert state_of(Process(child.pid, process.started + 1)) is None  # a later one with its number
        finally:
            child.kill()
    assert state_of(process) is None


def test_a_worker_that_is_stopped_before_it_could_report_its_process_is_seen():
    now = [0.0]
    watched = StallWatch(3.0, print, lambda: now[0])
    command = ["ray::RankHost.__init__", "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, executable=sys.executable) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            name = f"A worker that starts (process {child.pid} on {socket.gethostname()})"
            until(lambda: name in (states := starting_states()) and states[name].letter == "T", "for its stop")
            with pytest.raises(WorkerStopped, match=rf"process {child.pid} "):
                for _ in range(5):
                    watched.look(starting_states(), [])
                    now[0] += EVERY_S
        finally:
            child.kill()
    assert name not in starting_states()


def test_the_limit_is_a_time():
    assert load_config(["trainer.n_workers=2"]).value("trainer.stopped_worker_timeout_s") == 300.0
    given = load_config(["trainer.stopped_worker_timeout_s=1.5", "trainer.n_workers=2"])
    assert given.value("trainer.stopped_worker_timeout_s") == 1.5
    with pytest.raises(ConfigError, match="stopped_worker_timeout_s"):
        load_config(["trainer.stopped_worker_timeout_s=0", "trainer.n_workers=2"])


def test_the_limits_have_an_effect_where_others_generate_than_the_one_worker_that_trains():
    limit = "trainer.stopped_worker_timeout_s=9"
    assert any("has no effect" in note for note in load_config([limit]).notes)
    apart = load_config([limit, "actor_rollout_ref.rollout.n_workers=1"])
    assert not any("has no effect" in note for note in apart.notes)


class StoppedWorker:
    """A stopped process as a rank of this name, and a watch that waits for its answer: it answers when it is gone."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("ray")
        from posttrain.controller import ray_ranks
        from posttrain.controller.ray_cluster import ITSELF, Machine

        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self.child.send_signal(signal.SIGSTOP)
        with open(f"/proc/{self.child.pid}/stat") as file:
            process = Process(self.child.pid, int(file.read().rpartition(")")[2].split()[19]))
        until(lambda: (state := state_of(process)) and state.letter == "T", "for its stop")
        identifier = SimpleNamespace(hex=lambda: "a")
        self.ref = SimpleNamespace(task_id=lambda: SimpleNamespace(actor_id=lambda: identifier))
        self.watch = ray_ranks.RankWatch(3.0, print)
        clock = itertools.count(0.0, EVERY_S)
        self.watch.stalls = StallWatch(3.0, print, lambda: next(clock))
        own = Identity("vm", process, [])
        host = SimpleNamespace(_actor_id=identifier)
        self.watch.ranks, self.watch._own_node = [ray_ranks.Rank(name, host, Machine("own", ITSELF, 1), own)], "own"
        monkeypatch.setattr(ray_ranks.ray, "wait", self._wait)

    def _wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return ([], refs) if self.child.poll() is None else (refs, [])


@pytest.mark.parametrize(
    "name, replaces, goes_on",
    [
        ("rollout 0", True, True),
        ("reward_model 0", True, True),
        ("rollout 0", False, False),
        ("rank 0", True, False),
        ("critic 0", True, False),
    ],
)
def test_a_stopped_worker_of_a_pool_is_ended_and_the_others_waited_for_only_where_it_is_replaced(
    monkeypatch, name, replaces, goes_on
):
    stopped = StoppedWorker(name, monkeypatch)
    stopped.watch.replaced_alone = {"rollout", "reward_model"} if replaces else set()
    try:
        if not goes_on:
            with pytest.raises(WorkerStopped):
                stopped.watch.wait([stopped.ref])
            assert stopped.child.poll() is None  # ended with all others
            return
        assert stopped.watch.wait([stopped.ref])[0] == [stopped.ref]
        assert stopped.child.wait() == -signal.SIGKILL
        (rank,) = stopped.watch.ranks
        death = stopped.watch._death(RuntimeError("the actor died"), rank)
        assert isinstance(death, WorkerStopped) and death.worker == name and stopped.watch.can_be_replaced(death)
    finally:
        stopped.child.kill()
        stopped.child.wait()


def test_the_output_of_a_stopped_worker_is_kept_before_another_takes_its_place(monkeypatch, tmp_path):
    stopped = StoppedWorker("rollout 0", monkeypatch)
    try:
        from posttrain.controller.ray_ranks import Rank

        watch, (old,) = stopped.watch, stopped.watch.ranks
        assert old.identity is not None
        printed = tmp_path / "worker-1.out"
        printed.write_text("its last words\n")
        old.identity.files.append(str(printed))
        watch.logs = tmp_path
        monkeypatch.setattr(watch, "_meet", lambda ranks, wait_s: None)
        new = Rank("rollout 0", old.host, old.machine)
        watch.replace([new], 1.0)
        assert watch.ranks == [new] and printed.name in watch.kept
        assert (tmp_path / "workers.log").read_text().splitlines()[1:] == ["its last words"]
    finally:
        stopped.child.kill()
        stopped.child.wait()


def test_an_old_answer_of_another_machine_says_nothing_of_a_worker_that_was_replaced(monkeypatch):
    pytest.importorskip("ray")
    from posttrain.controller import ray_ranks
    from posttrain.controller.ray_cluster import Machine

    def rank(number: int, pid: int) -> ray_ranks.Rank:
        machine = Machine("there", "10.0.0.2", 1)
        return ray_ranks.Rank(f"rollout {number}", None, machine, Identity("b", Process(pid, 7), []))

    old, other = rank(0, 5), rank(1, 6)
    watch = ray_ranks.RankWatch(3.0, print)
    observer = SimpleNamespace(look=SimpleNamespace(remote=lambda processes: None))
    watch.ranks = [old, other]
    watch._observers = {"there": (observer, ray_ranks._Asked("ref", [old.who, other.who]))}
    stopped, waiting = State("T", 1.0), State("S", 1.0)
    monkeypatch.setattr(ray_ranks.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray_ranks.ray, "get", lambda ref: [stopped, waiting])
    assert watch._states() == {old.who: stopped, other.who: waiting}
    watch.ranks = [rank(0, 9), other]
    assert watch._states() == {other.who: waiting}


def test_the_loss_of_a_worker_is_noticed_though_one_before_it_does_not_answer(monkeypatch):
    pytest.importorskip("ray")
    from posttrain.controller.ray_ranks import RankWatch

    watch, lost = RankWatch(3.0, print), WorkerDied("it died")
    lost.worker = "rank 1"
    monkeypatch.setattr(watch, "wait", lambda refs: ([refs[-1]], refs[:-1]))  # the last of them answers first

    def read(ref: str) -> str:
        if ref == "silent":
            pytest.fail("it would be waited for without end")
        if ref == "lost":
            raise lost
        return ref

    with pytest.raises(WorkerDied, match="it died"):
        watch.gather_from_others(["silent", "lost"], read, "")
    lost.worker, watch.replaced_alone = "rollout 1", {"rollout"}
    assert watch.gather_from_others(["answer", "lost"], read, "missing") == ["answer", "missing"]


def test_rows_that_are_lost_with_their_worker_are_a_lost_worker_and_named_by_it_where_ray_knows(monkeypatch):
    ray = pytest.importorskip("ray")
    from posttrain.controller.rank_host import Failure, RayHolder, Refs, _portable, pack
    from posttrain.controller.ray_ranks import RankWatch

    def get(ref: Any) -> Any:
        raise ray.exceptions.OwnerDiedError("ab" * 14, None, "")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(WorkerDied, match="lost with the worker, or the machine, that had made them") as lost:
        RayHolder(Refs([None]), 0).get()
    watch, answer = RankWatch(3.0, print), pack(Failure(_portable(lost.value), 1, "its trace"))
    monkeypatch.setattr(watch, "plain", lambda ref: answer)
    monkeypatch.setattr(watch, "_states", dict)
    with pytest.raises(PeerLost, match="that had made them"):
        watch.fetch("ref")
    named = WorkerDied("Rank 1 died")
    monkeypatch.setattr(watch, "_word_of_peers", lambda: named)
    with pytest.raises(WorkerDied, match="Rank 1 died") as death:
        watch.fetch("ref")
    assert "that had made them" in str(death.value.__cause__)


def test_the_driver_reads_rows_of_a_worker_as_it_waits_for_an_answer_and_notices_that_it_is_stopped(monkeypatch):
    ray = pytest.importorskip("ray")
    from posttrain.controller.rank_host import RayHolder, Refs, pack, unpack
    from posttrain.controller.ray_ranks import RankWatch

    def wait(refs: Any) -> Any:
        if refs == ["rows"]:
            raise WorkerStopped("Rank 1 has been stopped")
        return refs, []

    watch, answer = RankWatch(3.0, print), pack({"rows": RayHolder(Refs(["rows"]), 0)})
    monkeypatch.setattr(ray, "get", {"answer": answer, "rows": {}}.get)
    monkeypatch.setattr(watch, "wait", wait)
    with pytest.raises(WorkerStopped, match="Rank 1 has been stopped"):
        watch.fetch("answer")["rows"].get()
    assert unpack(pack(watch.fetch("answer")))["rows"].get() == {}  # sent on to a rank, which the driver watches

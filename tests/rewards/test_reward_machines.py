"""Rewards that other machines compute: real worker processes behind a host that is called as a Ray actor is."""

from __future__ import annotations

import gc
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray")
from other_machines import other_hosts
from patience import until

from posttrain.config.rollout import CustomRewardConfig
from posttrain.machines import cluster
from posttrain.rewards.crew import Task
from posttrain.rewards.loading import resolve_reward
from posttrain.rewards.pool import RewardPool
from posttrain.rewards.types import RewardItem


@pytest.fixture
def others(monkeypatch):
    with other_hosts(monkeypatch, 2) as made:
        yield made


FILE = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(60 if solution_str == "slow" else 0.02)
    if solution_str == "exit":
        os._exit(3)
    seen = os.environ.get("OF_THE_DRIVER", "")
    return {"score": float(solution_str == ground_truth), "process": os.getpid(), "seen": seen}
"""


@pytest.fixture
def pool(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    with RewardPool(resolve_reward(CustomRewardConfig(path=str(tmp_path / "own.py"))), num_workers=1) as made:
        yield made


def items(first: int, count: int) -> list[tuple[int, RewardItem]]:
    return [(number, RewardItem("x", str(number), str(number // 2 * 2))) for number in range(first, first + count)]


def score_until_all_work(pool: RewardPool, hosts: list[Any], first: int) -> dict[Any, Any]:
    """Scores of as many items as it takes until the driver's worker and those of two other machines have computed."""
    found: dict[Any, Any] = {}
    while len({result.parts["process"] for result in found.values()}) < 3 and len(found) < 3000:
        pool.submit_many(items(first + len(found), 30))
        found |= pool.wait_all()
    processes = {result.parts["process"] for result in found.values()}
    assert len(processes) == 3 and processes >= {*hosts[0].processes(), *hosts[1].processes()}
    return found


def test_scores_come_from_all_machines_with_the_drivers_variables_and_are_those_of_one(pool, others):
    hosts, machines = others
    said: list[str] = []
    pool.spread(machines, said.append)
    assert said == ["Reward workers: 3 on 3 machines."]
    found = score_until_all_work(pool, hosts, 0)
    assert all(result.score == float(number % 2 == 0) and not result.error for number, result in found.items())
    there = [result for result in found.values() if result.parts["process"] in hosts[0].processes()]
    assert {result.parts["seen"] for result in there} == {"1"}


def test_nothing_is_left_open_when_the_machines_of_a_run_are_given_up(monkeypatch):
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):  # a run that starts all workers again meets its machines anew
        with other_hosts(monkeypatch, 2):
            pass
    until(lambda: descriptors() <= before, "descriptors to be closed")  # threads see that their machine is gone


def test_a_machine_that_is_lost_fails_no_score(pool, others):
    hosts, machines = others
    pool.spread(machines, print)
    pool.submit_many(items(0, 10))
    assert len(pool.wait_all()) == 10
    pool.submit_many(items(10, 200))
    hosts[0].end()
    found = pool.wait_all()
    assert len(found) == 200 and not [result.error for result in found.values() if result.error]
    assert pool._crew.places.room == 2  # the driver's, and the other machine's


def test_a_task_that_had_its_second_try_is_not_blamed_for_a_machine_that_is_lost(tmp_path, others, monkeypatch):
    hosts, machines = others
    goes_on = tmp_path / "goes_on"
    waits = f"import os, time\n\ndef compute_score(**given):\n    while not os.path.exists({str(goes_on)!r}):\n"
    (tmp_path / "own.py").write_text(waits + "        time.sleep(0.02)\n    return 1.0\n")
    monkeypatch.setattr("posttrain.rewards.pool.Task", partial(Task, killed_once=True))
    with RewardPool(resolve_reward(CustomRewardConfig(path=str(tmp_path / "own.py"))), num_workers=1) as pool:
        pool.spread(machines, print)
        pool.submit_many(items(0, 3))
        until(lambda: [len(one.pending) for one in pool._crew._workers] == [1] * 3, "for all workers to have a task")
        for host in hosts:
            host.end()
        until(lambda: pool._crew.places.room == 1, "for the machines to be left out")
        goes_on.write_text("")
        found = pool.wait_all()
    assert [found[number].score for number in range(3)] == [1.0] * 3


@pytest.mark.slow
def test_a_machine_that_stands_still_fails_no_score_and_is_left_out(tmp_path, others, monkeypatch):
    """Its host is stopped and stays connected, so that Ray reports nothing."""
    hosts, machines = others
    (tmp_path / "own.py").write_text(FILE)
    spec, said = resolve_reward(CustomRewardConfig(path=str(tmp_path / "own.py"))), list[str]()
    monkeypatch.setattr(cluster, "LOOKUP_S", 0.2)
    with RewardPool(spec, num_workers=1, timeout_s=5.0) as pool:
        pool.spread(machines, said.append)
        score_until_all_work(pool, hosts, 0)
        hosts[0].hang()
        pool.submit_many(items(5000, 200))
        found = pool.wait_all()
        assert len(found) == 200 and not [result.error for result in found.values() if result.error]
        assert pool._crew.places.room == 2
        hosts[0].goes_on.set()
        until(lambda: pool._crew.places.room == 3, "for a machine that goes on")
        monkeypatch.setattr(cluster, "SILENT_LOOKS", 5)  # read anew with each request
        hosts[1].hang()
        until(lambda: pool._crew.places.room == 2, "for a machine to be left out")
    assert said[1:] == ["note: rewards are not computed on 10.0.0.3 any more: it did not answer for 1 s"]


def test_a_machine_that_does_not_answer_has_printed_nothing_and_the_others_are_asked(others, monkeypatch):
    hosts, machines = others
    monkeypatch.setattr(cluster, "LOOKUP_S", 0.2)
    monkeypatch.setattr(hosts[1].host, "printed", lambda: ["its lines"])
    hosts[1].printed.method = hosts[1].host.printed
    hosts[0].hang()
    assert list(machines.printed()) == [("10.0.0.2", []), ("10.0.0.3", ["its lines"])]


@pytest.mark.slow
def test_a_stopped_worker_of_another_machine_fails_no_score(tmp_path, others):
    hosts, machines = others
    (tmp_path / "own.py").write_text(FILE)
    spec = resolve_reward(CustomRewardConfig(path=str(tmp_path / "own.py")))
    with RewardPool(spec, num_workers=1, timeout_s=5.0) as pool:
        pool.spread(machines, print)
        score_until_all_work(pool, hosts, 0)
        os.kill(hosts[0].processes()[0], signal.SIGSTOP)
        pool.submit_many(items(5000, 200))
        found = pool.wait_all()
    assert len(found) == 200 and not [result.error for result in found.values() if result.error]


def test_machines_that_are_lost_while_their_workers_start_are_left_out_and_the_reward_is_not_blamed(tmp_path, others):
    hosts, machines = others
    (tmp_path / "own.py").write_text(FILE)
    spec, said = resolve_reward(CustomRewardConfig(path=str(tmp_path / "own.py"))), list[str]()
    with RewardPool(spec, num_workers=4) as pool:
        pool.spread(machines, said.append)
        until(lambda: all(len(host.processes()) == 4 for host in hosts), "for eight processes to start")
        for host in hosts:
            host.end()
        pool.submit_many(items(0, 50))
        found = pool.wait_all()
        assert len(found) == 50 and not [result.error for result in found.values() if result.error]
        assert pool._crew.places.room == 4
    why = "note: rewards are not computed on 10.0.0.{} any more: it was lost"
    assert sorted(said[1:]) == [why.format(2), why.format(3)]


def test_a_machine_on_which_something_else_hangs_when_it_is_made_computes_rewards_meanwhile(pool, others):
    hosts, machines = others
    pool.spread(machines, print)
    hang = threading.Event()
    with ThreadPoolExecutor(1) as threads:  # waits for its thread, which would call a real Ray after the test
        try:
            waiting = threads.submit(machines.prepare, "tools", hang.wait, "tools do not run", print)
            score_until_all_work(pool, hosts, 0)
            assert not waiting.done()
        finally:
            hang.set()


@pytest.mark.slow
def test_a_machine_that_can_start_no_process_any_more_is_left_out(pool, others, monkeypatch):
    """It would always seem to be the idlest one, and get all work."""
    hosts, machines = others
    said: list[str] = []
    pool.spread(machines, said.append)
    score_until_all_work(pool, hosts, 0)
    monkeypatch.setattr(hosts[0].host._starters["rewards"], "start", Mock(side_effect=OSError("out of processes")))
    pool.submit_many([("exit" + str(one), RewardItem("x", "exit", "")) for one in range(30)])
    errors = {result.error for result in pool.wait_all().values()}
    assert errors == {"the worker process ended (exit code 3)"}
    assert pool._crew.places.room == 2
    assert said[1:] == ["note: rewards are not computed on 10.0.0.2 any more: out of processes"]


def test_a_reward_that_exits_or_hangs_on_another_machine_fails_its_sample_alone(tmp_path, others):
    (tmp_path / "own.py").write_text(FILE)
    spec = resolve_reward(CustomRewardConfig(path=str(tmp_path / "own.py")))
    with RewardPool(spec, num_workers=1, timeout_s=1.0) as pool:
        pool.spread(others[1], print)
        errors = dict[str, set[str | None]]()
        for number, how in enumerate(("exit", "slow"), 1):
            score_until_all_work(pool, others[0], 10_000 * number)
            pool.submit_many([(how + str(one), RewardItem("x", how, "")) for one in range(3)])  # one for each worker
            errors[how] = {result.error for result in pool.wait_all().values()}
    assert errors == {"exit": {"the worker process ended (exit code 3)"}, "slow": {"took longer than 1 s"}}


def test_a_machine_that_cannot_isolate_programs_is_left_out_and_says_why(tmp_path, others):
    hosts, machines = others
    (tmp_path / "own.py").write_text(FILE)

    def check() -> None:
        raise RuntimeError("user namespaces are off")

    said: list[str] = []
    spec = resolve_reward(CustomRewardConfig(path=str(tmp_path / "own.py")))
    with RewardPool(spec, num_workers=1, check_machine=check) as pool:
        pool.spread(machines, said.append)
        pool.submit_many(items(0, 5))
        assert len(pool.wait_all()) == 5
    why = "user namespaces are off"
    assert said == [f"note: rewards are not computed on 10.0.0.{number}: {why}" for number in (2, 3)]
    assert not hosts[0].processes()

"""Rewards that other machines compute: real worker processes behind a host that is called as a Ray actor is."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray")
import ray

from posttrain.config import load_config
from posttrain.config.rollout import CustomRewardConfig
from posttrain.rewards import machines as module
from posttrain.rewards.loading import resolve_reward
from posttrain.rewards.machines import Machine, Machines, RewardHost
from posttrain.rewards.pool import RewardPool
from posttrain.rewards.types import RewardItem
from posttrain.trainer.ppo.reward import spread_rewards


class Called:
    """A method of the host, called in a thread of its own as Ray does."""

    def __init__(self, method: Any, threads: ThreadPoolExecutor) -> None:
        self.method, self.threads = method, threads

    def remote(self, *arguments: Any) -> Future[Any]:
        return self.threads.submit(self.method, *arguments)

    def options(self, **_: Any) -> Called:
        return self


class Host:
    """A RewardHost in this process; `end` loses its machine."""

    def __init__(self) -> None:
        self.host, self.gone = RewardHost(os.getcwd(), {"OF_THE_DRIVER": "1"}), False
        changing, reading = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        for name in ("start", "write", "kill"):
            setattr(self, name, Called(getattr(self.host, name), changing))
        self.read = Called(self._read, reading)

    def _read(self) -> Any:
        if self.gone:
            raise ConnectionError("the machine is lost")
        return self.host.read()

    def processes(self) -> list[int]:
        return [worker.process.pid for worker in self.host._workers.values()]

    def end(self) -> None:
        self.gone = True
        for process in self.processes():
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def hosts(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda future: future.result())
    monkeypatch.setattr(ray, "kill", Host.end)
    monkeypatch.setattr(module, "LOOK_S", 0.2)
    return [Host(), Host()]


FILE = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.02)
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


def test_scores_come_from_all_machines_with_the_drivers_variables_and_are_those_of_one(pool, hosts):
    places = Machines([Machine(host, f"10.0.0.{n}", 1) for n, host in enumerate(hosts, 2)], here=1)
    pool.spread(places)
    assert places.room == 3
    found: dict[Any, Any] = {}
    by_host: list[set[int]] = []
    first = 0
    while len({result.parts["process"] for result in found.values()}) < 3 and first < 3000:
        pool.submit_many(items(first, 30))
        found |= pool.wait_all()
        by_host = [set(host.processes()) for host in hosts]
        first += 30
    assert {int(result.parts["process"]) for result in found.values()} >= by_host[0] | by_host[1]
    assert all(result.score == float(number % 2 == 0) and not result.error for number, result in found.items())
    assert {result.parts["seen"] for result in found.values() if result.parts["process"] in by_host[0]} == {"1"}
    places.close()


def test_a_machine_that_is_lost_fails_no_score(pool, hosts):
    places = Machines([Machine(host, f"10.0.0.{n}", 1) for n, host in enumerate(hosts, 2)], here=1)
    pool.spread(places)
    pool.submit_many(items(0, 10))
    assert len(pool.wait_all()) == 10
    pool.submit_many(items(10, 200))
    hosts[0].end()
    found = pool.wait_all()
    assert len(found) == 200 and not [result.error for result in found.values() if result.error]
    assert places.room == 2  # the driver's, and the other machine's
    places.close()


def test_a_machine_that_cannot_isolate_programs_says_why():
    def no_namespaces() -> None:
        raise RuntimeError("user namespaces are off")

    host = RewardHost("/nowhere", {})
    assert host.check(None)[1] == "" and host.check(partial(no_namespaces))[1] == "user namespaces are off"


def test_other_machines_score_only_in_a_ray_and_where_the_setting_says_so(monkeypatch):
    entered: list[Any] = []
    monkeypatch.setattr(module, "other_machines", lambda count, *_: nullcontext(entered.append(count) or "machines"))
    for given, in_ray, spread in (([], True, 1), ([], False, 0), (["reward.on_all_machines=False"], True, 0)):
        limits = load_config(["preset=embedded", "reward.num_workers=3", *given]).config.reward
        pool = Mock()
        with ExitStack() as stack:
            spread_rewards(stack, pool, limits, Mock(in_ray=in_ray), print)
        assert pool.spread.call_count == spread
    assert entered == [3]

"""Which machines of a Ray a run's ranks live on, from what Ray says of its nodes."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.errors import UserError

pytest.importorskip("ray")
from posttrain.controller import ray_cluster
from posttrain.controller.ray_cluster import Machine, choose_machines, free_gpus, machines_for, rollout_machines
from posttrain.controller.ray_pool import places_words


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "NodeManagerAddress": f"10.0.0.{name}", "Resources": resources}


NODES = [
    node("1", CPU=8.0, GPU=4.0),
    node("2", CPU=16.0, GPU=8.0),
    node("3", CPU=16.0, GPU=8.0, alive=False),
    node("4", CPU=4.0),
    node("5", CPU=32.0, GPU=8.0),
]


def test_machines_are_alive_have_the_gpus_and_begin_with_the_commands_own():
    taken = choose_machines(NODES, "5", 2, 8, "cuda")
    assert [(machine.id, machine.address, machine.cores) for machine in taken] == [
        ("5", "10.0.0.5", 32),
        ("2", "10.0.0.2", 16),
    ]
    assert [machine.id for machine in choose_machines(NODES, "4", 3, 4, "cuda")] == [
        "1",
        "2",
        "5",
    ]  # its own has no GPU
    assert [machine.id for machine in choose_machines(NODES, "4", 4, 9, "cpu")] == ["4", "1", "2", "5"]


def test_too_few_machines_are_counted_in_words():
    with pytest.raises(UserError, match=r"nnodes=3: the Ray of this run has 2 machine\(s\) with 8 GPU\(s\), 4 in all"):
        choose_machines(NODES, "5", 3, 8, "cuda")
    with pytest.raises(UserError, match=r"nnodes=5: the Ray of this run has 4 machine\(s\), 4 in all"):
        choose_machines(NODES, "5", 5, 1, "cpu")


def test_workers_that_generate_take_the_free_gpus_those_of_machines_in_use_first():
    rooms = free_gpus(NODES, "5", 8, {"5": 6, "1": 4})
    assert [machine.id for machine in rooms] == ["5", "5", *["2"] * 6]  # 1 is full, 3 is gone, 4 has none
    with pytest.raises(UserError, match=r"rollout\.n_workers=11: .*has 10 free GPU\(s\) on 4 machine"):
        free_gpus(NODES, "5", 11, {"5": 6, "1": 4})


def test_on_a_cpu_the_machines_that_train_share_those_that_generate():
    two = [Machine("1", "10.0.0.1", 8), Machine("2", "10.0.0.2", 8)]
    assert [machine.id for machine in rollout_machines(3, 4, two, "cpu")] == ["1", "2", "1"]


def test_places_are_told_as_gpus_or_as_processes_with_their_cores():
    assert places_words([("a", [5], 11, 1), ("a", [4], 12, 1), ("b", [0], 13, 1)]) == "GPUs 4, 5 of a; GPU 0 of b"
    assert places_words([("a", [], 11, 3), ("a", [], 12, 3)]) == "processes 11, 12 of a, 3 cores each"
    assert places_words([("a", [], 11, 1)]) == "process 11 of a, a core"


@pytest.fixture
def cluster(monkeypatch):
    """A Ray that shows one machine more each time that it is asked; a second passes between."""
    asked, clock = [], [0.0]

    def nodes() -> list[dict[str, Any]]:
        asked.append(clock[0])
        return [node(str(number), CPU=4.0) for number in range(len(asked))]

    context = type("Context", (), {"get_node_id": lambda self: "0"})
    monkeypatch.setattr(ray_cluster.ray, "get_runtime_context", context)
    monkeypatch.setattr(ray_cluster.ray, "nodes", nodes)
    monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray_cluster.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    return asked


def test_machines_that_join_late_are_waited_for_and_the_user_is_told_once(cluster):
    told: list[str] = []
    taken = machines_for(3, 1, "cpu", told.append)
    assert [machine.id for machine in taken] == ["0", "1", "2"] and cluster == [0.0, 1.0, 2.0]
    assert len(told) == 1 and told[0].startswith("Waiting 60 s for machines to join. trainer.nnodes=3: the Ray of")


def test_machines_that_only_come_now_are_given_longer_and_counted(cluster):
    told: list[str] = []
    assert len(machines_for(200, 1, "cpu", told.append, coming=True)) == 200
    assert told == ["Waiting 300 s for machines to join. 1 of 200 are here."]


def test_machines_that_never_join_are_an_error_after_a_minute(cluster):
    with pytest.raises(UserError, match=r"nnodes=1000: the Ray of this run has 62 machine\(s\)"):
        machines_for(1000, 1, "cpu", lambda words: None)
    assert cluster[-1] == 61.0

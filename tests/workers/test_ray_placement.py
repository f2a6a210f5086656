"""What a run reserves of a Ray: what is free counts, what is missing is listed, and all of it is given back."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray")
import ray
from ray.cluster_utils import Cluster

from posttrain import cores
from posttrain.controller.pool import RolePool
from posttrain.controller.ray_cluster import Machine
from posttrain.controller.ray_placement import (
    NoRoom,
    Placement,
    Resources,
    Seat,
    cpu_share,
    no_room,
    role_pool,
    training_pool,
    with_addresses,
)
from posttrain.controller.ray_pool import places_words

GENERATING = RolePool("rollout", 14, "actor_rollout_ref.rollout.n_workers", team=2)


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "NodeManagerAddress": f"10.0.0.{name}", "Resources": resources}


def test_what_is_missing_is_listed_with_what_was_asked_for_and_what_took_the_rest():
    free = [("10.0.0.1", 0.0, 0.0), ("10.0.0.2", 3.0, 8.0), ("10.0.0.5", 8.0, 8.0)]
    facts = Resources("GPU", free, ["5 GPUs of 10.0.0.2 by job 02000000"])
    lines = no_room(training_pool("cuda", 3, 8), 300, facts).splitlines()
    assert lines[:5] == [
        "Ray had no room for the training workers within 300 s (trainer.placement_timeout_s).",
        "  asked: 3 machines x 8 GPUs (trainer.nnodes=3, trainer.n_gpus_per_node=8)",
        "  free now: 10.0.0.1: no GPU; 10.0.0.2: 3 of 8 GPUs; 10.0.0.5: 8 of 8 GPUs",
        "  missing: 2 machines x 8 GPUs",
        "  taken: 5 GPUs of 10.0.0.2 by job 02000000",
    ]
    assert "  missing: 2 x 2 GPUs" in no_room(role_pool("cuda", GENERATING, 2), 5, facts)  # room for 1 + 4 of 7 teams


def test_workers_take_a_core_each_or_a_part_where_there_are_fewer():
    laptop, large, headless = [node("1", CPU=2.0)], [node("1", CPU=64.0), node("2", CPU=64.0)], node("9", CPU=0.0)
    assert cpu_share(large, "1", 0, 2, 8, 4) == 1.0
    assert cpu_share(laptop, "1", 0, 1, 2, 0) == 1.0 and cpu_share(laptop, "1", 0, 1, 3, 0) == 0.5
    assert cpu_share(laptop, "1", 0, 1, 2, 4) == 0.3333  # six workers on two cores
    assert cpu_share([*large[:1], *laptop], "1", 0, 2, 4, 0) == 0.5  # as the smaller machine requires
    assert cpu_share(laptop, "1", 1.0, 1, 2, 0) == 0.5  # the driver is an actor that has one of the two
    assert cpu_share([headless, *laptop], "9", 0, 1, 2, 0) == 1.0
    assert cpu_share(laptop, "1", 0, 3, 1, 0) == 1.0  # two more are still to come
    assert cpu_share([headless], "9", 0, 2, 8, 0) == 1.0  # the others are still to come


def test_workers_of_the_drivers_own_machine_share_the_cores_that_may_be_used(monkeypatch):
    monkeypatch.setattr(cores, "usable", lambda: 6)
    here, there = (Seat(Machine(name, f"10.0.0.{name}", 64), Mock(), 0) for name in "12")
    assert [seat.machine for seat in with_addresses([here, here], "1")] == [Machine("1", "127.0.0.1", 6)] * 2
    assert with_addresses([there], "1")[0].machine == Machine("2", "127.0.0.1", 64)
    assert with_addresses([here, there], "1") == [here, there]


def test_places_are_told_as_gpus_or_as_processes_with_their_cores():
    assert places_words([("a", [5], 11, 1), ("a", [4], 12, 1), ("b", [0], 13, 1)]) == "GPUs 4, 5 of a; GPU 0 of b"
    assert places_words([("a", [], 11, 3), ("a", [], 12, 3)]) == "processes 11, 12 of a, 3 cores each"
    assert places_words([("a", [], 11, 1)]) == "process 11 of a, a core"


@pytest.fixture(scope="module")
def cluster():
    """A head without cores or GPUs, and two nodes that say they have two GPUs each."""
    small = {"object_store_memory": 80_000_000}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    for _ in range(2):
        made.add_node(num_cpus=2, num_gpus=2, **small)
    ray.init(made.address, log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()


OTHER_RUN = """
import sys, time, ray
from posttrain.controller.ray_placement import Placement
ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
Placement("cuda", 2, 1)
print("placed", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_only_what_is_free_is_taken_and_a_killed_run_gives_back_what_it_had(cluster):
    head = ray.get_runtime_context().get_node_id()
    with subprocess.Popen([sys.executable, "-c", OTHER_RUN, cluster.address], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "placed\n"
        told: list[str] = []
        with pytest.raises(NoRoom, match="asked: 1 machine x 2 GPUs") as missing:  # each has 2, and 1 of them is free
            Placement("cuda", 1, 2, wait_s=5, tell=told.append)
        assert "1 of 2 GPUs" in str(missing.value) and "missing: 1 machine x 2 GPUs" in str(missing.value)
        assert re.search(rf"taken: .*GPUs? of .* by job \w+ \(process {run.pid} on", str(missing.value))
        assert len(told) == 1 and told[0].startswith("Waiting for up to 5 s (trainer.placement_timeout_s)")
        with pytest.raises(NoRoom, match="the rollout workers") as full:
            # And its training workers hold nothing afterwards.
            Placement("cuda", 2, 1, [RolePool("rollout", 1, "rollout.n_workers")], wait_s=1)
        assert full.value.machines == 1  # with one machine less that trains there is room for it
        rest = Placement("cuda", 2, 1, wait_s=30)
        rest.close()
        run.kill()
    pools = [RolePool("rollout", 2, "rollout.n_workers")]
    all_four = Placement("cuda", 2, 1, pools, wait_s=60)  # the killed run's are free again
    all_four.close()
    assert {seat.machine.id for seat in rest.training} == {seat.machine.id for seat in all_four.training}
    assert head not in {seat.machine.id for seat in (*rest.training, *all_four.own["rollout"])}


@pytest.mark.slow
def test_a_head_without_cores_gets_no_worker_and_one_machine_uses_the_loopback_interface(cluster):
    head = ray.get_runtime_context().get_node_id()
    one, two = Placement("cpu", 1, 2, wait_s=30), Placement("cpu", 1, 2, wait_s=30)
    homes = [{(seat.machine.id, seat.machine.address) for seat in made.training} for made in (one, two)]
    one.close()
    two.close()
    assert all(len(home) == 1 for home in homes) and homes[0].isdisjoint(homes[1])
    assert {address for home in homes for _, address in home} == {"127.0.0.1"}
    assert head not in {machine for home in homes for machine, _ in home}

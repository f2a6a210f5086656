"""Workers of one's own in a RayWorkerGroup: spread by their marks, sharing processes, gone with the program."""

import os
from pathlib import Path

import pytest
import torch
from ray_workers import Adder, Other, Third

from verl import DataProto
from verl.single_controller.base.decorator import (
    Dispatch,
    register,
    register_dispatch_mode,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role

pytestmark = pytest.mark.slow
COMPAT = str(Path(__file__).resolve().parents[2] / "compat")


@pytest.fixture(scope="module")
def ray(forked):
    """A Ray for these tests, ended after them; its processes are forks."""
    import ray

    from posttrain.controller.ray_cluster import RayCluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([COMPAT, os.environ.get("PYTHONPATH", "")]))
        cluster = RayCluster(2, {"runtime_env": {"py_executable": forked.python}})
        cluster.start()
        yield ray
        cluster.stop()


def batch(rows=4):
    return DataProto.from_dict({"x": torch.zeros(rows, 1)}, {"n": [str(row) for row in range(rows)]})


def test_a_workers_methods_are_the_groups(ray):
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Adder), step=1.0))
    assert group.world_size == 2 and group.where("r") == ["r0/2", "r1/2"]
    made = group.add(batch())
    assert made.batch["x"].flatten().tolist() == [1, 1, 2, 2] and made.meta_info == {"metrics": {"rows": [2, 2]}}
    assert made.non_tensor_batch["n"].tolist() == ["0", "1", "2", "3"]
    later = group.add_later(batch())
    assert later.get().batch["x"].flatten().tolist() == [1, 1, 2, 2]
    assert group.add(later).batch["x"].flatten().tolist() == [2, 2, 4, 4]  # a future serves as a batch
    assert group.first() == "0" and group.own([1, 2]) == [10, 20]
    assert group.execute_all_sync("unmarked") == ["here", "here"] and not hasattr(group, "unmarked")
    with pytest.raises(AssertionError):
        group.add(batch(3))

    pair = create_colocated_worker_cls({"a": RayClassWithInitArgs(Other), "b": RayClassWithInitArgs(ray.remote(Third))})
    shared = RayWorkerGroup(RayResourcePool([1], use_gpu=False), pair).spawn(prefix_set={"a", "b"})
    assert shared["a"].process() == shared["b"].process() != [os.getpid()]


def test_modes_of_dispatch_can_be_added():
    register_dispatch_mode("BACKWARDS", lambda group, numbers: ([numbers[::-1]], {}), lambda group, output: output)
    try:
        assert Dispatch.BACKWARDS in Dispatch and "BACKWARDS" in Dispatch.names()
        register(dispatch_mode=Dispatch.BACKWARDS)(lambda self: None)
    finally:
        Dispatch.remove("BACKWARDS")
    with pytest.raises(AssertionError):
        register(dispatch_mode="ONE_TO_ALL")


def test_pools_of_roles():
    manager = ResourcePoolManager(
        {"global_pool": [1, 1]}, {Role.ActorRollout: "global_pool", Role.Critic: "global_pool"}
    )
    manager.create_resource_pool()
    assert manager.get_n_gpus() == 2 and manager.get_resource_pool(Role.Critic).world_size == 2

"""A driver without GPUs, as on the head of many clusters: its workers have those of other machines."""

from __future__ import annotations

import importlib.util
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from posttrain.config import load_config
from posttrain.config.resolved import ConfigError
from posttrain.trainer.run import process
from posttrain.trainer.run.memory import plan_memory
from posttrain.trainer.run.process import find_run_device, open_workers

pytest.importorskip("ray")
from posttrain.controller import ray_cluster, ray_pool
from posttrain.controller.ray_address import NoRayThere
from posttrain.controller.ray_cluster import RayCluster

HOST = "10.0.0.1:6379"


@pytest.fixture(autouse=True)
def no_gpus_here(monkeypatch):
    monkeypatch.setattr("posttrain.config.environment.gpus_present", lambda: 0)
    monkeypatch.setattr("posttrain.config.trainer.gpus_present", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RAY_ADDRESS", "RAY_HEAD_ADDRESS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_gpus_of_a_named_cluster_are_used_and_without_one_they_are_missing(monkeypatch):
    wanted = ["trainer.device=cuda", "trainer.n_gpus_per_node=8"]
    with pytest.raises(ConfigError, match=r"(?s)this machine shows no GPU.*RAY_ADDRESS=HOST:6379"):
        load_config(wanted, environment=True)
    monkeypatch.setenv("RAY_ADDRESS", HOST)
    load_config(wanted, environment=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"posttrain\[ray\]"):
        load_config(["trainer.device=cuda"], environment=True)


def test_auto_is_the_device_of_the_cluster_and_of_this_machine_where_none_answers(monkeypatch):
    def device(has_gpus: Any) -> tuple[str, str]:
        monkeypatch.setattr(ray_cluster, "has_gpus", has_gpus)
        settings = load_config(["preset=embedded"]).config.trainer
        return find_run_device(settings).type, settings.device

    assert device(Mock(side_effect=AssertionError("no address is given"))) == ("cpu", "auto")
    monkeypatch.setenv("RAY_ADDRESS", HOST)
    assert device(lambda: True) == ("cuda", "cuda")
    assert device(lambda: False) == ("cpu", "auto")
    assert device(Mock(side_effect=NoRayThere("no Ray answers"))) == ("cpu", "auto")


def test_one_worker_on_a_gpu_elsewhere_is_a_process_of_its_own(monkeypatch):
    made = Mock(**{"return_value.cluster.was_there": False})
    monkeypatch.setattr(ray_pool, "RayWorkers", made)
    open_workers(load_config(["preset=embedded", "trainer.device=cuda"]).config, torch.device("cuda"), None)
    assert made.call_args.args == (1, torch.device("cuda"))
    open_workers(load_config(["preset=embedded"]).config, torch.device("cpu"), None)
    assert made.call_count == 1


def test_memory_is_planned_for_the_workers_gpu(monkeypatch):
    planned: list[Any] = []
    monkeypatch.setattr("posttrain.planning.budgets.apply_plan", lambda config, found, *_: planned.append(found) or [])
    config = load_config(["preset=embedded"]).config
    workers = Mock(**{"gpu.return_value": ("H200", 141 * 2**30, True)})
    plan_memory(config, torch.device("cuda"), set(), workers)
    assert (planned[0].words, planned[0].hopper, planned[0].kind) == ("H200, 141.0 GiB", True, "cuda")


def test_settings_for_the_start_of_a_ray_are_left_out_for_one_that_runs(monkeypatch):
    joined: list[dict[str, Any]] = []
    monkeypatch.setenv("RAY_ADDRESS", HOST)
    monkeypatch.setattr(ray_cluster, "connection_error", lambda address: None)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **named: joined.append(named))
    told: list[str] = []
    RayCluster(2, {"num_cpus": 8, "include_dashboard": False, "namespace": "mine"}, tell=told.append).start()
    assert joined[0]["namespace"] == "mine" and not joined[0].keys() & {"num_cpus", "include_dashboard"}
    assert told == [
        "note: trainer.ray_init.num_cpus, trainer.ray_init.include_dashboard not used: the Ray at 10.0.0.1:6379 was "
        "started with its own."
    ]


def test_a_dashboard_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aiohttp_cors" else Mock())
    with pytest.raises(ConfigError, match=r"posttrain\[cluster\]"):
        load_config(["trainer.ray_init.include_dashboard=True"], environment=True)
    load_config(["trainer.ray_init.include_dashboard=False"], environment=True)


def test_the_device_of_others_is_said(capsys):
    process.prepare_torch(load_config(["preset=embedded"]).config.trainer, torch.device("cuda"))
    assert "Device: cuda (of other machines; this one drives)" in capsys.readouterr().out

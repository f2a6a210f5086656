"""Reward models, and the ranks of one Ray for the tests of a file with the runs that they make."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sft"))
from reward_models import other_tokenizer, write_reward_model


@pytest.fixture(scope="session")
def rm_same(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with the policy's tokenizer and template."""
    return write_reward_model(tmp_path_factory.mktemp("rm") / "same")


@pytest.fixture(scope="session")
def rm_other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a tokenizer and a template of its own."""
    return write_reward_model(tmp_path_factory.mktemp("rm") / "other", tokenizer=other_tokenizer())


RAYS_OWN = ["ray_init.num_cpus=12", "ray_kwargs.ray_init.runtime_env.env_vars.SEEN_BY_RANKS=1", "trainer.n_workers=4"]


@pytest.fixture(scope="module")
def cluster(forked: Any) -> Iterator[Any]:
    """A Ray whose processes are forks: each would import all of posttrain for itself. Another machine joins it, so it
    is not on the loopback interface."""
    ray = pytest.importorskip("ray")
    from posttrain.config import load_config
    from posttrain.controller.ray_cluster import RayCluster

    forks = f"ray_kwargs.ray_init.runtime_env.py_executable={forked.python}"
    address = f"trainer.ray_init._node_ip_address={ray.util.get_node_ip_address()}"
    made = RayCluster(4, load_config([*RAYS_OWN, forks, address]).value("trainer.ray_init"))
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def ranks(cluster: Any) -> Iterator[Any]:
    """`ranks(n)`: workers on n of four processes, or on this one; `ranks((n, m))`: m others of them generate, and know
    each other where they are several; `ranks((n, {role: m}))`: m others have that role alone."""
    from textbook import CPU
    from toy_workers import Join

    from posttrain.controller.pool import LocalWorkers
    from posttrain.controller.rank_host import pack
    from posttrain.controller.ray_pool import RayWorkers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain.cores.usable", lambda: 4)  # one thread each on every machine
        four = RayWorkers(4, CPU, cluster)

    def workers(counts: int | tuple[int, int | dict[str, int]]) -> Any:
        if counts == 1:
            return LocalWorkers()
        count, others = counts if isinstance(counts, tuple) else (counts, 0)
        some = copy.copy(four)
        some.hosts, some.world_size = four.hosts[:count], count
        pools = others if isinstance(others, dict) else {"rollout": others} if others else {}
        # From the end, so that a process has the same rank in worlds of one size: torch keeps a mesh's shards by that.
        left = iter(four.hosts[len(four.hosts) - sum(pools.values()) :])
        some.own_hosts = {role: list(islice(left, size)) for role, size in pools.items()}
        ranked = []
        for hosts in (some.hosts, *some.own_hosts.values()):
            address = four.watch.fetch(hosts[0].free_address.remote())
            ranked += [(host, (rank, len(hosts), address)) for rank, host in enumerate(hosts)]
        four.watch.gather([host.build.remote("join", pack((Join, place, {}))) for host, place in ranked])
        some.close = lambda: None  # they serve further runs
        return some

    yield workers
    four.close()


@pytest.fixture(scope="module")
def runs(ranks: Any, tiny_model: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Whole runs on recorded rollouts, each made once."""
    from recorded_runs import Runs

    return Runs(ranks, tiny_model, sums, tmp_path_factory.mktemp("runs"))

"""Workers, their threads and reward processes are counted by the cores that this process may use."""

from __future__ import annotations

import pytest

from posttrain import cores
from posttrain.config import ConfigError, load_config


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(bound, **limits)`: 64 cores, of which a process is bound to some, in a container with these files."""

    def made(bound: int, **limits: str) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: 64)
        monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(bound)), raising=False)
        monkeypatch.setattr(cores, "CGROUPS", tmp_path)
        (tmp_path / "cpu").mkdir(exist_ok=True)
        for name, text in limits.items():
            (tmp_path / name.replace("__", "/").replace("_of_", ".")).write_text(text)

    return made


@pytest.mark.parametrize(
    ("bound", "limits", "usable"),
    [
        (64, {}, 64),
        (3, {}, 3),
        (64, {"cpu_of_max": "400000 100000\n"}, 4),
        (2, {"cpu_of_max": "400000 100000\n"}, 2),
        (64, {"cpu_of_max": "50000 100000\n"}, 1),
        (64, {"cpu_of_max": "max 100000\n"}, 64),
        (64, {"cpu__cpu_of_cfs_quota_us": "600000\n", "cpu__cpu_of_cfs_period_us": "100000\n"}, 6),
        (64, {"cpu__cpu_of_cfs_quota_us": "-1\n", "cpu__cpu_of_cfs_period_us": "100000\n"}, 64),
    ],
)
def test_cores_are_those_that_the_binding_and_the_containers_quota_leave(machine, bound, limits, usable):
    machine(bound, **limits)
    assert cores.usable() == usable


def test_more_workers_than_cores_that_may_be_used_are_refused(machine):
    machine(2)
    with pytest.raises(ConfigError, match=r"asks for 3 workers; this machine has 2 CPU core\(s\)"):
        load_config(["trainer.n_workers=3", "trainer.device=cpu"], environment=True)

"""What a run starts of Ray ends with it, and its end waits for nobody for ever."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
from posttrain.controller import ray_node
from posttrain.controller.ray_node import NICENESS, RayNode, Watched


def started(watched: Watched) -> subprocess.Popen[bytes]:
    with watched.environment({}):
        return subprocess.Popen(["sleep", "60"], env=dict(os.environ))


@pytest.mark.parametrize("own", [None, "7"])
def test_a_niceness_of_the_users_own_is_left_and_the_environment_is_as_before(own, monkeypatch):
    monkeypatch.delenv(NICENESS, raising=False)
    if own is not None:
        monkeypatch.setenv(NICENESS, own)
    watched, before = Watched(), dict(os.environ)
    with watched.environment({}):
        assert os.environ[NICENESS] == (own or "0")
    watched.close()
    assert dict(os.environ) == before


@pytest.mark.parametrize("killed", [False, True])
def test_what_was_started_ends_also_where_its_watcher_was_killed(killed):
    watched = Watched()
    process = started(watched)
    if killed:
        watched._watcher.kill()
    watched.close()
    assert process.wait(10) == -9 and not Path(watched.folder).exists()


def test_a_process_that_cannot_be_killed_does_not_hold_the_run(monkeypatch):
    """A watcher that goes on trying stands for it."""
    monkeypatch.setattr(ray_node, "CLOSE_S", 0.2)
    watched, began = Watched(), time.monotonic()
    watched._watcher.kill()
    watched._watcher.wait()
    monkeypatch.setattr(watched, "_watcher", subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE))
    watched.close()
    assert time.monotonic() - began < 30 and watched._watcher.poll() is None
    watched._watcher.kill()
    Path(watched.folder).rmdir()


def test_a_node_that_its_watcher_does_not_find_is_ended_by_its_own_process(monkeypatch):
    monkeypatch.setattr(ray_node, "START_S", 0.0)
    monkeypatch.setattr(subprocess.Popen, "poll", lambda self: None)  # as if it went on
    made, plain = [], subprocess.Popen.__init__

    def unmarked(self, command, **given):
        run_state = command if "watcher.py" in str(command) else ["sleep", "60"]
        made.append(self)
        plain(self, run_state, **{**given, "env": {"PATH": os.environ["PATH"]}})

    monkeypatch.setattr(subprocess.Popen, "__init__", unmarked)
    with pytest.raises(ray_node.NoNode):
        RayNode([], {})
    monkeypatch.undo()
    assert len(made) == 2 and made[1].wait(10) == -9

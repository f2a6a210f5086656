"""Which Ray a run uses: an address that was given and does not answer is an error at once; one is found or started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from posttrain.controller import ray_address
from posttrain.controller.ray_cluster import refused_by_ray
from posttrain.errors import UserError

ray = pytest.importorskip("ray")
from posttrain.controller.ray_cluster import RayCluster  # noqa: E402


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RAY_HEAD_ADDRESS"])
def test_a_ray_that_does_not_answer_is_named_at_once(monkeypatch, name):
    monkeypatch.setenv(name, "127.0.0.1:9")
    with pytest.raises(UserError, match=rf"{name}=127.0.0.1:9: no Ray answers there .* unset {name}"):
        RayCluster(2).start()


def test_a_ray_that_is_not_found_is_named_too(monkeypatch):
    def nobody(**named):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(UserError, match=r"RAY_ADDRESS=auto: no Ray answers there \(Could not find any running Ray"):
        RayCluster(2).start()


@pytest.fixture
def no_secret(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr("ray._raylet.Config", Mock())  # this process's own settings of Ray stay as they are
    return monkeypatch


@pytest.mark.parametrize("given, said", [(None, "asks for a token, and none was"), ("x", "did not accept the token")])
def test_a_ray_that_wants_a_token_says_so_and_how_to_give_it(no_secret, given, said):
    def not_let_in(**named):
        cause = RuntimeError("Failed to connect to GCS. Unauthenticated: RPC error: InvalidAuthToken")
        raise ConnectionError("Failed to connect to Ray cluster") from cause

    if given:
        no_secret.setenv("RAY_AUTH_TOKEN", given)
    no_secret.setattr(ray, "init", not_let_in)
    with pytest.raises(UserError, match=rf"RAY_ADDRESS=auto: the Ray there {said}.* RAY_AUTH_TOKEN.*~/.ray/auth_token"):
        RayCluster(2).start()


@pytest.mark.parametrize(
    "mode, token, shown",
    [(None, None, None), (None, "variable", "token"), (None, "file", "token"), ("disabled", "variable", "disabled")],
)
def test_the_users_token_is_shown_to_a_ray_whose_address_was_given(no_secret, tmp_path, mode, token, shown):
    """Ray shows it by itself only to one that it has found without an address."""
    seen = []
    if mode:
        no_secret.setenv("RAY_AUTH_MODE", mode)
    if token == "variable":
        no_secret.setenv("RAY_AUTH_TOKEN", "secret")
    elif token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret\n")
    no_secret.setattr(ray, "init", lambda **named: seen.append(os.environ.get("RAY_AUTH_MODE")))
    RayCluster(2).start()
    assert seen == [shown] and os.environ.get("RAY_AUTH_MODE") == mode


def test_a_head_that_is_to_be_found_is_that_of_this_machine_or_started(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_HEAD_ADDRESS", "auto")
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: address)
        assert RayCluster(2).address == address
    assert RayCluster(2).address is None  # it was there, and is gone


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_an_argument_that_ray_does_not_take_is_told_of_by_its_setting(monkeypatch, address):
    monkeypatch.delenv("RAY_HEAD_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", address or "")
    cluster = RayCluster(2, {"num_cpu": 3, "object_store_memory": None})
    try:
        with pytest.raises(UserError, match=r"trainer.ray_init \(num_cpu\): Unknown keyword argument\(s\): num_cpu"):
            cluster.start()
    finally:
        cluster.stop()


def test_what_ray_asserts_of_an_argument_is_told_of_by_its_setting():
    words = r"trainer.ray_init \(num_cpus\): CPU \(<class 'str'>\): abc"
    with pytest.raises(UserError, match=words), refused_by_ray({"num_cpus": "abc"}):
        raise AssertionError("CPU (<class 'str'>): abc")
    with pytest.raises(AssertionError), refused_by_ray({}):
        raise AssertionError("not about the user's arguments")


# Serves until its input ends.
OTHER_RAY = """
import ray, sys
from ray.cluster_utils import Cluster
small = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args=small)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("asked, given", [("", ""), ("", "the user's"), ("the user's", "the user's")])
def test_after_a_ray_of_its_own_a_process_works_with_one_that_has_no_secret_or_another(
    monkeypatch, tmp_path, asked, given
):
    """A notebook that has trained, and then connects to a cluster."""
    for name in ("RAY_ADDRESS", "RAY_HEAD_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where a secret of the machine's user may be

    class Worker:
        def answer(self):
            return 42

    def works_with(address):
        monkeypatch.setenv("RAY_ADDRESS", address)
        cluster = RayCluster(1)
        cluster.start()
        try:
            worker = ray.remote(num_cpus=0)(Worker).remote()
            return ray.get(worker.answer.remote(), timeout=60) == 42
        finally:
            cluster.stop()

    assert works_with("")
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": asked} if asked else {"RAY_AUTH_MODE": "disabled"}
    there = subprocess.Popen(
        [sys.executable, "-c", OTHER_RAY],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | variables,
    )  # fmt: skip
    with there:
        assert there.stdin is not None and there.stdout is not None
        if given:
            monkeypatch.setenv("RAY_AUTH_TOKEN", given)
        try:
            assert works_with(address := there.stdout.readline().strip())
            shown = {"RAY_AUTH_MODE": "token" if asked else "disabled"}
            assert ray_address.shown_by_a_node("", address) == (shown if given else {})
        finally:
            there.stdin.close()
    assert works_with("")

"""A machine of a run that is not the first: it waits for the head, serves, and leaves; the first tells where it is."""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import load_config
from posttrain.errors import UserError
from posttrain.tracking.rundir import RunDirectory, RunTaken
from posttrain.trainer.main_ppo import run_ppo

pytest.importorskip("ray")
from posttrain.controller import ray_address, ray_cluster, ray_node
from posttrain.controller.incidents import death_of
from posttrain.controller.ray_address import OWN
from posttrain.controller.ray_cluster import RayCluster


class Node:
    """Stands in for a node of Ray: shows so many ranks each time that it is asked, and is gone after the last."""

    made: list[Node]
    ranks_seen: list[int]
    folder = "/nowhere"

    def __init__(self, options: list[str], variables: dict[str, str]) -> None:
        self.options, self.variables, self.closed = options, variables, False
        self.made.append(self)

    def ranks(self) -> int:
        return self.ranks_seen.pop(0)

    def ended(self) -> bool:
        return not self.ranks_seen

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setattr(Node, "made", [], raising=False)
    monkeypatch.setattr(ray_node, "RayNode", Node)
    monkeypatch.setattr(ray_node.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(ray_node, "shown_by_a_node", lambda token, address: {"token": token})

    def shows(*ranks: int) -> type[Node]:
        monkeypatch.setattr(Node, "ranks_seen", list(ranks), raising=False)
        return Node

    return shows


@pytest.fixture
def head():
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_machine_leaves_when_the_ranks_that_worked_on_it_are_gone(node, head, monkeypatch, tmp_path, capsys):
    """Through the run's own entry: no run directory is made, and the status is 0."""
    kind = node(0, 0, 1, 1, 0, 1, 0, 0, 0, 7)  # a rank that is not seen once is not gone
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_HEAD_ADDRESS", head)
    given = {"trainer.nnodes": 2, "trainer.node_rank": 1, "trainer.default_local_dir": str(tmp_path / "out")}
    result = run_ppo(load_config({**given, "trainer.device": "cpu"}, environment=True))
    assert result.exit_status == 0 and result.status == "served" and not (tmp_path / "out").exists()
    assert kind.made[0].closed and kind.made[0].options == [f"--address={head}"] and kind.ranks_seen == [7]
    said = capsys.readouterr().out
    assert "Machine 1 of 2" in said and f"has joined the Ray at {head}" in said and "has left this machine" in said


def test_a_head_that_goes_ends_the_service_and_before_any_rank_came_it_is_an_error(node, head, monkeypatch):
    kind = node(0, 0, 0)
    with pytest.raises(UserError, match=r"is gone, and no worker was started on this machine: see .* machine 0"):
        ray_node.serve(head, lambda words: None)
    assert kind.made[0].closed
    node(1, 1, 1, 1, 1, 1, 9)
    answers = iter([None, OSError("gone"), None, *[OSError("gone")] * 3])  # one silence is not the end
    monkeypatch.setattr(ray_node, "connection_error", lambda address: next(answers))
    ray_node.serve(head, lambda words: None)
    assert Node.ranks_seen == [1, 9]


def test_a_head_that_never_answers_is_an_error_when_its_time_is_over(node, monkeypatch):
    clock, told = [0.0], []
    monkeypatch.setenv("RAY_HEAD_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr(ray_node.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray_node.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 60))
    with pytest.raises(UserError, match=r"RAY_HEAD_ADDRESS=127.0.0.1:9: no Ray answers there"):
        ray_node.serve("127.0.0.1:9", told.append)
    assert 300 < clock[0] <= 360 and len(told) == 1 and told[0].startswith("Waiting 300 s for a Ray to answer at")
    assert node().made == []


def test_a_head_that_torchruns_first_machine_told_of_and_that_never_answers_is_an_error_in_words(node, monkeypatch):
    monkeypatch.setattr(ray_node, "HEAD_S", 0.0)
    for name in ("RAY_ADDRESS", "RAY_HEAD_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"No Ray answers at 127\.0\.0\.1:1 .*first machine said that its Ray is"):
        ray_node.serve("127.0.0.1:1", print, "secret")


def heads(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """(options of heads that were started, connections to them)."""
    started: list[Any] = []
    connected: list[Any] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    monkeypatch.setattr(ray_node.RayNode, "__init__", lambda self, options, variables: started.append(options))
    monkeypatch.setattr(ray_node.RayNode, "folder", "/head", raising=False)
    monkeypatch.setattr(ray_node.RayNode, "environment", lambda self, secret: socket.socket(), raising=False)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **named: connected.append(named))
    monkeypatch.setattr(ray_node, "connection_error", lambda address: OSError("free"))
    return started, connected


def test_the_first_machine_starts_a_head_with_its_settings_and_says_what_to_type_on_the_others(
    monkeypatch,
):
    started, connected = heads(monkeypatch)
    monkeypatch.setenv("RAY_HEAD_ADDRESS", "auto")
    monkeypatch.setattr(ray_node, "_own_address", lambda host="": "10.0.0.7")
    monkeypatch.setattr(ray_node, "users_secret", lambda: False)
    told: list[str] = []
    settings = {"num_cpus": 3, "include_dashboard": True, "resources": {"a": 1}, "namespace": "mine"}
    cluster = RayCluster(2, settings, machines=3, tell=told.append)
    cluster.start()
    assert cluster.words() == "at 10.0.0.7:6379"
    wanted = ["--num-cpus=3", '--resources={"a": 1}', "--include-dashboard=true"]
    assert started == [["--head", "--node-ip-address=10.0.0.7", "--port=6379", *wanted]]
    assert connected[0]["namespace"] == "mine" and "num_cpus" not in connected[0]
    assert "with RAY_HEAD_ADDRESS=10.0.0.7:6379 and trainer.node_rank=1 to 2." in told[0]
    assert "whoever reaches 10.0.0.7:6379 can run programs here" in told[1]
    monkeypatch.setattr(ray_node, "connection_error", lambda address: None)
    with pytest.raises(UserError, match=r"10.0.0.7:6379 is taken by another program"):
        RayCluster(2, machines=2).start()


def signed_without() -> str:
    """A signature by somebody who has no secret."""
    return ray_address._signature("10.6.6.6:6379 other", "")


def test_torchruns_machines_hear_of_the_head_and_its_secret_from_the_first_and_nobody_else_does(monkeypatch, tmp_path):
    started, _ = heads(monkeypatch)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    told: list[str] = []
    monkeypatch.setattr(ray_address, "SHARED_S", 0.0)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")  # without a secret of the user's
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    cluster = RayCluster(2, machines=2, tell=told.append, shared=tmp_path / "out")
    cluster.start()
    monkeypatch.setenv("RANK", "1")
    assert ray_address.wait_for_address(tmp_path / "out") == (cluster.address, OWN) and told == []
    stranger = ray_address._store()  # whoever reaches the port can read and write it
    read = stranger.get(ray_address._key()).decode()
    assert str(cluster.address) in read and OWN not in read
    (file,) = (tmp_path / "out").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_text() == OWN
    with pytest.raises(UserError, match=r"not signed with the secret of its first machine.* disk that they share"):
        ray_address.wait_for_address(tmp_path)  # another disk
    for forged in (read.replace(str(cluster.address), "10.6.6.6:6379"), f"10.6.6.6:6379 other {signed_without()}"):
        stranger.set(ray_address._key(), forged)
        with pytest.raises(UserError, match=r"\(10.6.6.6:6379\) in torchrun's store is not signed"):
            ray_address.wait_for_address(tmp_path / "out")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's own")
    ray_address.tell_address("10.0.0.1:6379", "", None)  # needs no file
    assert ray_address.wait_for_address(tmp_path) == ("10.0.0.1:6379", "")
    ray_address.forget_secret()
    assert not file.exists()
    assert started[0][1] == "--node-ip-address=127.0.0.1" and started[0][2] != "--port=6379"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # another attempt has another Ray
    monkeypatch.setattr(ray_address, "WAIT", ray_address.timedelta(seconds=0.1))
    with pytest.raises(UserError, match=r"first machine \(127.0.0.1\) did not tell where its Ray is"):
        ray_address.wait_for_address(tmp_path)


def test_the_same_command_on_a_second_machine_sees_the_run_and_leaves(monkeypatch, tmp_path, capsys):
    """In a Ray that runs; on one machine a directory in use stays an error."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    named = {"trainer.default_local_dir": str(tmp_path), "trainer.experiment_name": "mine", "trainer.device": "cpu"}
    first = RunDirectory(tmp_path, "posttrain", "mine").open()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run_ppo(load_config({**named, "trainer.nnodes": 2}, environment=True)).exit_status == 0
    said = capsys.readouterr().out
    assert "mine is in use by this process" in said and "it drives the run, and this one leaves" in said
    with pytest.raises(RunTaken, match=r"Wait for it or end it, or choose another trainer.experiment_name"):
        run_ppo(load_config(named, environment=True))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    first.close()


def test_machines_with_other_programs_are_named_with_what_differs_and_where_it_lies():
    here = ray_cluster.programs()
    ray_cluster.check_same_programs([here, {**here, "in": "/elsewhere"}], ["10.0.0.1", "10.0.0.2"])
    other = {**here, "torch": "1.0", "posttrain": "files 00000000", "in": "/old"}
    with pytest.raises(UserError, match=r"10.0.0.2 does .*: torch 1.0, posttrain files 0+ in /old, and"):
        ray_cluster.check_same_programs([here, other], ["10.0.0.1", "10.0.0.2"])


DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: RankHost
\tpid: 2322
\tip: 10.0.0.2
The actor is dead because its worker process has died."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DIED, r"process 2322 on 10.0.0.2\) died: .* the kernel does .* lower trainer.n_workers.* from the newest"),
        (f"{DIED}\nThe actor died because its node has died.", r"on 10.0.0.2\) is lost: its machine no longer answers"),
        (f"{DIED} Workers were ended as the node was running low on memory.", "died: Ray ended it because its machine"),
        (
            "The actor died because of an error raised in its creation task, RankHost()\nImportError: no x",
            r"A worker could not be started: ImportError: no x All machines .* the same environment and code",
        ),
    ],
)
def test_a_worker_that_died_is_told_of_by_its_machine_and_the_likely_cause(text, said):
    assert re.search(said, str(death_of(RuntimeError(text))))


def test_a_rollout_worker_that_died_is_told_of_as_one_with_what_lowers_its_memory():
    said = str(death_of(RuntimeError(DIED), role="rollout"))
    assert said.startswith("A rollout worker (process 2322 on 10.0.0.2) died") and "rollout.kv_cache_gb" in said


def commands_of_the_docs() -> list[list[str]]:
    page = (Path(__file__).parents[2] / "docs" / "workers.md").read_text().partition("## Several machines\n")[2]
    blocks = re.findall(r"```bash\n(.*?)```", page.partition("\n## ")[0], re.S)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if line.strip()]


def test_the_commands_of_the_docs_for_several_machines_are_taken():
    """`scripts/drill_machine_commands.py` runs them, on three nodes of Ray; here every word of them must be known."""
    from ray.scripts.scripts import start

    seen = set()
    for words in commands_of_the_docs():
        if "ray" in words:
            start.make_context("start", words[words.index("start") + 1 :])
            seen.add("ray start")
            continue
        given = [word for word in words if re.match(r"(trainer|actor_rollout_ref|data|algorithm)\.", word)]
        resolved = load_config([*given, "trainer.device=cpu"])
        seen.add("torchrun" if "torchrun" in words else f"machine {resolved.node_rank}")
        assert resolved.value("trainer.nnodes") == 2 or "--nnodes=2" in words
    assert seen == {"ray start", "torchrun", "machine 0", "machine 1"}

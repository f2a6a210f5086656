"""A server's engine that several processes hold: every call reaches all of them, and whatever goes wrong in one of them
ends the call with its name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import Pipe

import pytest
import torch

from posttrain.commands.serving import main, read
from posttrain.commands.serving_model import Part
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig, ServerConfig
from posttrain.errors import UserError
from posttrain.models.embedded import write_model
from posttrain.models.loading import load_causal_lm
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.generate import generate
from posttrain.rollout.native.build import build_native
from posttrain.rollout.server import ranks
from posttrain.rollout.server.engine import ServerError, connect_servers, describe
from posttrain.rollout.server.ranks import Follower, MirroredEngine, RankError, Reply, make_call
from posttrain.rollout.server.wire import read_bucket
from tests.conftest import TINY
from tests.rollout.served_engine import KEY, hosted, served

SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"
PROMPTS = [[65, 66, 67], [65, 66, 67], [70, 71], [72, 73]]
SETTINGS = [Sampling(max_tokens=12)] * 4


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("POSTTRAIN_API_KEY", KEY)


def load(folder):
    return load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float32, device=torch.device("cpu"))


def native(folder):
    return build_native(load(folder).requires_grad_(False), RolloutConfig(kv_cache_gb=0.1), decode=None)[0]


class Other:
    """What `follow` is in another process, in a thread of this one, over a whole engine of its own."""

    def __init__(self, engine, rank=1):
        self.engine, self.lost, self.calls = engine, [], []
        self.change_body = lambda body: body
        mine, self.connection = Pipe()
        self.follower = Follower(rank, mine, self.lost.append)
        threading.Thread(target=self.run, daemon=True).start()

    def die(self):
        socket.socket(fileno=os.dup(self.connection.fileno())).shutdown(socket.SHUT_RDWR)

    def run(self):
        while True:
            try:
                name, given, has_body = self.connection.recv()
                body = self.connection.recv_bytes() if has_body else None
            except (EOFError, OSError):
                return
            self.calls.append(name)
            try:
                if body is not None:
                    bucket = read_bucket(self.change_body(body))
                    bucket.check()
                    given = (bucket, *given)
                found = Reply(ranks.digest_of(make_call(self.engine, name, given)))
            except Exception as error:
                found = Reply(error=f"{type(error).__name__}: {error}")
            with suppress(OSError):  # the first was given up
                self.connection.send(found)


@pytest.fixture
def other(tiny_model):
    return Other(native(tiny_model))


@pytest.fixture
def engine(other, tiny_model, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_S", 0.3)
    return MirroredEngine(native(tiny_model), [other.follower], other.lost.append)


def test_every_call_that_changes_an_engine_is_made_by_all_its_processes(engine, other, tiny_model):
    wanted = generate(native(tiny_model), PROMPTS, SETTINGS, range(4))
    made = generate(engine, PROMPTS, SETTINGS, range(4))
    assert [one.token_ids for one in made] == [one.token_ids for one in wanted]
    weights = {name: weight * 1.05 for name, weight in load(tiny_model).state_dict().items()}
    engine.submit(Request("a", PROMPTS[0], SETTINGS[0], 0))
    assert engine.step() == [] and [one.id for one in engine.abort(["a"])] == ["a"]
    engine.release(["a"])
    engine.sleep()
    engine.wake("weights")
    engine.load_weights(weights.items(), 7)
    assert all(torch.equal(*both) for both in zip(engine.score(PROMPTS), other.engine.score(PROMPTS), strict=True))
    engine.wake("cache")
    engine.let_go()
    assert {*other.calls} == {"submit", "step", "abort", "release", "sleep", "wake", "load_weights", "score", "let_go"}
    assert other.engine.version == engine.version == 7 and not other.engine.asleep and engine.ranks == 2
    assert other.lost == []


def test_a_wrong_request_is_rejected_by_all_and_the_engine_goes_on(engine, other):
    with pytest.raises(ValueError, match="room for at least one token"):
        engine.submit(Request("a", PROMPTS[0], Sampling(max_tokens=0), 0))
    assert len(generate(engine, PROMPTS[:1], SETTINGS[:1], [0])[0].token_ids) == 12 and other.lost == []


def test_weights_that_are_damaged_on_their_way_are_named_with_the_process(engine, other, tiny_model):
    other.change_body = lambda body: body[:-9] + bytes([body[-9] ^ 1]) + body[-8:]
    with pytest.raises(RankError, match=r"rank 1 of this server's engine failed in `load_weights`: .*lm_head\.weight"):
        engine.load_weights(load(tiny_model).state_dict().items(), 1)
    assert other.engine.version == 0 and "failed in `load_weights`" in other.lost[0]
    with pytest.raises(RankError, match="failed in `load_weights`"):  # half of an engine computes nothing any more
        engine.score(PROMPTS)


def test_a_process_that_computes_something_else_is_named(engine, other, tiny_model):
    other.engine.load_weights([(name, one * 1.1) for name, one in load(tiny_model).state_dict().items()], 0)
    with pytest.raises(RankError, match="rank 1 of this server's engine has another result of `score` than the first"):
        engine.score(PROMPTS)


def test_a_call_that_only_one_process_can_make_ends_with_its_name(engine, other, monkeypatch):
    monkeypatch.setattr(engine.inner, "step", lambda: 1 / 0)
    with pytest.raises(RankError, match="`step` failed here and not in rank 1 of this server's engine: division"):
        engine.step()


def test_a_process_that_hangs_in_a_call_that_failed_here_is_named(engine, other, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(other.engine, "step", lambda: go_on.wait(20))
    monkeypatch.setattr(engine.inner, "step", lambda: 1 / 0)
    with pytest.raises(RankError, match="rank 1 of this server's engine is still in `step`, which failed here"):
        engine.step()
    go_on.set()


def test_a_process_that_dies_is_reported_also_while_the_first_waits_for_it(engine, other, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(engine.inner, "step", lambda: go_on.wait(20))  # as in a sum over the processes
    threading.Thread(target=failing, args=(engine.step,), daemon=True).start()
    other.die()
    until(lambda: other.lost)
    assert "rank 1 of this server's engine died" in other.lost[0]
    go_on.set()


def test_an_error_that_the_first_cannot_see_because_it_waits_is_reported(engine, other, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(engine.inner, "step", lambda: go_on.wait(20))
    monkeypatch.setattr(other.engine, "step", lambda: 1 / 0)
    threading.Thread(target=failing, args=(engine.step,), daemon=True).start()
    until(lambda: other.lost)
    assert "rank 1 of this server's engine failed, and the others wait for it: ZeroDivisionError" in other.lost[0]
    go_on.set()


def failing(call):
    with suppress(RankError):
        call()


def until(done, limit=20.0):
    end = time.monotonic() + limit
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_run_whose_server_lost_a_process_is_told_which_while_its_call_waits(tiny_model, monkeypatch):
    from posttrain.rollout.server import host

    made = []
    make_app = host.make_app

    def with_loss(engine_host, key, lost=None):
        import asyncio

        made.append((asyncio.get_running_loop(), asyncio.get_running_loop().create_future()))
        return make_app(engine_host, key, made[-1][1])

    monkeypatch.setattr("tests.rollout.served_engine.make_app", with_loss)
    far, go_on = native(tiny_model), threading.Event()
    about = describe(load(tiny_model), model="tiny", longest=96)
    with hosted(far, {**about, "engine": "native", "takes_adapters": False}) as url:
        near = connect_servers(load(tiny_model), RolloutConfig(server=ServerConfig(url=[url])), decode=None)[0]
        monkeypatch.setattr(far, "score", lambda *given, **named: go_on.wait(20))
        loop, lost = made[0]
        threading.Timer(0.3, lambda: loop.call_soon_threadsafe(lost.set_result, "rank 1 died: killed")).start()
        with pytest.raises(ServerError, match=rf"{url} failed in `score`: RankError: rank 1 died: killed"):
            near.score(PROMPTS)
        go_on.set()


def test_only_a_server_for_a_run_has_an_engine_of_several_processes(tiny_model):
    with pytest.raises(UserError, match=f"`{SIZE}` has no effect here"):
        main([str(tiny_model), f"{SIZE}=2"])
    with pytest.raises(UserError, match="the engine hf cannot be held by several workers; set it to 1"):
        build_engine(RolloutConfig(name="hf", tensor_model_parallel_size=2), load(tiny_model), None, team=Two())
    with pytest.raises(UserError, match=r"pipeline_model_parallel_size=2: the engine native cannot be cut into stages"):
        build_engine(RolloutConfig(pipeline_model_parallel_size=2), load(tiny_model), None, team=Two())
    _, _, settings = read([str(tiny_model), "--accept-weights", f"{SIZE}=2"], KEY)
    assert settings.config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2


class Two:
    size = 2


def test_each_process_has_a_gpu_of_its_own_or_the_server_does_not_start(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [Part(rank, 2).device(cuda).index for rank in (0, 1)] == [0, 1]
    assert Part(1, 2).device(cpu) == cpu and Part().device(cuda) == cuda
    with pytest.raises(UserError, match="tensor_model_parallel_size=4: this machine has 2 GPUs; set it to fewer"):
        Part(0, 4).device(cuda)


VLLM = pytest.param("vllm", marks=pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native", VLLM])
def test_two_processes_serve_one_engine_and_the_death_of_one_ends_the_run_with_its_name(forked, tmp_path, name):
    """The command, on two processes of a CPU."""
    folder = write_model(tmp_path / "wide", **TINY | {"hidden_size": 128})  # vLLM knows no heads below 32 on CPUs
    own = ("--dtype", "float32", "--max-model-len", "96", "--engine", name, f"{SIZE}=2")
    own += ("actor_rollout_ref.rollout.kv_cache_gb=0.05", "actor_rollout_ref.rollout.max_num_seqs=8")
    with served(forked.python, folder, *own) as server:
        module = load(folder).requires_grad_(False)
        config = RolloutConfig(server=ServerConfig(url=[server.url]))
        engine, said = connect_servers(module, config, decode=None, longest=90)
        assert "2 workers" in said
        if name == "native":
            wanted = generate(native(folder), PROMPTS, SETTINGS, range(4))
            made = generate(engine, PROMPTS, SETTINGS, range(4))
            assert [one.token_ids for one in made] == [one.token_ids for one in wanted]
        weights = {key: weight * 1.05 for key, weight in module.state_dict().items()}
        engine.sleep()
        engine.wake("weights")
        engine.load_weights(weights.items(), 3)
        module.load_state_dict(weights)
        plain = build_native(module, RolloutConfig(kv_cache_gb=0.1), decode=None)[0].score(PROMPTS)
        for mine, theirs in zip(engine.score(PROMPTS), plain, strict=True):  # the probe, through both processes
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
        engine.wake("cache")
        assert generate(engine, PROMPTS[:1], SETTINGS[:1], [0])[0].versions == [(3, 12)]
        found = subprocess.run(["pgrep", "-P", str(server.number)], capture_output=True, text=True, check=True)
        (other,) = map(int, found.stdout.split())
        engine.submit(Request("a", PROMPTS[0], Sampling(max_tokens=80), 0))
        engine.step()
        os.kill(other, signal.SIGKILL)
        with pytest.raises(ServerError, match=rf"rank 1 \(process {other}\) of this server's engine died: killed"):
            while engine.has_work():
                engine.step()
        until(lambda: not alive(server.number))


@pytest.mark.slow
def test_a_server_that_is_interrupted_ends_in_order_with_all_its_processes(forked, tiny_model):
    small = ("--dtype", "float32", "actor_rollout_ref.rollout.kv_cache_gb=0.05")
    for more in ((), (f"{SIZE}=2",)):
        rest: list[str] = []
        with served(forked.python, tiny_model, *small, *more, after=rest) as server:
            os.kill(server.number, signal.SIGINT)
            until(lambda number=server.number: not alive(number))
        assert rest and "Traceback" not in rest[0]


def alive(number):
    try:
        with open(f"/proc/{number}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

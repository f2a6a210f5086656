"""Engines as servers: a run in this process whose responses are written in another one, and all that can go wrong."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from runs import metrics_of, run

from posttrain.config import load_config
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig, ServerConfig
from posttrain.errors import UserError
from posttrain.models.embedded import write_model
from posttrain.models.loading import load_causal_lm, load_tokenizer
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.generate import generate
from posttrain.rollout.native.build import build_native
from posttrain.rollout.server.engine import Link, ServerError, connect_servers, describe
from posttrain.rollout.server.wire import read_bucket, write_bucket
from posttrain.rollout.weight_buckets import SyncError, split_into_buckets
from tests.conftest import TINY
from tests.rollout.served_engine import KEY, hosted, served

CPU = torch.device("cpu")
NAME, URL = "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.server.url"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("POSTTRAIN_API_KEY", KEY)


def load(folder, dtype=torch.float32):
    return load_causal_lm(ModelConfig(path=str(folder)), dtype=dtype, device=CPU).requires_grad_(False)


def native(folder):
    return build_native(load(folder), RolloutConfig(kv_cache_gb=0.1), decode=None)[0]


@pytest.fixture
def host(tiny_model):
    """`host()`: a server over a native engine of its own, and that engine; `host(longest=...)` takes longer rows."""
    opened = []

    def one(folder=tiny_model, longest=96, key=KEY):
        engine = native(folder)
        about = describe(load(folder), model="tiny", longest=longest)
        server = hosted(engine, {**about, "engine": "native", "takes_adapters": False}, key)
        opened.append(server)
        return server.__enter__(), engine

    yield one
    for server in opened:
        server.__exit__(None, None, None)


def near(folder, *urls, longest=96, timeout_s=30.0):
    config = RolloutConfig(name="server", server=ServerConfig(url=[*urls], timeout_s=timeout_s))
    return connect_servers(load(folder), config, decode=None, longest=longest)[0]


PROMPTS = [[65, 66, 67], [65, 66, 67], [70, 71], [72]]
SETTINGS = [Sampling(max_tokens=12)] * 4


def test_several_servers_share_the_requests_and_write_what_one_engine_writes(host, tiny_model):
    servers = [host(), host()]
    engine = near(tiny_model, *(url for url, _ in servers))
    wanted = generate(native(tiny_model), PROMPTS, SETTINGS, range(4))
    made = generate(engine, PROMPTS, SETTINGS, range(4))
    assert [(one.token_ids, one.versions) for one in made] == [(one.token_ids, one.versions) for one in wanted]
    assert all(one.log_probs == pytest.approx(two.log_probs, abs=1e-5) for one, two in zip(made, wanted, strict=True))
    assert all(far.response_tokens > 0 for _, far in servers)  # equal prompts go to one of them, others in turn
    engine.close()


def test_a_request_under_way_continues_with_new_weights_and_says_which_tokens_are_whose(host, tiny_model):
    url, _ = host()
    engine, plain = near(tiny_model, url), native(tiny_model)
    weights = {name: weight * 1.05 for name, weight in load(tiny_model).state_dict().items()}
    found = []
    for one in (engine, plain):
        for id, prompt in enumerate(PROMPTS):
            one.submit(Request(id, prompt, SETTINGS[0], id))
        for _ in range(3):
            one.step()
        one.load_weights(weights.items(), 5)
        ended = []
        while one.has_work():
            ended += one.advance()
        found.append({output.id: (output.token_ids, output.versions) for output in ended})
    assert found[0] == found[1] and found[0][0][1] == [(0, 3), (5, 9)]
    engine.close()


def test_the_next_turn_continues_from_the_cache_of_the_last_until_it_is_released(host, tiny_model):
    url, far = host()
    engine = near(tiny_model, url)

    def turn(id, prompt, **how):
        engine.submit(Request(id, prompt, Sampling(max_tokens=6), 1, **how))
        while engine.has_work():
            for output in engine.advance():
                return output

    first = turn(("a", 0), [*range(60, 90)], keep=True)
    longer = [*range(60, 90), *first.token_ids, 65, 66]
    before = far.prompt_tokens
    turn(("a", 1), longer, parent=("a", 0), keep=True)
    assert far.prompt_tokens - before <= 3  # the new tokens, and the one that was sampled last
    engine.release([("a", 0), ("a", 1)])
    assert not far.queue.kept.turns
    before = far.prompt_tokens
    turn(("a", 2), longer, parent=("a", 1))
    assert far.prompt_tokens - before == len(longer)
    engine.close()


def test_a_damaged_bucket_is_rejected_by_the_name_of_its_weight_and_nothing_of_it_is_loaded(host, tiny_model):
    url, far = host()
    engine = near(tiny_model, url)
    weights = load(tiny_model).state_dict()
    (bucket,) = split_into_buckets(weights.items())
    assert all(torch.equal(read_bucket(write_bucket(bucket)).tensors[name], weight) for name, weight in weights.items())
    body, before = bytearray(write_bucket(bucket)), far.score(PROMPTS)
    body[-9] ^= 1
    with pytest.raises(ServerError, match=r"SyncError: the weight lm_head\.weight reached .* another checksum"):
        engine.servers[0].link.call("load_weights", bytes(body), **{"X-Posttrain-Version": "9"})
    with pytest.raises(SyncError, match=r"lm_head\.weight"):
        read_bucket(bytes(body)).check()
    assert all(torch.equal(*both) for both in zip(before, far.score(PROMPTS), strict=True)) and far.version == 0
    engine.close()


def test_servers_whose_weights_differ_are_named_by_the_probe(host, tiny_model):
    (one, _), (other, far) = host(), host()
    engine = near(tiny_model, one, other)
    engine.score(PROMPTS)
    far.load_weights([(name, weight * 1.1) for name, weight in load(tiny_model).state_dict().items()], 0)
    with pytest.raises(ServerError, match=f"servers {one} and {other} differ by .* one of them does not compute"):
        engine.score(PROMPTS)
    engine.close()


def test_a_run_that_connects_takes_the_server_over_and_the_other_one_is_told(host, tiny_model):
    url, far = host()
    first = near(tiny_model, url)
    first.submit(Request(0, PROMPTS[0], Sampling(max_tokens=40), 0))
    first.step()
    second = near(tiny_model, url)
    assert not far.has_work()
    assert len(generate(second, PROMPTS[:1], SETTINGS[:1], [0])[0].token_ids) == 12
    with pytest.raises(ServerError, match=f"server {url} belongs to another run now: .*process .* has taken this"):
        first.step()
    second.close()


def test_what_is_wrong_with_a_server_is_said_before_anything_is_generated(host, tiny_model, tmp_path, monkeypatch):
    url, far = host()
    other = write_model(tmp_path / "other", **TINY | {"hidden_size": 2 * TINY["hidden_size"]})
    with pytest.raises(
        ServerError, match=rf"{url} has another model \(tiny\): model.embed_tokens.weight has the shape"
    ):
        near(other, url)
    with pytest.raises(ServerError, match=r"takes sequences of 96 tokens, (.|\n)*--max-model-len 200"):
        near(tiny_model, url, longest=200)
    bfloat16 = load(tiny_model, torch.bfloat16)
    with pytest.raises(ServerError, match="is float32 there and bfloat16 here"):
        connect_servers(bfloat16, RolloutConfig(name="server", server=ServerConfig(url=[url])), decode=None)
    with pytest.raises(
        ServerError, match=r"No rollout server answers at http://127\.0\.0\.1:9: .*refused.*\n  to do:  start"
    ):
        near(tiny_model, "http://127.0.0.1:9")
    with pytest.raises(ServerError, match=f"{url}/v1 is not one for runs"):
        near(tiny_model, f"{url}/v1")
    assert far.version == 0
    monkeypatch.setenv("POSTTRAIN_API_KEY", "another")
    with pytest.raises(ServerError, match=f"{url} rejects the key.\n  to do:  set POSTTRAIN_API_KEY"):
        near(tiny_model, url)


def test_a_server_that_computes_wrongly_is_not_used(host, tiny_model, monkeypatch):
    url, far = host()
    monkeypatch.setattr(far, "load_weights", lambda weights, version: None)
    far.decoder.load([(name, weight * 1.1) for name, weight in load(tiny_model).state_dict().items()])
    config = RolloutConfig(name="server", server=ServerConfig(url=[url]))
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    with pytest.raises(UserError, match="does not generate as this model: its log-probs are not those"):
        build_engine(config, load(tiny_model), tokenizer)


def test_a_server_without_a_sign_of_life_is_lost_after_the_time_that_is_set_and_a_slow_one_is_not(
    host, tiny_model, monkeypatch
):
    url, far = host()
    monkeypatch.setattr("posttrain.rollout.server.host.ALIVE_S", 0.05)
    engine = near(tiny_model, url, timeout_s=0.5)
    score, go_on = far.score, threading.Event()
    monkeypatch.setattr(far, "score", lambda *given, **named: (time.sleep(1.0), score(*given, **named))[1])
    assert len(engine.score(PROMPTS)) == 4  # it took longer than the limit, and showed that it lives
    monkeypatch.setattr("posttrain.rollout.server.host.ALIVE_S", 60)
    monkeypatch.setattr(far, "score", lambda *given, **named: go_on.wait(30))
    with pytest.raises(ServerError, match=f"{url} was lost during `score`: no sign of life for 0.5 s"):
        engine.score(PROMPTS)
    go_on.set()


def test_addresses_are_needed_with_it_have_no_effect_without_it_and_one_worker_speaks_with_all(load_problems):
    assert f"set {URL}=[http://HOST:PORT]" in load_problems(f"{NAME}=server")
    assert f"`{URL}=localhost` is no address" in load_problems(f"{NAME}=server", f"{URL}=localhost")
    two = (f"{NAME}=server", f"{URL}=[http://a:1,http://b:2]", "trainer.n_workers=2")
    assert "set actor_rollout_ref.rollout.colocated_workers=1" in load_problems(*two)
    resolved = load_config([*two, "actor_rollout_ref.rollout.colocated_workers=1"])
    assert resolved.value(URL) == ["http://a:1", "http://b:2"]
    assert any(URL in note for note in load_config([f"{URL}=http://a:1"]).notes)


@pytest.fixture
def load_problems():
    def said(*given):
        with pytest.raises(UserError) as raised:
            load_config([*given])
        return str(raised.value)

    return said


@pytest.fixture(scope="module")
def server(forked, tiny_model):
    """In a process of its own, by the command; the last test here ends it."""
    with served(forked.python, tiny_model, "--dtype", "float32", "--max-model-len", "64") as one:
        yield one


def test_the_command_wants_a_key(tiny_model, monkeypatch):
    from posttrain.commands.serving import main

    monkeypatch.delenv("POSTTRAIN_API_KEY")
    with pytest.raises(UserError, match="--accept-weights lets a client replace the weights, and there is no key"):
        main([str(tiny_model), "--accept-weights"])


def test_a_run_with_a_server_in_another_process_is_the_run_with_the_engine_in_its_own(
    server, tiny_model, sums, tmp_path, capsys
):
    same = {"actor_rollout_ref__model__dtype": "float32", "trainer__val_before_train": False}
    one = run(tiny_model, sums, tmp_path / "native", **same)
    how = {"actor_rollout_ref__rollout__name": "server", "actor_rollout_ref__rollout__server__url": [server.url]}
    other = run(tiny_model, sums, tmp_path / "server", **same, **how)
    assert f"Rollout engine: server ({server.url}: native" in capsys.readouterr().out
    for mine, theirs in zip(metrics_of(one.path), metrics_of(other.path), strict=True):
        shared = {name: value for name, value in mine.items() if not name.startswith("sync/")}
        assert {name: theirs[name] for name in shared} == shared
    assert all(line["sync/probe_max"] < 1e-5 for line in other.metrics)


def test_a_call_that_no_connection_carried_is_not_taken_for_an_answer(host, tiny_model):
    url, _ = host()
    link = Link(url, KEY, 5)
    with pytest.raises(ServerError, match="belongs to another run"):  # it was never opened
        link.call("cache_bytes")


def test_a_server_that_dies_ends_the_run_which_names_it_and_what_to_do(server, tiny_model, sums, tmp_path):
    def kill_after_a_step():
        while not list(tmp_path.rglob("samples/step_1*")):
            time.sleep(0.02)
        server.kill()

    threading.Thread(target=kill_after_a_step, daemon=True).start()
    how = {"actor_rollout_ref__rollout__name": "server", "actor_rollout_ref__rollout__server__url": [server.url]}
    how |= {"trainer__total_training_steps": 500, "actor_rollout_ref__model__dtype": "float32"}
    with pytest.raises(UserError, match=f"The rollout server {server.url} was lost during .*\n  to do:  look at its"):
        run(tiny_model, sums, tmp_path, **how)

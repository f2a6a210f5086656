"""The suite that every rollout engine must pass. An engine joins by adding its maker to ENGINES.

One that several workers hold together is tried by as many processes, each of which runs the whole suite: the ranks get
the same calls in the same order (`test_conformance_teams.py` starts them).
"""

import os
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig, ServerConfig
from posttrain.engine.ranks import join_ranks, leave_ranks, team_of
from posttrain.models.embedded import write_model
from posttrain.models.loading import load_causal_lm, load_tokenizer
from posttrain.rollout.base import Request, Sampling, WrappedEngine
from posttrain.rollout.generate import advance, generate, to_batch
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native
from posttrain.rollout.server.engine import connect_servers, describe
from posttrain.rollout.sglang.build import build_sglang
from posttrain.rollout.vllm.build import build_vllm
from tests.conftest import TINY
from tests.rollout import fake_sglang, fake_vllm
from tests.rollout.served_engine import KEY, hosted, served
from tests.rollout.tiny import write_tiny

PROMPTS = ["1 + 2 = ?", "a much longer prompt than the others", "1 + 2 = ?", "x"]


def make_hf(folder, tokenizer, **settings):
    module = load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    decode = lambda ids: tokenizer.decode(ids)  # noqa: E731
    return HFEngine(module, pad_token_id=tokenizer.pad_token_id, decode=decode, **settings)


@cache
def loaded_once(folder):
    """The model and its weights: loading one with recurrent states computes some sequences by transformers."""
    module = load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    return module, {name: weight.clone() for name, weight in module.state_dict().items()}


def make_native(folder, tokenizer, **settings):
    module, weights = loaded_once(folder)
    module.load_state_dict(weights)  # an engine before may have loaded others
    decode = lambda ids: tokenizer.decode(ids)  # noqa: E731
    return build_native(module, RolloutConfig(kv_cache_gb=0.1, **settings), decode=decode)[0]


def make_vllm(folder, tokenizer, **settings):
    module = load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    decode = lambda ids: tokenizer.decode(ids)  # noqa: E731
    return build_vllm(module, RolloutConfig(kv_cache_gb=0.1, **settings), decode=decode, longest=96)[0]


def make_sglang(folder, tokenizer, **settings):
    module = load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    decode = lambda ids: tokenizer.decode(ids)  # noqa: E731
    return build_sglang(module, RolloutConfig(kv_cache_gb=0.1, **settings), decode=decode, longest=96)[0]


def make_wrapped(folder, tokenizer, **settings):
    return WrappedEngine(make_native(folder, tokenizer, **settings))


TEAM = "CONFORMANCE_TEAM"
"""In the environment of a process that is one rank of a team: rank, ranks and address."""


def make_team(name, **cut):
    build = {"native": build_native, "vllm": build_vllm}[name]
    longest = {"longest": 96} if name == "vllm" else {}

    def make(folder, tokenizer, **settings):
        cpu = torch.device("cpu")
        module = load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float32, device=cpu).requires_grad_(False)
        decode = lambda ids: tokenizer.decode(ids)  # noqa: E731
        config = RolloutConfig(name=name, kv_cache_gb=0.1, **cut, **settings)
        return build(module, config, decode=decode, device=cpu, team=team_of(2, cpu), **longest)[0]

    return make


def make_server(build):
    """An engine behind a server in a thread."""

    def make(folder, tokenizer, **settings):
        module = load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float32, device=torch.device("cpu"))
        inner = build(folder, tokenizer, **settings)
        about = {**describe(module, model="tiny", longest=96), "engine": "native", "takes_adapters": False}
        server = hosted(inner, about)
        engine = connected(module, tokenizer, server.__enter__())
        engine.close = lambda close=engine.close: (close(), server.__exit__(None, None, None), end(inner))
        return engine

    return make


def connected(module, tokenizer, url):
    config = RolloutConfig(name="server", server=ServerConfig(url=[url]))
    return connect_servers(module, config, decode=lambda ids: tokenizer.decode(ids), longest=96)[0]


def end(engine):
    if hasattr(engine, "close"):
        engine.close()


KEEPS_NOTHING = "import posttrain.rollout.native.pool as pool; pool.KEPT = 0\n"


def make_served_by_two(name, folder, tokenizer, kept, python):
    """A server's engine that two processes hold, started by the command. One server for each setting: every new
    connection takes it over, and loads all weights."""
    servers = {}

    def one(max_num_seqs=64):
        if max_num_seqs not in servers:
            words = ["--engine", name, "--dtype", "float32", "--max-model-len", "96"]
            rollout = {"tensor_model_parallel_size": 2, "kv_cache_gb": 0.1, "max_num_seqs": max_num_seqs}
            words += [f"actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()]
            server = served(python, folder, *words, before=KEEPS_NOTHING)
            servers[max_num_seqs] = server.__enter__()
            kept.append(SimpleNamespace(close=lambda: server.__exit__(None, None, None)))
        module = load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float32, device=torch.device("cpu"))
        return connected(module, tokenizer, servers[max_num_seqs].url)

    return one


TEAMS = {
    "native-by-two": make_team("native"),
    "vllm-by-two": make_team("vllm", tensor_model_parallel_size=2),
    "vllm-two-stages": make_team("vllm", pipeline_model_parallel_size=2),
}
# Models with recurrent states, by the kind in tiny.py.
RECURRENT = {"native of qwen3-next": "qwen3-next", "native of qwen3.5": "qwen3.5", "native of mamba2": "mamba2"}
FAKES = {"vllm over a fake": fake_vllm, "sglang over a fake": fake_sglang}
ENGINES = {
    "hf": make_hf,
    "native": make_native,
    "vllm over a fake": make_vllm,
    "vllm": make_vllm,
    "sglang over a fake": make_sglang,
    "sglang": make_sglang,
    "server": make_server(make_native),
    "server over vllm": make_server(make_vllm),
    "native, wrapped": make_wrapped,
    **dict.fromkeys(RECURRENT, make_native),
    **TEAMS,
}
SERVED = {"server of two, native": "native", "server of two, vllm": "vllm"}
"""Engines that the command serves, held by two processes."""
ONLY = os.environ.get("CONFORMANCE_ENGINE")
"""`scripts/compatibility.py` counts the tests of one engine."""


def engines():
    for name in (name for name in (*ENGINES, *SERVED) if ONLY in (None, name)):
        yield pytest.param(name, marks=pytest.mark.slow) if name in SERVED else name


@pytest.fixture(scope="module", params=engines())
def engine_name(request):
    if request.param in TEAMS and TEAM not in os.environ:
        pytest.skip("one rank of several: test_conformance_teams.py starts them")
    return request.param


@pytest.fixture(scope="module")
def folder(engine_name, tiny_model, tmp_path_factory):
    """vLLM's attention on CPUs knows no heads below 32."""
    if engine_name in RECURRENT:
        return write_tiny(RECURRENT[engine_name], tmp_path_factory.mktemp("models") / "recurrent")
    package = next((name for name in ("vllm", "sglang") if name in engine_name), None)
    if engine_name in FAKES or package is None:
        return tiny_model
    pytest.importorskip(package)
    return write_model(tmp_path_factory.mktemp("models") / "wide", **TINY | {"hidden_size": 128})


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(ModelConfig(path=str(folder)))


@pytest.fixture(scope="module")
def ranks(engine_name, folder):
    """Joined after the model was written: transformers writes on the first of several ranks only."""
    if engine_name not in TEAMS:
        yield
        return
    rank, count, address = os.environ[TEAM].split()
    join_ranks(int(rank), int(count), address, torch.device("cpu"), timeout_s=120)
    yield
    leave_ranks()


@pytest.fixture
def make(engine_name, folder, tokenizer, monkeypatch, kept, ranks, served_by_two):
    monkeypatch.setenv("POSTTRAIN_API_KEY", KEY)
    if engine_name in FAKES:
        FAKES[engine_name].install(monkeypatch)
    made = []

    def one(**settings):
        made.append(ENGINES[engine_name](folder, tokenizer, **settings))
        return made[-1]

    if engine_name == "sglang":
        one = again(folder, tokenizer, kept)
    yield served_by_two or one
    for engine in made:
        end(engine)


@pytest.fixture(scope="module")
def served_by_two(engine_name, folder, tokenizer, kept, forked):
    """Maker of an engine in `SERVED`, else None."""
    name = SERVED.get(engine_name)
    return name and make_served_by_two(name, folder, tokenizer, kept, forked.python)


@pytest.fixture(scope="module")
def kept():
    """SGLang is started once, as servers are: it takes half a minute."""
    engines = []
    yield engines
    for engine in engines:
        engine.close()


def again(folder, tokenizer, kept):
    """The one SGLang, as if it were new."""

    def one(max_num_seqs=1024):
        if not kept:
            kept.append(make_sglang(folder, tokenizer))
        (engine,) = kept
        engine.abort([row.request.id for row in (*engine.waiting, *engine.rows.values())])
        engine.wake()
        engine.load_weights(engine.source(), 0)
        engine.max_num_seqs = max_num_seqs
        return engine

    return one


@pytest.fixture
def prompts(tokenizer):
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def oracle(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_greedy_tokens_equal_plain_generate(make, prompts, oracle):
    setting = Sampling(max_tokens=12, greedy=True)
    for prompt, output in zip(prompts, generate(make(), prompts, [setting] * 4, [0] * 4), strict=True):
        plain = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        )[0, len(prompt) :]
        assert output.token_ids == plain.tolist()
        assert output.finish_reason == "length"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_tempered_model_within_1e_5(make, prompts, oracle, temperature):
    setting = Sampling(max_tokens=12, temperature=temperature, top_p=0.9)
    for prompt, output in zip(prompts, generate(make(), prompts, [setting] * 4, range(4)), strict=True):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            log_p = torch.log_softmax(oracle(ids).logits[0] / temperature, -1)
        expected = log_p[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)


def test_what_was_sampled_from_is_reported_where_it_is_not_the_model_itself(make, prompts, oracle):
    settings = [Sampling(max_tokens=6, top_k=5, repetition_penalty=1.3), Sampling(max_tokens=6)] * 2
    outputs = generate(make(), prompts, settings, range(4))
    assert [output.sampling_log_probs is None for output in outputs] == [False, True, False, True]
    for prompt, output in list(zip(prompts, outputs, strict=True))[::2]:
        ids = [*prompt, *output.token_ids]
        with torch.no_grad():
            logits = oracle(torch.tensor([ids])).logits[0]
        for place, token in enumerate(output.token_ids):
            row, seen = logits[len(prompt) + place - 1].clone(), sorted(set(ids[: len(prompt) + place]))
            row[seen] = torch.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
            expected = row[token] - row.topk(5).values.logsumexp(-1)
            assert output.sampling_log_probs[place] == pytest.approx(float(expected), abs=1e-5)
    batch = to_batch(prompts, outputs, 0).batch
    torch.testing.assert_close(batch["sampling_log_probs"][1], batch["rollout_log_probs"][1])
    assert not torch.allclose(batch["sampling_log_probs"][0], batch["rollout_log_probs"][0], atol=1e-3)


def test_a_sample_depends_on_its_seed_not_on_neighbours_order_or_batch(make, prompts):
    setting = Sampling(max_tokens=10)
    seeds = [11, 12, 13, 14]
    together = generate(make(), prompts, [setting] * 4, seeds)
    backwards = generate(make(), prompts[::-1], [setting] * 4, seeds[::-1])[::-1]
    narrow = generate(make(max_num_seqs=1), prompts, [setting] * 4, seeds)
    assert [o.token_ids for o in together] == [o.token_ids for o in backwards] == [o.token_ids for o in narrow]
    assert together[0].token_ids != together[2].token_ids  # the same prompt under another seed


def test_each_request_keeps_its_own_settings(make, prompts):
    settings = [Sampling(max_tokens=n, greedy=n % 2 == 0) for n in (1, 4, 7, 2)]
    outputs = generate(make(), prompts, settings, [0] * 4)
    assert [len(o.token_ids) for o in outputs] == [1, 4, 7, 2]


def test_stop_tokens_and_stop_strings_end_a_response_and_are_kept(make, prompts, tokenizer):
    free = generate(make(), prompts[:1], [Sampling(max_tokens=20)], [3])[0]
    token = free.token_ids[5]
    first = free.token_ids.index(token)
    stopped = generate(make(), prompts[:1], [Sampling(max_tokens=20, stop_token_ids=(token,))], [3])[0]
    assert stopped.token_ids == free.token_ids[: first + 1] and stopped.finish_reason == "stop"
    text = tokenizer.decode(free.token_ids[3:5])
    by_text = generate(make(), prompts[:1], [Sampling(max_tokens=20, stop=(text,))], [3])[0]
    assert by_text.finish_reason == "stop" and len(by_text.token_ids) <= 5


def test_outputs_come_as_soon_as_they_end(make, prompts):
    engine, order = make(), []
    for row, tokens in enumerate((9, 2, 5, 1)):
        engine.submit(Request(row, prompts[row], Sampling(max_tokens=tokens), row))
    while engine.has_work():
        order.append([output.id for output in advance(engine)])
    assert order == [[3], [1], [2], [0]]


def test_abort_gives_partial_outputs_and_the_others_go_on_unchanged(make, prompts):
    setting = Sampling(max_tokens=8)
    whole = generate(make(), prompts, [setting] * 4, range(4))
    engine = make(max_num_seqs=3)
    for row, prompt in enumerate(prompts):
        engine.submit(Request(row, prompt, setting, row))
    for _ in range(3):
        assert engine.step() == []
    gone = {output.id: output for output in engine.abort([1, 3])}
    assert gone[1].token_ids == whole[1].token_ids[:3] and gone[1].finish_reason == "abort"
    assert gone[3].token_ids == []
    rest = {}
    while engine.has_work():
        rest |= {output.id: output for output in engine.step()}
    assert {row: rest[row].token_ids for row in rest} == {0: whole[0].token_ids, 2: whole[2].token_ids}


def test_score_equals_the_log_probs_of_the_rows(make, prompts, oracle):
    for row, scored in zip(prompts, make().score(prompts, temperature=0.7), strict=True):
        ids = torch.tensor([row])
        with torch.no_grad():
            log_p = torch.log_softmax(oracle(ids).logits[0] / 0.7, -1)
        expected = log_p[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
        torch.testing.assert_close(scored, expected, rtol=0, atol=1e-5)


def test_new_weights_change_the_scores_and_carry_their_version(make, prompts, oracle):
    engine = make()
    before = engine.score(prompts)[1]
    engine.load_weights([(name, w * 1.1) for name, w in oracle.state_dict().items()], version=7)
    assert not torch.allclose(engine.score(prompts)[1], before)
    output = generate(engine, prompts[:1], [Sampling(max_tokens=3)], [0])[0]
    assert output.versions == [(7, 3)]


def test_weights_wake_and_are_synced_before_the_cache_is_taken(make, prompts, oracle, monkeypatch):
    monkeypatch.setattr("posttrain.rollout.native.pool.KEPT", 0)
    engine = make()
    rows = [Request(row, prompt, Sampling(max_tokens=4), row) for row, prompt in enumerate(prompts)]
    for request in rows:
        engine.submit(request)
    with pytest.raises(RuntimeError, match="abort them"):  # also where none has begun: a step would wake it unasked
        engine.sleep()
    engine.step()
    assert engine.cache_bytes() > 0
    with pytest.raises(RuntimeError, match="abort them"):
        engine.sleep()
    engine.abort([request.id for request in rows])
    engine.sleep()
    assert engine.cache_bytes() == 0
    weights = oracle.state_dict()
    for asleep in (lambda: engine.submit(rows[0]), lambda: engine.score(prompts), lambda: engine.load_weights([], 1)):
        with pytest.raises(RuntimeError, match=r"the engine is asleep: wake\(.* comes first"):
            asleep()
    with pytest.raises(RuntimeError, match="weights are asleep"):
        engine.wake("cache")
    engine.wake("weights")
    engine.load_weights([(name, weight * 1.1) for name, weight in weights.items()], version=3)
    scored = engine.score(prompts)
    assert engine.cache_bytes() == 0  # neither new weights nor the proof that they arrived need it
    with pytest.raises(RuntimeError, match=r"wake\('cache'\) comes first"):
        engine.submit(rows[0])
    engine.wake("cache")
    outputs = generate(engine, prompts, [Sampling(max_tokens=4)] * 4, range(4))
    assert [output.versions for output in outputs] == [[(3, 4)]] * 4
    for one, other in zip(scored, engine.score(prompts), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_batch_is_padded_to_its_longest_only(make, prompts):
    outputs = generate(make(), prompts, [Sampling(max_tokens=n) for n in (3, 1, 4, 2)], range(4))
    batch = to_batch(prompts, outputs, pad_token_id=0).batch
    assert batch["prompts"].shape == (4, max(map(len, prompts))) and batch["responses"].shape == (4, 4)
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], -1))
    assert batch["response_mask"].sum(-1).tolist() == [3, 1, 4, 2]
    for row, output in zip(batch["rollout_log_probs"], outputs, strict=True):
        assert row.tolist() == pytest.approx([*output.log_probs, *[0.0] * (4 - len(output.token_ids))])
    assert batch["attention_mask"].sum(-1).tolist() == [len(p) + n for p, n in zip(prompts, (3, 1, 4, 2), strict=True)]


def test_wrong_requests_are_refused(make, prompts):
    with pytest.raises(ValueError, match="room for at least one token"):
        make().submit(Request(0, prompts[0], Sampling(max_tokens=0), 0))


def test_a_call_that_fails_leaves_no_request_behind(make, prompts):
    """The ids of the next call are the same: what was left would be taken for its answers."""
    engine, wanted = make(), Sampling(max_tokens=3)
    with pytest.raises(ValueError, match="room for at least one token"):
        generate(engine, prompts, [wanted, wanted, wanted, Sampling(max_tokens=0)], [7] * 4)
    assert not engine.has_work()
    again = generate(engine, prompts[:1], [wanted], [0])
    assert again[0].token_ids == generate(make(), prompts[:1], [wanted], [0])[0].token_ids

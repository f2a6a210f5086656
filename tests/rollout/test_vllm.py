"""The `vllm` engine over a small fake of vLLM: what vLLM is asked for, and what becomes of its answers.

The real one is in the conformance suite, where it is installed.
"""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.config import load_config
from posttrain.config.model import ModelConfig
from posttrain.config.resolved import ConfigError
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError
from posttrain.kernels.tensor_parallel import Team
from posttrain.models.adapter_files import adapter_parameters
from posttrain.models.forward import row_log_probs
from posttrain.models.loading import load_causal_lm, load_tokenizer
from posttrain.models.lora import merged_state, with_adapters
from posttrain.rollout import engines
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.generate import generate
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.outside import restored_process_state
from posttrain.rollout.vllm import build
from posttrain.rollout.vllm.engine import VLLMEngine
from posttrain.rollout.vllm.inside import Inside, remove_shared_names
from tests.rollout import fake_vllm

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [5, 6, 7]]
ROLLOUT = "actor_rollout_ref.rollout"
CPU = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch):
    return fake_vllm.install(monkeypatch)


@pytest.fixture
def model(tiny_model):
    return load_causal_lm(ModelConfig(path=str(tiny_model)), dtype=torch.float32, device=CPU)


@pytest.fixture
def engine(fake, model) -> VLLMEngine:
    return built(model)


def built(model, longest=64, **settings) -> VLLMEngine:
    made = build.build_vllm(model, RolloutConfig(name="vllm", **settings), decode=None, longest=longest)
    assert not isinstance(made, str)
    return made[0]


def expected(model, prompt, tokens, temperature=1.0):
    return row_log_probs(model, [[*prompt, *tokens]], temperature)[0][-len(tokens) :]


def test_a_row_as_long_as_it_is_made_for_is_scored_and_a_longer_one_is_refused(engine):
    prompt, filtered = [5] * 60, {"temperature": 0.7, "top_k": 5}
    engine.submit(Request("fits", prompt, Sampling(max_tokens=4, **filtered), 1))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert len(outputs[0].token_ids) == len(outputs[0].log_probs) == 4
    with pytest.raises(ValueError, match="may have 65 tokens, more than the 64 that vLLM was made for"):
        engine.submit(Request("long", prompt, Sampling(max_tokens=5, **filtered), 1))


def test_without_vllm_asking_for_it_is_answered_at_once_with_what_to_install(monkeypatch, model, tiny_model):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'the package vllm is not installed[\s\S]*pip install "posttrain\[vllm\]"'):
        load_config([f"{ROLLOUT}.name=vllm"], environment=True)
    with pytest.raises(UserError, match=r"name=vllm: the package vllm is not installed .*name=native"):
        build_engine(RolloutConfig(name="vllm"), model, load_tokenizer(ModelConfig(path=str(tiny_model))))


def test_an_engine_may_be_held_by_as_many_workers_as_divide_all(fake):
    together = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2"]
    resolved = load_config([*together, "trainer.n_gpus_per_node=2"], environment=True)
    assert resolved.value(f"{ROLLOUT}.tensor_model_parallel_size") == 2
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=2` does not divide the 1 x 1 = 1 worker"):
        load_config(together, environment=True)
    stages = f"{ROLLOUT}.pipeline_model_parallel_size=2"
    with pytest.raises(ConfigError, match=r"=2` x `[a-z_.]*pipeline_model_parallel_size=2` does not divide the 2 x"):
        load_config([*together, stages, "trainer.n_gpus_per_node=2"], environment=True)
    resolved = load_config([*together, stages, "trainer.n_gpus_per_node=4"])
    assert resolved.config.actor_rollout_ref.rollout.engine_size == 4


class Pair(Team):
    """Two ranks of which only this one is there."""

    def __init__(self):
        self.rank, self.size, self.device = 0, 2, CPU

    def _all(self, number):
        return [number, number + 1]


def test_workers_that_hold_one_engine_tell_vllm_their_rank_and_a_name_of_this_run(fake, model, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    held = []
    for team in (Pair(), Pair(), None):
        config = RolloutConfig(name="vllm", max_num_seqs=4)
        made = build.build_vllm(model, config, decode=None, longest=64, team=team)
        assert not isinstance(made, str)
        held.append((made, fake.made[-1].args))
    (engine, said), args = held[0]
    assert args.tensor_parallel_size == 2 and "held by 2 workers" in said
    assert engine.ranks == 2  # otherwise its ranks would stop to admit requests by their clocks, after different steps
    method, rank, local_rank = args.distributed_executor_backend()._distributed_args()
    assert (rank, local_rank) == (3, 0)
    assert method != held[1][1].distributed_executor_backend()._distributed_args()[0], (
        "after a kill nothing would start"
    )
    (one, alone), whole = held[2]
    assert whole.tensor_parallel_size is None and "held by" not in alone and one.ranks == 1
    assert args.kv_cache_memory_bytes == whole.kv_cache_memory_bytes // 2


def test_ranks_of_several_stages_plan_all_caches_and_go_on_with_what_the_last_stage_made(fake, model, monkeypatch):
    monkeypatch.setattr("posttrain.rollout.vllm.inside.of_all", lambda team, own: [own, [f"rank 1: {own[0]}"]])
    config = RolloutConfig(name="vllm", pipeline_model_parallel_size=2)
    made = build.build_vllm(model, config, decode=None, longest=64, team=Pair())
    assert not isinstance(made, str) and "held by 2 workers, in 2 stages" in made[1]
    args, core = fake.made[-1].args, fake.made[-1].engine_core.engine_core
    assert (args.tensor_parallel_size, args.pipeline_parallel_size) == (1, 2)
    assert core.batch_queue is None and core.step_fn == core.step  # a step gives the tokens of the batch it began
    runner = fake.made[-1].model_executor.driver_worker.model_runner
    assert runner.intermediate_tensors.shape == (8, 4)  # for what the stage before sends
    executor = args.distributed_executor_backend()
    assert executor.supports_pp
    assert executor.get_kv_cache_specs() == [{"layer 0": "own"}, "rank 1: {'layer 0': 'own'}"]
    assert executor.determine_available_memory() == [100, "rank 1: 100"]
    executor.initialize_from_config(["mine", "theirs"])
    assert executor.configs == ["mine"]
    assert executor.sample_tokens(None) == "the last stage's tokens"
    built(model)
    assert fake.made[-1].engine_core.engine_core.batch_queue == []  # one stage is left as vLLM made it


@pytest.mark.parametrize("trains", [True, False])
def test_closing_an_engine_leaves_the_process_group_to_those_who_train_with_it(fake, model, monkeypatch, trains):
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.is_initialized", lambda: trains)
        engine = built(model)
    engine.close()
    assert engine.llm.closed and engine.llm.ended_process_group is not trains


class Rearranged(torch.nn.Module):
    """As vLLM's models on CPUs: what a weight is loaded with is gone as soon as its layer has it."""

    def __init__(self):
        super().__init__()
        self.kept = torch.nn.Parameter(torch.empty(0))  # in an order of its own
        self.reloads, self.open, self.held = 0, set[str](), dict[str, float]()

    def compute_logits(self): ...

    def load_weights(self, weights):
        for name, weight in weights:
            self.open.remove(name)
            self.held[name] = float(weight)


def test_weights_that_come_again_before_any_use_begin_a_new_reload(monkeypatch):
    """A run took over a server of a run that was killed behind its first sync."""
    model = Rearranged()

    def begin(_):
        model.reloads, model.open = model.reloads + 1, {"a", "b"}

    reload = ModuleType("reload")
    reload.__dict__.update(initialize_layerwise_reload=begin, finalize_layerwise_reload=lambda *_: None)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", reload)
    runner = SimpleNamespace(get_model=lambda: model, kv_caches=[])
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    settings = SimpleNamespace(device_config=SimpleNamespace(device="cpu"), model_config=None)
    inside = Inside(SimpleNamespace(model_executor=executor, vllm_config=settings))
    first, second = torch.tensor(1.0), torch.tensor(2.0)
    inside.load([("a", first)])
    inside.load([("b", first)])  # the second bucket of the same sync
    assert model.reloads == 1 and model.held == {"a": 1.0, "b": 1.0}
    inside.load([("a", second), ("b", second)])
    assert model.reloads == 2 and model.held == {"a": 2.0, "b": 2.0}
    inside.load([("b", first), ("a", first), ("a", second), ("b", second)])
    inside.finish_loading()
    inside.load([])
    assert model.reloads == 4 and model.held == {"a": 2.0, "b": 2.0}


def test_a_tied_head_that_a_sync_sends_once_is_renewed_too(fake, model):
    assert model.lm_head.weight is model.model.embed_tokens.weight
    engine = built(model)
    got = []
    engine.inside.model.load_weights = lambda weights: got.extend(name for name, _ in weights)  # pyright: ignore
    engine.load_weights([("model.embed_tokens.weight", model.lm_head.weight), ("model.norm.weight", torch.ones(1))], 1)
    assert got == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    got.clear()
    engine.load_weights(model.state_dict().items(), 2)
    assert sorted(got) == sorted(model.state_dict())


def test_it_is_built_by_its_name_and_proved_and_what_it_does_not_know_hf_serves(fake, model, tiny_model, monkeypatch):
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    engine, said = build_engine(RolloutConfig(name="vllm"), model, tokenizer, longest=64)
    assert isinstance(engine, VLLMEngine) and said.startswith("vllm")
    monkeypatch.setattr(fake_vllm.Model, "compute_logits", lambda self, hidden: 1.1 * self.hf.lm_head(hidden))
    engine, said = build_engine(RolloutConfig(name="vllm"), model, tokenizer, longest=64)
    assert isinstance(engine, HFEngine) and "vllm is not used for qwen2 models: its log-probs are not those" in said
    assert [one.closed for one in fake.made] == [False, True]
    monkeypatch.setattr("vllm.ModelRegistry.get_supported_archs", lambda: [])
    assert "it does not know Qwen2ForCausalLM" in build_engine(RolloutConfig(name="vllm"), model, tokenizer)[1]


def test_a_model_that_made_room_for_vllm_is_back_on_its_device_where_vllm_does_not_serve(monkeypatch):
    class Module:
        """Weights in name only: there is no GPU here."""

        def __init__(self):
            self.device = torch.device("cuda")

        def parameters(self):
            return iter([self])

        def to(self, device):
            self.device = torch.device(device)

    closed = []
    engine = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(engines, "build_vllm", lambda module, *args, **named: module.to("cpu") or (engine, "vllm"))
    for problem, where in (("its log-probs are wrong", "cuda"), (None, "cpu")):
        monkeypatch.setattr(engines, "why_wrong", lambda engine, module, problem=problem: problem)
        order: Any = SimpleNamespace(module=Module(), config=None, decode=None, device=None, longest=None, team=None)
        engines.make_vllm(order)
        assert order.module.device.type == where
    assert closed == [True]


def test_vllm_is_made_with_what_follows_from_the_settings(fake, model):
    built(model, max_num_seqs=3, kv_cache_gb=0.25, max_num_batched_tokens=500)
    args = vars(fake.made[0].args)
    assert args["max_num_seqs"] == 3 and args["kv_cache_memory_bytes"] == 2**28
    assert args["max_num_batched_tokens"] == 500 and args["max_model_len"] == 65 and args["dtype"] == "float32"
    assert args["logprobs_mode"] == "processed_logprobs" and args["load_format"] == "dummy"
    assert args["enforce_eager"] and not args["enable_chunked_prefill"]  # on a CPU
    rows = build.arguments(RolloutConfig(max_num_seqs=2), model, CPU, 64)
    assert rows["kv_cache_memory_bytes"] == 2 * (65 + 128) * build.bytes_per_token(model)
    cuda = torch.device("cuda")
    shared = build.arguments(RolloutConfig(gpu_memory_utilization=0.4), model, cuda, 64)
    assert shared["gpu_memory_utilization"] == 0.4 and "kv_cache_memory_bytes" not in shared
    assert shared["enable_sleep_mode"] and "enforce_eager" not in shared
    assert build.arguments(RolloutConfig(), model, cuda, 64)["gpu_memory_utilization"] == build.SHARE


def test_arguments_of_the_users_own_reach_vllm_and_null_is_not_given(fake, model):
    given = {"block_size": 16, "compilation_config": {"mode": 3}, "mm_processor_cache_gb": None, "max_model_len": 80}
    built(model, engine_kwargs={"vllm": given, "sglang": {"attention_backend": "fa3"}})
    args = fake.made[0].args
    assert args.block_size == 16 and args.compilation_config == {"mode": 3} and args.mm_processor_cache_gb is None
    assert args.max_model_len == 81  # rows of 80 tokens, and one more where they are scored
    cuda = torch.device("cuda")
    for value in (True, False):
        given = {"vllm": {"enforce_eager": value, "enable_chunked_prefill": not value}}
        eager = build.arguments(RolloutConfig(engine_kwargs=given), model, cuda, 64)
        assert eager["enforce_eager"] is value and eager["enable_chunked_prefill"] is not value
        on_cpu = build.arguments(RolloutConfig(engine_kwargs=given), model, CPU, 64)
        assert on_cpu["enforce_eager"] and not on_cpu["enable_chunked_prefill"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"block_sise": 16},
            r"vllm.block_sise`: the vLLM that is installed has no such argument. did you mean `block_s",
        ),
        ({"wobble": 1}, r"vllm.wobble`: the vLLM that is installed has no such argument. remove it"),
        ({"dtype": "half"}, r"vllm.dtype` cannot be set: `actor_rollout_ref.model.dtype` decides it"),
        (
            {"pipeline_parallel_size": 2},
            r"vllm.pipeline_parallel_size` cannot be set: `actor_rollout_ref.rollout.pipeline_model_parallel_size` d",
        ),
        ({"load_format": "auto"}, r"load_format=auto` cannot be used: posttrain's engine is built on dummy"),
    ],
)
def test_arguments_that_vllm_does_not_have_or_that_are_decided_here_are_refused(fake, model, given, said):
    with pytest.raises(UserError, match=said):
        built(model, engine_kwargs={"vllm": given})
    assert not fake.made


def test_experts_are_not_spread_on_a_cpu_and_mixtures_are_not_given_to_its_cpu_build(fake, model, monkeypatch):
    spread = {"vllm": {"enable_expert_parallel": True}}
    assert build.arguments(RolloutConfig(engine_kwargs=spread), model, torch.device("cuda"), 64)[
        "enable_expert_parallel"
    ]
    assert not build.arguments(RolloutConfig(engine_kwargs=spread), model, CPU, 64)["enable_expert_parallel"]
    key = f"+{ROLLOUT}.engine_kwargs.vllm.enable_expert_parallel=true"
    notes = load_config([f"{ROLLOUT}.name=vllm", key, "trainer.device=cpu"]).notes
    assert any("enable_expert_parallel=True has no effect: on a CPU vLLM runs with False" in note for note in notes)
    monkeypatch.setattr(model.config, "num_experts", 4, raising=False)
    made = build.build_vllm(model, RolloutConfig(name="vllm"), decode=None, longest=64)
    assert made == "its CPU build does not take new weights for experts" and not fake.made


def test_making_it_leaves_the_random_numbers_of_the_process_alone(fake, model):
    torch.manual_seed(3)
    random.seed(3)
    wanted = (torch.rand(1), random.random())
    torch.manual_seed(3)
    random.seed(3)
    built(model)  # the fake seeds torch, as vLLM does
    assert (torch.rand(1), random.random()) == wanted


def test_what_vllm_says_when_it_does_not_start_is_said_with_what_decides_it(fake, model, monkeypatch):
    def fails(args):
        raise ValueError("Free memory on device is less than desired\nmore lines")

    monkeypatch.setattr(fake, "from_engine_args", fails)
    with pytest.raises(UserError, match=r"Free memory on device is less than desired\. Its share .*gpu_memory_utiliz"):
        built(model)

    def refuses(args):
        raise ValueError("1 validation error for CacheConfig\nblock_size\n  Input should be an integer\n    more")

    monkeypatch.setattr(fake, "from_engine_args", refuses)
    with pytest.raises(UserError, match=r"for CacheConfig block_size Input should be an integer$"):
        built(model)


def test_filters_at_another_temperature_give_both_log_probs_and_no_request_the_scale_of_another(engine, model):
    sharp, plain = Sampling(max_tokens=5, temperature=0.5, top_k=3), Sampling(max_tokens=4, temperature=0.7)
    rows = [sharp, plain, Sampling(max_tokens=3, greedy=True), Sampling(max_tokens=5, temperature=2.0, top_p=0.8)]
    prompts = [*PROMPTS, [4, 3]]
    outputs = generate(engine, prompts, rows, range(4))
    for prompt, sampling, output in zip(prompts, rows, outputs, strict=True):
        temperature = 1.0 if sampling.greedy else sampling.temperature
        own = expected(model, prompt, output.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(output.log_probs), own, rtol=0, atol=1e-5)
        assert (output.sampling_log_probs is None) == sampling.plain
        if output.sampling_log_probs is not None:
            drawn = torch.tensor(output.sampling_log_probs)
            assert bool((drawn >= own - 1e-5).all()) and not torch.allclose(drawn, own, atol=1e-3)
    assert engine.inside.scale in (1.0, 2.0) and len(outputs[0].token_ids) == 5
    torch.testing.assert_close(
        engine.score(prompts[:1])[0], row_log_probs(model, prompts[:1], 1.0)[0], rtol=0, atol=1e-5
    )


def test_a_greedy_row_with_a_penalty_reports_the_models_own_log_probs_twice(engine, model):
    output = generate(engine, PROMPTS[:1], [Sampling(max_tokens=4, greedy=True, repetition_penalty=1.5)], [0])[0]
    assert output.log_probs == output.sampling_log_probs
    own = expected(model, PROMPTS[0], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), own, rtol=0, atol=1e-5)


def test_prompts_that_were_computed_with_old_weights_are_forgotten(engine, model):
    greedy = Sampling(max_tokens=3, greedy=True)
    generate(engine, PROMPTS, [greedy] * 3, [0] * 3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1.3)
    engine.load_weights(model.state_dict().items(), 5)
    output = generate(engine, PROMPTS[:1], [greedy], [0])[0]
    own = expected(model, PROMPTS[0], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), own, rtol=0, atol=1e-5)
    assert output.versions == [(5, 3)]


def test_weights_that_change_under_way_make_two_spans_and_rows_with_filters_do_not_allow_it(engine, fake, model):
    engine.submit(Request("a", PROMPTS[0], Sampling(max_tokens=4), 0))
    engine.step()
    engine.load_weights(model.state_dict().items(), 1)
    assert not fake.made[0].remembered  # also while it runs
    while engine.has_work():
        ended = engine.step()
    assert ended[0].versions == [(0, 1), (1, 3)]
    engine.submit(Request("b", PROMPTS[0], Sampling(max_tokens=4, top_k=2), 0))
    engine.step()
    with pytest.raises(RuntimeError, match="scored at their end"):
        engine.load_weights([], 2)
    gone = engine.abort(["b"])[0]
    assert gone.token_ids and all(p != p for p in gone.log_probs)  # nobody has computed them
    assert not engine.has_work() and not fake.made[0].running


@torch.no_grad()
def draw(adapted):
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.normal_()


@torch.no_grad()
def differ(engine, model) -> float:
    return max(
        float((found - expected(model, row[:1], row[1:])).abs().max())
        for found, row in zip(engine.score(PROMPTS), PROMPTS, strict=True)
    )


def test_adapters_are_held_beside_the_base_and_a_sync_replaces_them_alone(fake, model):
    adapted = with_adapters(model, ModelConfig(lora_rank=9, target_modules="all-linear"))
    draw(adapted)
    engine = built(adapted)
    assert engine.takes_adapters and fake.made[0].args.max_lora_rank == 16
    assert differ(engine, adapted) < 1e-5
    base = {name: weight.clone() for name, weight in engine.inside.model.state_dict().items()}
    draw(adapted)
    assert differ(engine, adapted) > 1e-2, "what was handed over is a copy"
    sent = [*adapter_parameters(adapted).items()]
    engine.load_weights(sent[:5], 1)  # in buckets
    engine.load_weights(sent[5:], 1)
    assert differ(engine, adapted) < 1e-5
    assert all(torch.equal(weight, base[name]) for name, weight in engine.inside.model.state_dict().items())
    engine.submit(Request("a", PROMPTS[0], Sampling(max_tokens=4), 0))
    engine.step()
    draw(adapted)
    engine.load_weights(adapter_parameters(adapted).items(), 2)  # also while a response is under way
    while engine.has_work():
        (output,) = engine.step() or [None]
    assert output is not None and output.versions == [(1, 1), (2, 3)]
    own = expected(adapted, PROMPTS[0], output.token_ids)[1:]
    torch.testing.assert_close(torch.tensor(output.log_probs[1:]), own, rtol=0, atol=1e-5)
    folder = Path(engine.adapters._folder.name)
    assert folder.exists()
    engine.close()
    assert not folder.exists()


def test_on_a_gpu_a_sync_of_adapters_finds_the_base_that_sleep_gave_back(fake, model, monkeypatch):
    adapted = with_adapters(model, ModelConfig(lora_rank=2, target_modules="all-linear"))
    engine, whole, loads = built(adapted), len(fake.made[0].model.hf.state_dict()), []
    monkeypatch.setattr(engine.inside, "on_cuda", True)
    monkeypatch.setattr(engine.inside, "drop", lambda stage, *, keep: None)
    monkeypatch.setattr(engine.inside, "take", lambda stage: None)
    monkeypatch.setattr(engine.inside, "load", lambda weights: loads.append(len([*weights])))
    engine.sleep()
    engine.wake("weights")
    engine.load_weights(adapter_parameters(adapted).items(), 1)
    assert loads == [whole]
    fake.made[0].read = None
    engine.wake("cache")
    assert fake.made[0].read is not None, "vLLM's copy of the adapters was given back, too"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora_rank": 4, "target_modules": ["lm_head", "q_proj"]}, "the head has an adapter"),
        ({"lora_rank": 4, "target_modules": "all-linear", "version": "old"}, "this version of vLLM cannot load"),
    ],
)
def test_adapters_that_vllm_cannot_hold_are_folded_into_the_base_and_the_name_says_why(
    fake, model, monkeypatch, change, said
):
    if change.pop("version", None):
        monkeypatch.delattr(fake_vllm.BaseLayerWithLoRA, "load_weights")
    adapted = with_adapters(model, ModelConfig(**change))
    draw(adapted)
    made = build.build_vllm(adapted, RolloutConfig(name="vllm"), decode=None, longest=64)
    assert not isinstance(made, str) and not made[0].takes_adapters and said in made[1]
    with pytest.raises(UserError, match=rf"enable_lora=true: .*{said}"):
        built(adapted, engine_kwargs={"vllm": {"enable_lora": True}})


def test_adapters_reach_it_folded_into_the_weights_where_the_user_wants_it(fake, model):
    adapted = with_adapters(model, ModelConfig(lora_rank=2, target_modules="all-linear"))
    draw(adapted)
    engine = built(adapted, engine_kwargs={"vllm": {"enable_lora": False}})
    assert not engine.takes_adapters and not fake.made[0].args.enable_lora
    output = generate(engine, PROMPTS[:1], [Sampling(max_tokens=4)], [0])[0]
    own = expected(adapted, PROMPTS[0], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), own, rtol=0, atol=1e-5)
    engine.load_weights(merged_state(adapted).items(), 1)
    assert engine.source is not None  # the trainer's own weights can be read again


def test_on_a_gpu_weights_that_a_sync_brings_are_read_once_and_others_when_the_cache_wakes(engine, model, monkeypatch):
    loads, dropped = [], []
    monkeypatch.setattr(engine.inside, "on_cuda", True)
    monkeypatch.setattr(engine.inside, "drop", lambda stage, *, keep: dropped.append((stage, keep)))
    monkeypatch.setattr(engine.inside, "take", lambda stage: None)
    monkeypatch.setattr(engine.inside, "load", lambda weights: loads.append(len([*weights])))
    whole = len(model.state_dict())
    engine.sleep()
    assert dropped == [("cache", False), ("weights", False)]  # the trainer has them
    engine.wake("weights")
    engine.load_weights([("one", torch.zeros(1))], 1)
    engine.wake("cache")
    assert loads == [1]
    engine.sleep()
    engine.wake()
    assert loads == [1, whole]  # no sync came between
    engine.sleep()
    engine.wake("weights")
    engine.sleep()  # still without any
    engine.wake()
    assert loads == [1, whole, whole]
    apart = built(model.requires_grad_(False))
    monkeypatch.setattr(apart.inside, "on_cuda", True)
    monkeypatch.setattr(apart.inside, "drop", lambda stage, *, keep: dropped.append((stage, keep)))
    apart.sleep()
    assert dropped[-1] == ("weights", True)  # nobody else has them


def test_rows_that_end_by_a_text_or_by_an_error_are_no_longer_vllms(fake, model, monkeypatch):
    engine = built(model)
    engine.decode = lambda ids: "enough" * len(ids)
    engine.submit(Request("stops", PROMPTS[0], Sampling(max_tokens=9, stop=("enough",)), 2**63 + 5))
    (output,) = engine.step()
    assert output.finish_reason == "stop" and len(output.token_ids) == 1 and engine.llm.running == []
    assert 0 <= engine.llm.asked[-1].seed < 2**63, "vLLM takes seeds of 63 bits"

    def fails():
        raise RuntimeError("no")

    monkeypatch.setattr(engine.llm, "step", fails)
    with pytest.raises(RuntimeError, match="no"):
        engine.score([PROMPTS[0]])
    assert not engine.has_work() and engine.llm.running == []


def test_a_further_turn_goes_on_from_its_parents_tokens(engine, model):
    first = Request("turn 1", PROMPTS[0], Sampling(max_tokens=3), 0, keep=True)
    engine.submit(first)
    while engine.has_work():
        ended = engine.step()
    prompt = [*PROMPTS[0], *ended[0].token_ids, 11, 12]
    engine.submit(Request("turn 2", prompt, Sampling(max_tokens=3), 0, parent="turn 1", keep=True))
    while engine.has_work():
        ended = engine.step()
    own = expected(model, prompt, ended[0].token_ids)
    torch.testing.assert_close(torch.tensor(ended[0].log_probs), own, rtol=0, atol=1e-5)
    engine.release(["turn 2"])


def test_the_error_of_an_engine_that_broke_the_device_is_the_one_that_is_raised(monkeypatch):
    """After an illegal access torch cannot set a GPU's random state, and said so instead of what had failed."""

    @contextmanager
    def fork_rng():
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    random.seed(5)
    expected = random.Random(5).random()
    with pytest.raises(ValueError, match="vLLM does not start"), restored_process_state():
        random.seed(1)
        raise ValueError("vLLM does not start")
    assert random.random() == expected


class Ring:
    """vLLM's buffer between the ranks of a group."""

    def __init__(self, is_creator: bool) -> None:
        self.is_creator, self.shared_memory, self.removed = is_creator, self, 0

    def unlink(self) -> None:
        self.removed += 1


@pytest.mark.parametrize("rank", [0, 1])
def test_shared_memory_of_ranks_keeps_no_name_and_that_of_others_does(tmp_path, monkeypatch, rank):
    own, of_another, without = Ring(True), Ring(False), None
    rings = [SimpleNamespace(buffer=own), SimpleNamespace(buffer=of_another), without]
    groups = [SimpleNamespace(mq_broadcaster=ring) for ring in rings]
    state = SimpleNamespace(_groups={str(place): lambda group=group: group for place, group in enumerate(groups)})
    state._groups["ended"] = lambda: None
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace(parallel_state=state))
    names = ["posttrain-ab-tp:0-[0-1]-cpushm_0", "posttrain-abc-tp:0-[0-1]-cpushm_0", "other"]
    for name in names:
        (tmp_path / name).touch()
    met = []
    team: Any = SimpleNamespace(rank=rank, smallest=met.append)
    remove_shared_names(team, "posttrain-ab", tmp_path)
    assert met == [0]  # all ranks have come so far
    assert (own.removed, own.is_creator, of_another.removed) == (1, False, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:] if rank == 0 else names)

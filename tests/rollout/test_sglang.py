"""The `sglang` engine over a small fake of SGLang: what SGLang is asked for, and what becomes of its answers.

The real one is in the conformance suite, where it is installed.
"""

from __future__ import annotations

import logging
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.config import load_config
from posttrain.config.model import ModelConfig
from posttrain.config.resolved import ConfigError
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError
from posttrain.models.forward import row_log_probs
from posttrain.models.loading import load_causal_lm, load_tokenizer
from posttrain.models.lora import with_adapters
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.generate import generate
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native
from posttrain.rollout.sglang import build, engine, inside
from posttrain.rollout.sglang.engine import SGLangEngine
from tests.rollout import fake_sglang

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [5, 6, 7]]
ROLLOUT = "actor_rollout_ref.rollout"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def fake(monkeypatch):
    return fake_sglang.install(monkeypatch)


@pytest.fixture
def model(tiny_model):
    return load_causal_lm(ModelConfig(path=str(tiny_model)), dtype=torch.float32, device=CPU)


@pytest.fixture
def sglang(fake, model) -> SGLangEngine:
    return built(model)


def built(model, longest=64, **settings) -> SGLangEngine:
    made = build.build_sglang(model, RolloutConfig(name="sglang", **settings), decode=None, longest=longest)
    assert not isinstance(made, str)
    return made[0]


def expected(model, prompt, tokens, temperature=1.0):
    return row_log_probs(model, [[*prompt, *tokens]], temperature)[0][-len(tokens) :]


def drained(sglang):
    outputs = []
    while sglang.has_work():
        outputs += sglang.step()
    return outputs


def test_without_sglang_the_answer_says_how_to_install_it(monkeypatch, model, tiny_model):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package sglang is not installed[\s\S]*pip install --no-deps sglang"):
        load_config([f"{ROLLOUT}.name=sglang"], environment=True)
    with pytest.raises(UserError, match=r"name=sglang: the package sglang is not installed .*name=native"):
        build_engine(RolloutConfig(name="sglang"), model, load_tokenizer(ModelConfig(path=str(tiny_model))))


def test_with_sglang_the_engine_is_recorded_by_its_name_and_proved(fake, model, tiny_model, monkeypatch):
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    assert load_config([f"{ROLLOUT}.name=sglang"], environment=True).value(f"{ROLLOUT}.name") == "sglang"
    made, said = build_engine(RolloutConfig(name="sglang"), model, tokenizer, longest=64)
    assert isinstance(made, SGLangEngine) and said.startswith("sglang (")
    monkeypatch.setattr(fake, "get_logits", lambda self, hidden: 1.1 * self.model.lm_head(hidden))
    other, said = build_engine(RolloutConfig(name="sglang"), model, tokenizer, longest=64)
    assert isinstance(other, HFEngine) and "sglang is not used for qwen2 models: its log-probs are not those" in said


def test_an_engine_over_several_devices_is_refused(fake):
    with pytest.raises(ConfigError, match="a SGLang engine over several devices is not built") as refused:
        load_config([f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.tensor_model_parallel_size=2"], environment=True)
    assert str(refused.value).startswith("1 problem")


def test_it_draws_the_tokens_that_native_draws(sglang, model):
    native = build_native(model, RolloutConfig(kv_cache_gb=0.1), decode=None)[0]
    settings = [Sampling(max_tokens=6), Sampling(max_tokens=5, temperature=0.7, top_k=4), Sampling(3, greedy=True)]
    for one, other in zip(*(generate(x, PROMPTS, settings, [3, 4, 5]) for x in (sglang, native)), strict=True):
        assert one.token_ids == other.token_ids
        assert [*one.log_probs] == pytest.approx([*other.log_probs], abs=1e-5)


def test_rows_of_one_batch_are_drawn_each_from_its_own_logits_also_where_these_are_cut_from_wider_ones():
    wide = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    told = [inside.sampler_params(Sampling(1, greedy=True), 0, 0), inside.sampler_params(Sampling(1, top_k=1), 0, 0)]
    rows = [SimpleNamespace(sampling_params=SimpleNamespace(custom_params=one), output_ids=[], origin_input_ids=[1])
            for one in (*told, told[0])]  # fmt: skip
    tokens, log_probs, drawn = inside.draw(wide[:, :33], rows)
    best = wide[:, :33].log_softmax(-1).max(-1)
    assert tokens.tolist() == best.indices.tolist()
    torch.testing.assert_close(log_probs, best.values, rtol=0, atol=1e-5)
    assert drawn[1] == pytest.approx(0.0, abs=1e-6)  # the only one that is left


def test_sglang_is_made_with_what_follows_from_the_settings(fake, model):
    sglang = built(model, max_num_seqs=3, kv_cache_gb=0.25, max_num_batched_tokens=500)
    args = vars(fake.made[0].args)
    per_token = build.bytes_per_token(model)
    assert args["max_running_requests"] == 3 and args["max_total_tokens"] == 2**28 // per_token
    assert sglang.cache_bytes() == args["max_total_tokens"] * per_token
    assert args["chunked_prefill_size"] == 500 and args["context_length"] == 65 and args["dtype"] == "float32"
    assert args["load_format"] == "dummy" and args["device"] == "cpu" and args["attention_backend"] == "torch_native"
    assert not args["enable_memory_saver"] and not args["enable_weights_cpu_backup"]
    on_gpu = build.arguments(RolloutConfig(gpu_memory_utilization=0.4), model, CUDA, 64)
    assert on_gpu["mem_fraction_static"] == 0.4 and "max_total_tokens" not in on_gpu and on_gpu["enable_memory_saver"]
    assert "attention_backend" not in on_gpu
    assert build.arguments(RolloutConfig(), model, torch.device("cuda:3"), 64)["base_gpu_id"] == 3
    assert build.arguments(RolloutConfig(), model, CUDA, 64)["mem_fraction_static"] == build.SHARE


def test_arguments_of_the_users_own_reach_sglang_and_null_is_not_given(fake, model):
    given = {"attention_backend": "intel_amx", "page_size": 16, "schedule_policy": None, "context_length": 80}
    built(model, engine_kwargs={"sglang": given, "vllm": {"block_size": 8}})
    args = vars(fake.made[0].args)
    assert args["attention_backend"] == "intel_amx" and args["page_size"] == 16 and "schedule_policy" not in args
    assert args["context_length"] == 81  # rows of 80 tokens, and one more where they are scored


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"page_sise": 16},
            r"sglang.page_sise`: the SGLang that is installed has no such argument. did you mean `page",
        ),
        ({"mem_fraction_static": 0.5}, r"cannot be set: `actor_rollout_ref.rollout.gpu_memory_utilization` decides it"),
        ({"load_format": "auto"}, r"load_format=auto` cannot be used: posttrain's engine is built on dummy"),
        ({"speculative_algorithm": "EAGLE"}, r"posttrain's engine decides it itself"),
    ],
)
def test_arguments_that_sglang_does_not_have_or_that_are_decided_here_are_refused(fake, model, given, said):
    with pytest.raises(UserError, match=said):
        built(model, engine_kwargs={"sglang": given})
    assert not fake.made


def test_making_it_leaves_the_process_as_it_was(fake, model, monkeypatch):
    begin = fake.__init__

    def sets(self, **kwargs):
        os.environ["A_VARIABLE_OF_SGLANG"] = "1"
        logging.getLogger().handlers[:] = []
        random.seed(9)
        begin(self, **kwargs)

    monkeypatch.setattr(fake, "__init__", sets)
    handlers = [logging.NullHandler()]
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    torch.manual_seed(3)
    random.seed(3)
    wanted = (torch.rand(1), random.random())
    torch.manual_seed(3)
    random.seed(3)
    built(model)
    assert (torch.rand(1), random.random()) == wanted
    assert "A_VARIABLE_OF_SGLANG" not in os.environ and len(logging.getLogger().handlers) == 1


def test_what_sglang_says_when_it_does_not_start_is_said_with_what_decides_it(fake, model, monkeypatch):
    def fails(self, **kwargs):
        raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static.\nmore")

    monkeypatch.setattr(fake, "__init__", fails)
    with pytest.raises(
        UserError, match=r"SGLang does not start: Not enough memory.* gpu_memory_utiliz|rollout.gpu_mem"
    ):
        built(model)


def test_tokens_that_sglang_has_made_ahead_are_not_the_rows(sglang, fake, model):
    """The fake tells two at once; a step takes one."""
    sglang.submit(Request("a", PROMPTS[0], Sampling(max_tokens=8), 1))
    assert sglang.step() == [] and sglang.running_tokens() == 1
    (gone,) = sglang.abort(["a"])
    assert len(gone.token_ids) == 1 and gone.finish_reason == "abort"
    assert not fake.made[0].running and not sglang.has_work() and not sglang.readers


def test_an_abort_takes_no_request_whose_name_only_begins_like_its_own(sglang):
    for row in range(12):
        sglang.submit(Request(row, PROMPTS[0], Sampling(max_tokens=20), row))
    sglang.step()
    sglang.abort([0])
    assert [len(output.token_ids) for output in drained(sglang)] == [20] * 11


def test_weights_that_change_under_way_make_two_spans_and_the_row_goes_on_where_it_was(sglang, fake, model):
    sampling = Sampling(max_tokens=6, temperature=0.8, top_k=7)
    whole = generate(sglang, PROMPTS[:1], [sampling], [2**63 + 5])[0]
    sglang.submit(Request("a", PROMPTS[0], sampling, 2**63 + 5))
    for _ in range(2):
        sglang.step()
    sglang.load_weights(model.state_dict().items(), 4)
    assert not fake.made[0].running and not fake.made[0].remembered
    (output,) = drained(sglang)
    assert output.token_ids == whole.token_ids and output.versions == [(0, 2), (4, 4)]
    assert [*output.sampling_log_probs] == pytest.approx([*whole.sampling_log_probs], abs=1e-5)
    assert fake.made[0].asked[-1]["max_new_tokens"] == 4


def test_prompts_that_were_computed_with_old_weights_are_forgotten(sglang, model):
    greedy = Sampling(max_tokens=3, greedy=True)
    generate(sglang, PROMPTS, [greedy] * 3, [0] * 3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1.3)
    sglang.load_weights(model.state_dict().items(), 5)
    output = generate(sglang, PROMPTS[:1], [greedy], [0])[0]
    own = expected(model, PROMPTS[0], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), own, rtol=0, atol=1e-5)
    assert output.versions == [(5, 3)]


def test_weights_are_handed_over_some_at_a_time_and_as_copies(sglang, fake, model, monkeypatch):
    monkeypatch.setattr(engine, "TOGETHER", 1)
    fake.made[0].calls.clear()
    handed = [one for some in engine._handed(model.state_dict().items()) for one in some]
    assert not {weight.data_ptr() for _, weight in handed} & {w.data_ptr() for w in model.state_dict().values()}
    sglang.load_weights(model.state_dict().items(), 1)
    assert fake.made[0].calls == [1] * len(model.state_dict())
    monkeypatch.setattr(fake, "update_weights_from_tensor", lambda *args, **kwargs: (False, "a shape is wrong"))
    with pytest.raises(RuntimeError, match="SGLang does not take the weights: a shape is wrong"):
        sglang.load_weights(model.state_dict().items(), 2)
    assert sglang.version == 1


def test_adapters_reach_it_folded_into_the_weights(fake, model):
    adapted = with_adapters(model, ModelConfig(lora_rank=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    output = generate(built(adapted), PROMPTS[:1], [Sampling(max_tokens=4)], [0])[0]
    own = expected(adapted, PROMPTS[0], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), own, rtol=0, atol=1e-5)


def test_on_a_gpu_weights_that_a_sync_brings_are_read_once_and_others_when_the_cache_wakes(fake, model, monkeypatch):
    sglang = built(model)
    monkeypatch.setattr(sglang, "on_cuda", True)
    calls, whole = fake.made[0].calls, len(model.state_dict())
    calls.clear()
    sglang.sleep()
    assert calls == [("release", "kv_cache"), ("release", "weights")] and sglang.cache_bytes() == 0
    sglang.wake("weights")
    name, weight = next(iter(model.state_dict().items()))
    sglang.load_weights([(name, weight)], 1)
    sglang.wake("cache")
    assert calls[2:] == [("resume", "weights"), 1, ("resume", "kv_cache")]
    sglang.sleep()
    calls.clear()
    sglang.wake()
    assert calls == [("resume", "weights"), ("resume", "kv_cache"), whole]  # no sync came between


def test_a_model_that_nobody_trains_has_its_weights_kept_by_sglang_on_a_gpu(fake, model, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "Link", lambda arguments: asked.append(arguments) or 1 / 0)
    monkeypatch.setattr("posttrain.rollout.outside.make_room", lambda *args: None)
    for trained in (True, False):
        model.requires_grad_(trained)
        with pytest.raises(UserError, match="does not start: division by zero"):
            build.build_sglang(model, RolloutConfig(), decode=None, device=CUDA, longest=64)
    assert [one["enable_weights_cpu_backup"] for one in asked] == [False, True]


def test_a_stop_string_ends_a_row_and_sglang_no_longer_makes_it(fake, model):
    sglang = built(model)
    sglang.decode = lambda ids: "enough" * len(ids)
    sglang.submit(Request("stops", PROMPTS[0], Sampling(max_tokens=9, stop=("enough",)), 1))
    (output,) = sglang.step()
    assert output.finish_reason == "stop" and len(output.token_ids) == 1 and not fake.made[0].running


def test_the_models_own_end_is_no_end_where_the_request_does_not_say_it(fake, model):
    built(model)
    assert fake.made[0].eos is None and model.config.eos_token_id is not None


def test_an_error_in_sglangs_answer_is_raised_and_leaves_no_request_behind(sglang, fake, monkeypatch):
    def fails(self, req):
        raise RuntimeError("the kernel failed")

    monkeypatch.setattr(fake, "_advance", fails)
    with pytest.raises(RuntimeError, match="the kernel failed"):
        generate(sglang, PROMPTS[:1], [Sampling(max_tokens=3)], [0])
    assert not sglang.has_work()


def test_processes_that_have_ended_are_told_and_not_waited_for(sglang, monkeypatch):
    monkeypatch.setattr("posttrain.rollout.sglang.link.PATIENCE", 0.01)
    sglang.link.processes = [SimpleNamespace(is_running=lambda: False, status=lambda: "gone")]
    never = sglang.link.engine.loop.create_future()
    with pytest.raises(RuntimeError, match="SGLang's own process has ended"):
        sglang.link.run(asyncio_wait(never))
    sglang.link.engine.loop.call_soon_threadsafe(never.set_result, None)


async def asyncio_wait(future):
    await future


def test_a_longer_row_than_it_was_made_for_is_refused(sglang):
    with pytest.raises(ValueError, match="may have 65 tokens, more than the 64 that SGLang was made for"):
        sglang.submit(Request("long", [5] * 60, Sampling(max_tokens=5), 1))


def test_what_travels_with_a_request_is_what_sglangs_messages_can_hold():
    told = inside.sampler_params(Sampling(max_tokens=3, stop_token_ids=(4,)), 2**63, 2)
    assert {type(value) for value in told["sampling"].values()} <= {int, float, bool} and told["seed"] == 2**63
    assert np.array([told["seed"]], dtype=np.uint64)[0] == 2**63

"""`trainer.exact`: rollout and trainer give every token the same bits, however its rows were batched, packed or cut."""

from __future__ import annotations

import re

import pytest
import torch
from runs import metrics_of, run

from posttrain.config import load_config
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.config.root import OptimConfig
from posttrain.conversations.agents import AGENTS, register_agent
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.errors import UserError
from posttrain.kernels import ordered
from posttrain.models import layer_weights
from posttrain.models.decodable import why_not_exact
from posttrain.models.loading import fuse_and_prove, load_causal_lm
from posttrain.models.lora import with_adapters
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.generate import advance, generate, to_batch
from posttrain.rollout.native.build import build_native
from posttrain.trainer.ppo.first_batch import MismatchError
from tests.machine import has_compiler
from tests.rollout.tiny import tiny

pytestmark = pytest.mark.skipif(not has_compiler(), reason="exact runs on a CPU need the compiled kernels")

CPU, PAD = torch.device("cpu"), 0
EXACT = {"trainer__exact": True}
MISMATCH = ("mismatch/logp_mean", "mismatch/logp_max")


@pytest.fixture(autouse=True)
def _two_threads(two_threads: None) -> None:
    """What is divided among threads must have the same bits when it is."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from posttrain.models.embedded import write_model

    return write_model(tmp_path_factory.mktemp("exact"), num_key_value_heads=2)


def both_sides(folder, *, exact=True, lora=0, kv_cache_gb=None, **settings):
    """A trainer and a rollout engine over the same weights."""
    config = ModelConfig(path=str(folder), lora_rank=lora)
    module = load_causal_lm(config, dtype=torch.float32, device=CPU)
    if lora:
        module = with_adapters(module, config)
        for name, weight in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    trainer = TorchEngine(module, EngineSettings(device=CPU, optim=OptimConfig(lr=1e-2), exact=exact, **settings))
    rollout = build_native(module, RolloutConfig(kv_cache_gb=kv_cache_gb), decode=None, exact=exact)[0]
    return trainer, rollout


def prompts(count=10, copies=3, longest=70):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    rows = [torch.randint(1, 256, (length,), generator=generator).tolist() for length in lengths]
    return [row for row in rows for _ in range(copies)]


def sampled(rollout, asked, temperature=1.0, tokens=70, **sampling):
    how = Sampling(max_tokens=tokens, temperature=temperature, stop_token_ids=(256,), **sampling)
    return to_batch(asked, generate(rollout, asked, [how] * len(asked), list(range(len(asked)))), PAD)


def differing(trainer, batch, temperature=1.0):
    """(tokens whose log-probs have other bits, tokens)."""
    ours = trainer.log_probs(batch, temperature=temperature)["log_probs"]
    real = batch.batch["response_mask"].bool()
    return int((ours != batch.batch["rollout_log_probs"])[real].sum()), int(real.sum())


def test_log_probs_are_bitwise_equal_with_exact_and_not_without(folder):
    trainer, rollout = both_sides(folder)
    found, tokens = differing(trainer, sampled(rollout, prompts()))
    assert (found, tokens > 1000) == (0, True)
    trainer, rollout = both_sides(folder, exact=False)
    found, tokens = differing(trainer, sampled(rollout, prompts()))
    assert found > tokens / 20


@pytest.mark.parametrize("kind", ["qwen3", "llama", "llama3-rope", "qwen2-tied"])
def test_models_of_the_known_kinds_are_exact(kind, monkeypatch):
    """Also where sizes fill no tile, so that products are made layer by layer."""
    module = tiny(kind)
    from posttrain.models.forward import ForwardMode
    from posttrain.models.fused_layer import fuse_layers

    fuse_layers(module)
    module.forward_mode = ForwardMode(packed=True)
    trainer = TorchEngine(module, EngineSettings(device=CPU, exact=True))
    rollout = build_native(module, RolloutConfig(), decode=None, exact=True)[0]
    asked = [[token % 97 for token in row] for row in prompts(5)]
    assert differing(trainer, sampled(rollout, asked))[0] == 0
    monkeypatch.setattr("posttrain.models.decoder.can_run_whole", lambda layer: False)
    rollout = build_native(module, RolloutConfig(), decode=None, exact=True)[0]
    assert differing(trainer, sampled(rollout, asked))[0] == 0
    assert rollout.decoder.whole is None


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.6},
        {"top_p": 0.8},
        {"top_k": 5, "temperature": 1.3},
        {"repetition_penalty": 1.2},
        {"tokens": 1},
    ],
    ids=str,
)
def test_temperature_filters_and_short_responses_change_nothing(folder, how):
    trainer, rollout = both_sides(folder)
    assert differing(trainer, sampled(rollout, prompts(6), **how), how.get("temperature", 1.0))[0] == 0


def test_packing_sharing_and_threads_change_nothing(folder):
    asked = prompts()
    ways = ({"token_budget": 90}, {"max_rows": 1}, {"share_prompts": False}, {"gradient_checkpointing": True})
    for settings in ways:
        trainer, rollout = both_sides(folder, **settings)
        batch = sampled(rollout, asked)
        assert differing(trainer, batch)[0] == 0, settings
        torch.set_num_threads(1)
        assert differing(trainer, batch)[0] == 0, settings
        torch.set_num_threads(2)


def test_a_tight_cache_that_interrupts_rows_changes_nothing(folder):
    trainer, rollout = both_sides(folder, kv_cache_gb=0.0006)
    batch = sampled(rollout, prompts(12))
    assert differing(trainer, batch)[0] == 0


def test_turns_that_continue_from_the_cache_are_exact(folder):
    trainer, rollout = both_sides(folder)
    for keep in (True, False):
        prompt, parent = prompts(1)[0], None
        for turn in range(4):
            how = Sampling(max_tokens=11)
            rollout.submit(Request((keep, turn), prompt, how, turn, parent=parent if keep else None, keep=keep))
            found = []
            while rollout.has_work():
                found += advance(rollout)
            assert differing(trainer, to_batch([prompt], found, PAD))[0] == 0, (keep, turn)
            prompt, parent = [*prompt, *found[0].token_ids, 65, 66, 67], (keep, turn)


@pytest.mark.parametrize("lora", [0, 4])
def test_it_stays_exact_while_weights_change_and_old_log_probs_equal_those_of_the_update(folder, lora):
    trainer, rollout = both_sides(folder, lora=lora)
    asked = prompts(4)
    for version in range(1, 4):
        batch, seen = sampled(rollout, asked), []
        assert differing(trainer, batch)[0] == 0

        def loss(micro, outputs, seen=seen):
            seen.append(
                (outputs["log_probs"].detach() - micro.batch["rollout_log_probs"])[micro.batch["response_mask"] > 0]
            )
            return outputs["log_probs"].sum() * 1e-3

        trainer.update(batch, loss)
        assert torch.cat(seen).abs().max() == 0, "the ratio of the first update is exactly 1"
        rollout.load_weights(trainer.export_weights() if not lora else (), version)


def test_gradients_of_an_exact_pass_are_those_of_the_usual_one(folder):
    found = {}
    for lora in (0, 4):
        for exact in (True, False):
            torch.manual_seed(0)
            trainer, rollout = both_sides(folder, exact=exact, lora=lora)
            batch = sampled(rollout, prompts(4))
            trainer.runner.gradients(batch, lambda micro, out: (out["log_probs"] + 0.1 * out["entropy"]).sum())
            found[exact] = [weight.grad for weight in trainer.optimizer.masters]
        for mine, plain in zip(found[True], found[False], strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


# -- runs ----------------------------------------------------------------------------------------------------------
def test_every_step_of_an_exact_run_has_a_mismatch_of_zero(folder, sums, tmp_path, capsys):
    more = {"trainer__total_training_steps": 3, "algorithm__rollout_correction__rollout_is": "token"}
    steps = metrics_of(run(folder, sums, tmp_path / "exact", **EXACT, **more).path)
    said = capsys.readouterr().out
    assert "differ by 0 on average and 0 at most" in said and "compiled kernels, exact)" in said
    assert [step[name] for step in steps for name in (*MISMATCH, "mismatch/kl", "mismatch/k3_kl")] == [0.0] * 12
    plain = metrics_of(run(folder, sums, tmp_path / "plain", **more).path)
    assert all(step["mismatch/logp_max"] > 0 for step in plain)


def test_a_run_of_several_turns_is_exact(tiny_model, sums, tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.conversations.agents.AGENTS", AGENTS)

    @register_agent("three")
    async def three(chat, row):
        for number in range(3):
            await chat.say()
            chat.tell(f"more {number}")
        return float(len(str(row)) % 2)

    more = {"actor_rollout_ref__rollout__agent": "three", "actor_rollout_ref__rollout__agent__processes": 2}
    more["data__max_response_length"] = 120
    try:
        steps = metrics_of(run(tiny_model, sums, tmp_path, **EXACT, **more).path)
    finally:
        AGENTS.clear()
    assert steps[0]["num_turns/max"] == 3 and [step["mismatch/logp_max"] for step in steps] == [0.0, 0.0]


def test_a_difference_in_the_last_bit_stops_the_run(tiny_model, sums, tmp_path, monkeypatch):
    """Planted: one product of the trainer is off by its last bit."""
    usual = ordered.ordered_product

    def off(x_TE, weight_CE, bias_C=None, **how):
        out = usual(x_TE, weight_CE, bias_C, **how)
        out.view(-1)[0] = torch.nextafter(out.view(-1)[0], torch.tensor(9.0))
        return out

    monkeypatch.setattr(layer_weights, "ordered_product", off)
    with pytest.raises(MismatchError, match=r"trainer.exact=True, but rollout and trainer .* [1-9]\d* tokens differ"):
        run(tiny_model, sums, tmp_path, **EXACT)


# -- what it is not built for --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.quantization=fp8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.actor.strategy=megatron",
    ],
)
def test_settings_that_cannot_be_exact_are_rejected_before_the_run(key):
    with pytest.raises(UserError) as raised:
        load_config(["trainer.exact=True", "trainer.n_gpus_per_node=2", key])
    assert re.search(rf"`trainer.exact=True` is not built for {re.escape(key)}", str(raised.value)), raised.value


@pytest.mark.parametrize(
    ("kind", "dtype", "why"),
    [
        ("gemma3", torch.float32, "this one is gemma3_text"),
        ("qwen3-moe", torch.float32, "this one is qwen3_moe"),
        ("qwen2", torch.bfloat16, "computes in bfloat16"),
        ("qwen2", torch.float64, "computes in float64"),
    ],
)
def test_models_that_cannot_be_exact_are_rejected(kind, dtype, why):
    module = tiny(kind).to(dtype)
    assert why in (why_not_exact(module) or "")
    with pytest.raises(UserError, match=r"trainer\.exact=True"):
        build_native(module, RolloutConfig(), decode=None, exact=True)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"vocab_size": 104, "hidden_size": 128}, None),
        ({"vocab_size": 97, "hidden_size": 128}, "multiple of 8 tokens, and this one has 97"),
        ({"vocab_size": 104}, "widths are multiples of 64"),
    ],
)
def test_on_cuda_sizes_whose_products_depend_on_the_rows_are_rejected(changed, why, monkeypatch):
    monkeypatch.setattr("posttrain.models.decodable.why_not_ordered", lambda *_: None)
    found = why_not_exact(fuse_and_prove(tiny("qwen2", **changed), "a model"), torch.device("cuda"))
    assert found is None if why is None else why in (found or "")


def test_without_a_compiler_it_is_rejected_and_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(ordered, "why_not", lambda: "no C++ compiler found")
    assert "no C++ compiler found" in (why_not_exact(tiny("qwen2")) or "")


def test_a_window_shorter_than_a_sequence_is_rejected():
    from posttrain.models.forward import ForwardMode
    from posttrain.models.fused_layer import fuse_layers

    module = tiny("mistral")
    fuse_layers(module)
    module.forward_mode = ForwardMode(packed=True)
    trainer = TorchEngine(module, EngineSettings(device=CPU, exact=True))
    rollout = build_native(module, RolloutConfig(), decode=None)[0]
    with pytest.raises(UserError, match="its window is shorter"):
        trainer.log_probs(sampled(rollout, [[1, 2, 3, 4, 5, 6, 7, 8]]))

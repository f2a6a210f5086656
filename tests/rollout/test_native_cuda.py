"""The native engine on a CUDA device."""

import copy

import pytest
import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.rollout.base import Sampling
from posttrain.rollout.generate import generate
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native
from tests.rollout.tiny import KINDS, MIXTURES, tiny

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 6, 7], list(range(40)), [5, 6, 7], [9], list(range(10, 75))]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_log_probs_equal_the_oracles(kind):
    module = tiny(kind).cuda()
    settings = [Sampling(max_tokens=40, greedy=True), Sampling(max_tokens=20, temperature=0.8)] * 2
    settings.append(Sampling(max_tokens=30, top_p=0.9))
    ours = generate(build_native(module, RolloutConfig(), decode=None)[0], PROMPTS, settings, range(5))
    theirs = generate(HFEngine(module, pad_token_id=0), PROMPTS, settings, range(5))
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-4)


def test_weights_that_come_and_go_between_host_and_device():
    module = tiny("qwen2")
    engine = build_native(module, RolloutConfig(), decode=None, device=torch.device("cuda"))[0]
    found = []
    for _ in range(2):
        module.cuda()
        found.append(engine.score([PROMPTS[1]])[0])
        module.cpu()
    assert torch.equal(*found)


def as_near_as_the_model(module, outputs, temperature=1.0, prompts=PROMPTS) -> None:
    """The log-probs are about as far from the model's in float32 as those of its own pass in half precision are."""
    wide = copy.deepcopy(module).float()
    off = []
    for prompt, output in zip(prompts, outputs, strict=True):
        row, made = torch.tensor([prompt + output.token_ids]).cuda(), torch.tensor(output.token_ids).cuda()[:, None]
        with torch.no_grad():
            logits = [model(row).logits[0, len(prompt) - 1 : -1].float() / temperature for model in (module, wide)]
        half, truth = (x.log_softmax(-1).gather(1, made)[:, 0].cpu() for x in logits)
        off.append([(x - truth).abs() for x in (torch.tensor(output.log_probs), half)])
    ours, models = (torch.cat(column).mean() for column in zip(*off, strict=True))
    assert ours < 1.3 * models + 1e-3


def test_products_with_what_follows_them_inside_give_the_same(monkeypatch):
    """Many rows take them; here a few do."""
    from posttrain.kernels.cuda import fused_products, graphs

    module = tiny("qwen2", hidden_size=64).bfloat16().cuda()
    monkeypatch.setattr(graphs, "LEAST_ROWS", 1)
    monkeypatch.setattr(fused_products, "LEAST_GATED", 1)
    used = []
    for name in ("head_sums", "gated_product"):
        whole = getattr(fused_products, name)
        said = lambda *given, whole=whole, name=name: (used.append(name), whole(*given))[1]  # noqa: E731
        monkeypatch.setattr(fused_products, name, said)
    settings = [Sampling(max_tokens=40, temperature=0.8)] * len(PROMPTS)
    outputs = generate(build_native(module, RolloutConfig(), decode=None)[0], PROMPTS, settings, range(len(PROMPTS)))
    assert set(used) == ({"head_sums", "gated_product"} if torch.cuda.get_device_capability()[0] == 9 else set())
    as_near_as_the_model(module, outputs, 0.8)


def test_adapters_beside_a_half_precision_base_follow_the_trainer():
    from posttrain.config.model import ModelConfig
    from posttrain.models.lora import add_adapters
    from tests.models.test_lora_rollout import shake

    settings = ModelConfig(lora_rank=8, lora_alpha=16, target_modules="all-linear")
    module = add_adapters(tiny("qwen2").bfloat16(), settings).cuda()
    shake(module, 1)
    engine = build_native(module, RolloutConfig(), decode=None)[0]
    sampling = [Sampling(max_tokens=40)] * len(PROMPTS)
    found = []
    for version in (1, 2):
        outputs = generate(engine, PROMPTS, sampling, range(len(PROMPTS)))
        as_near_as_the_model(module, outputs)
        found.append([output.token_ids for output in outputs])
        shake(module, 2)
        engine.load_weights((), version)
    assert found[0] != found[1], "captured steps see adapters that have changed"


def wide_mixture(kind: str, **changed):
    """With sizes that tiles divide, and enough experts for some to have no token."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "initializer_range": 0.1}
    experts = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4}
    changed = {**sizes, **experts, "shared_expert_intermediate_size": 128, **changed}
    return tiny(kind, **{"head_dim": 32, **changed} if kind.startswith("qwen3") else changed).bfloat16().cuda()


@pytest.mark.parametrize("kind", sorted(MIXTURES))
def test_mixtures_in_half_precision_are_as_near_as_the_model(kind):
    module = wide_mixture(kind)
    settings = [Sampling(max_tokens=40, temperature=0.8)] * len(PROMPTS)
    engine, name = build_native(module, RolloutConfig(), decode=None)
    assert "fused decoder, Triton kernels" in name
    outputs = generate(engine, PROMPTS, settings, range(len(PROMPTS)))
    assert engine.decoder.graphs.replays  # pyright: ignore
    as_near_as_the_model(module, outputs, 0.8)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("kind", sorted(MIXTURES))
def test_mixtures_of_many_rows_are_as_near_as_the_model_captured_and_not(kind, captured):
    module = wide_mixture(kind)
    many = PROMPTS * 20
    engine = build_native(module, RolloutConfig(), decode=None)[0]
    if not captured:
        engine.rounds.tokens_per_step, engine.rounds.tokens_unseen = 1, None
    outputs = generate(engine, many, [Sampling(max_tokens=24, temperature=0.8)] * len(many), range(len(many)))
    assert (engine.decoder.graphs is not None) is captured  # pyright: ignore
    as_near_as_the_model(module, outputs[:20], 0.8, many[:20])


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [16, 64])
def test_every_cut_of_the_experts_products_gives_what_torch_gives(rows, turned, described):
    import torch.nn.functional as F

    from posttrain.kernels.cuda.experts import Tile, down_pairs, gate_up_pairs, sort_pairs

    torch.manual_seed(0)
    tokens, width, size, experts, top = 300, 256, 192, 12, 4
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(experts, 2 * size, width, device="cuda", dtype=torch.bfloat16) / 8
    down = torch.randn(experts, width, size, device="cuda", dtype=torch.bfloat16) / 8
    chosen = torch.stack([torch.randperm(experts - 2)[:top] for _ in range(tokens)]).int().cuda()
    order, ends = sort_pairs(chosen, experts)
    tile = Tile(rows, 64, 64, 4, 3, turned, described)
    gated = gate_up_pairs(x, gate_up, order, ends, tile)
    parts = down_pairs(gated, down, order, ends, tile)
    of = chosen.view(-1).long()
    both = torch.einsum("pe,pie->pi", x.repeat_interleave(top, 0).float(), gate_up[of].float()).bfloat16()
    gate, up = both.chunk(2, -1)
    wanted = F.silu(gate) * up
    torch.testing.assert_close(gated, wanted[order.long()], rtol=2e-2, atol=2e-2)
    products = torch.einsum("pi,pei->pe", wanted.float(), down[of].float()).bfloat16()
    torch.testing.assert_close(parts, products, rtol=3e-2, atol=1e-1)

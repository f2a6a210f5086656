"""The feed-forward part of mixtures against transformers' own blocks, at small shapes.

The torch twin everywhere. The Triton kernels on a CUDA device, or in Triton's interpreter:
`TRITON_INTERPRET=1 pytest tests/kernels/test_experts.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig
from triton_tools import DEVICE, ON_CUDA, draw

from posttrain.kernels import decode as twin

interpreted = pytest.mark.gpu(interpreter=True)
HALF = torch.bfloat16 if ON_CUDA else torch.float16  # the interpreter multiplies and rounds bfloat16 wrongly
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
WIDTH, SIZE, EXPERTS, TOP = 48, 24, 6, 3  # no tile divides them


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal up to the order of sums: in half precision a sum that is rounded to the other side, twice."""
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}[found.dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=limit, atol=limit * float(wanted.float().std()))


def block_of(family: str, normalised: bool, dtype: torch.dtype):
    """transformers' block without a shared expert, with random weights."""
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": WIDTH, "intermediate_size": SIZE, "moe_intermediate_size": SIZE}
    counts = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP}
    config = AutoConfig.for_model(family, **sizes, **counts, norm_topk_prob=normalised)
    config._experts_implementation = "grouped_mm"
    kinds = {"mixtral": MixtralSparseMoeBlock, "olmoe": OlmoeSparseMoeBlock, "qwen3_moe": Qwen3MoeSparseMoeBlock}
    block = kinds[family](config).to(DEVICE, dtype).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in block.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3)
    return block


def settings_of(family: str, normalised: bool, dtype: torch.dtype) -> dict:
    mixtral = family == "mixtral"
    return {"top_k": TOP, "normalised": normalised or mixtral, "share_dtype": torch.float32 if mixtral else dtype}


def kernels():
    from posttrain.kernels.cuda import experts

    return experts


FAMILIES = [("qwen3_moe", True), ("qwen3_moe", False), ("olmoe", False), ("mixtral", True)]


@each_dtype
@pytest.mark.parametrize(("family", "normalised"), FAMILIES)
@pytest.mark.parametrize("way", [twin.__name__, pytest.param("triton", marks=interpreted)])
@torch.no_grad()
def test_a_mixture_is_that_of_transformers(way, family, normalised, dtype):
    block, x = block_of(family, normalised, dtype), draw(37, WIDTH, dtype=dtype, seed=2)
    weights = (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    compute = kernels().mixture if way == "triton" else twin.mixture
    near(compute(x, *weights, **settings_of(family, normalised, dtype)), block(x[None])[0])


@interpreted
@each_dtype
@torch.no_grad()
def test_more_tokens_than_are_computed_at_once_and_none(dtype, monkeypatch):
    module = kernels()
    monkeypatch.setattr(module, "MOST_TOKENS", 16)
    block, x = block_of("qwen3_moe", True, dtype), draw(37, WIDTH, dtype=dtype, seed=2)
    weights = (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    how = settings_of("qwen3_moe", True, dtype)
    near(module.mixture(x, *weights, **how), block(x[None])[0])
    assert module.mixture(x[:0], *weights, **how).shape == (0, WIDTH)


@interpreted
@pytest.mark.parametrize("normalised", [True, False])
def test_the_choice_is_that_of_a_float32_softmax_and_of_equal_experts_the_first(normalised):
    logits = draw(9, EXPERTS, dtype=torch.bfloat16, seed=3)
    logits[4] = 1.0
    logits[5, 2:] = logits[5, 2]
    chosen, share = kernels().choose_experts(logits, TOP, normalised=normalised, share_dtype=torch.float32)
    p = logits.float().softmax(-1)
    wanted = torch.sort(p, descending=True, stable=True)
    shares = wanted.values[:, :TOP]
    assert torch.equal(chosen.long(), wanted.indices[:, :TOP])
    assert chosen[4].tolist() == [0, 1, 2]
    torch.testing.assert_close(share, shares / shares.sum(-1, keepdim=True) if normalised else shares)


@interpreted
def test_logits_that_are_no_numbers_name_experts_that_there_are():
    """What is read with them would be beyond the weights: the process would end before anybody can say why."""
    chosen, _ = kernels().choose_experts(
        torch.full((5, 6), float("nan"), device=DEVICE), 2, normalised=True, share_dtype=torch.float32
    )
    assert ((chosen >= 0) & (chosen < 6)).all()


def spread(kind: str, tokens: int) -> torch.Tensor:
    """Experts of each token: different ones of a token, as a router chooses them."""
    torch.manual_seed(4)
    if kind == "one for all":
        return torch.tensor([[5, 0, 2]]).expand(tokens, -1)
    if kind == "two of six":
        return torch.stack([torch.randperm(2)[:2] + 3 for _ in range(tokens)])
    return torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(tokens)])


LOADS = ["one for all", "two of six", "any"]


@interpreted
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("tokens", [1, 30, 700])
def test_pairs_are_sorted_by_expert_and_stay_in_order(load, tokens):
    chosen = spread(load, tokens).int().contiguous().to(DEVICE)
    order, ends = kernels().sort_pairs(chosen, EXPERTS)
    assert order.tolist() == chosen.view(-1).argsort(stable=True).tolist()
    assert ends.tolist() == torch.bincount(chosen.view(-1).long(), minlength=EXPERTS).cumsum(0).tolist()


def tiles():
    tile = kernels().Tile
    return [
        tile(16, 16, 16, 4, 2), tile(16, 32, 32, 4, 2, turned=True), tile(32, 16, 16, 4, 2, described=True),
        tile(16, 16, 32, 4, 2, turned=True, described=True),
    ]  # fmt: skip


@interpreted
@each_dtype
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("load", LOADS)
def test_products_of_ragged_loads_in_every_cut(load, number, dtype):
    """Experts without a token, one with all of them, and tiles that reach beyond an expert's tokens and weight."""
    module, tile = kernels(), tiles()[number]
    chosen = spread(load, 40).int().contiguous().to(DEVICE)
    x, gate_up, down = draw(40, WIDTH, dtype=dtype, seed=5), draw(EXPERTS, 2 * SIZE, WIDTH), draw(EXPERTS, WIDTH, SIZE)
    gate_up, down = gate_up.to(dtype) / 4, down.to(dtype) / 4
    order, ends = module.sort_pairs(chosen, EXPERTS)
    gated = module.gate_up_pairs(x, gate_up, order, ends, tile)
    of, top = chosen.view(-1).long(), chosen.shape[1]
    rows = x.repeat_interleave(top, 0).float()
    gate, up = torch.einsum("pe,pie->pi", rows, gate_up[of].float()).to(dtype).chunk(2, -1)
    wanted = F.silu(gate) * up
    near(gated, wanted[order.long()])
    near(
        module.down_pairs(gated, down, order, ends, tile),
        torch.einsum("pi,pei->pe", wanted.float(), down[of].float()).to(dtype),
    )


@interpreted
@pytest.mark.parametrize("kind", [HALF, torch.float32], ids=str)
def test_shares_are_rounded_as_they_are_given(kind):
    """Mixtral multiplies by float32 shares, the others by shares in the model's type."""
    parts, share = draw(12, WIDTH, dtype=HALF, seed=6), draw(4, 3).to(kind)
    wanted = (parts.view(4, 3, WIDTH) * share[..., None]).float().sum(1).to(HALF)
    assert torch.equal(kernels().weigh_parts(parts, share), wanted)


@interpreted
def test_tiles_follow_from_sizes_alone():
    module = kernels()
    means = [1, 8, 9, 20, 32, 64, 80, 81, 5000]
    found = [module.tiles_for(mean * 128, 128, torch.bfloat16) for mean in means]
    rows = [first.rows for first, _ in found]
    assert rows == sorted(rows) and all(
        first.rows >= min(mean, 64) for mean, (first, _) in zip(means, found, strict=True)
    )
    assert module.tiles_for(128, 128, torch.float32)[0].depth <= 32

"""Attention to cached latents, the experts of gpt-oss, norms, and routers of DeepSeek and GLM, against plain torch.

The Triton kernels on a CUDA device in float32 and bfloat16, or in Triton's interpreter in float32:
`TRITON_INTERPRET=1 pytest tests/kernels/test_latents_and_clamped.py`.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from triton_tools import DEVICE, draw, each_dtype, near

from posttrain.kernels import decode
from posttrain.kernels.decode import BLOCK, FAR, StepTokens, copy_tokens, latent_attention, new_cache
from posttrain.planning.counting import LiveBytes

RANK, ROTATED = 20, 8


def plain_latents(query_HC: torch.Tensor, latent_LC: torch.Tensor, scale: float) -> torch.Tensor:
    weights_HL = (query_HC.float() @ latent_LC.float().T * scale).softmax(-1)
    return weights_HL @ latent_LC[:, :RANK].float()


def prefill(dtype, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, StepTokens]:
    """A prompt of three blocks, and five tokens behind one of 40 whose second block has empty places."""
    many, few = 70, 5
    positions = torch.cat([torch.arange(many), torch.arange(few) + 40]).int()
    rows = torch.cat([torch.zeros(many), torch.ones(few)]).int()
    table, starts = torch.tensor([[3, 1, 6, 0], [2, 4, 5, 0]]), torch.tensor([[0, 32, 64, FAR], [0, 32, 40, FAR]])
    given = (torch.zeros(75).long(), positions, rows, table.int(), starts.int())
    step = StepTokens(*(x.to(DEVICE) for x in given), 70)
    cache = draw(8, BLOCK, RANK + ROTATED, dtype=dtype, seed=3)
    return draw(75, heads, RANK + ROTATED, dtype=dtype), draw(75, RANK + ROTATED, dtype=dtype), cache, step


def check_prefill(compute, dtype, heads: int) -> None:
    query, latent, cache, step = prefill(dtype, heads)
    before = cache.clone()
    found = compute(query, latent, (cache,), step, rank=RANK, scale=0.3)
    for token in range(70):
        near(found[token], plain_latents(query[token], latent[: token + 1], 0.3), at=3)
    held = torch.cat([before[2], before[4, :8]])
    for token in range(5):
        near(found[70 + token], plain_latents(query[70 + token], torch.cat([held, latent[70 : 71 + token]]), 0.3), at=3)
    before[3], before[1], before[6, :6], before[5, :5] = latent[:32], latent[32:64], latent[64:70], latent[70:]
    assert torch.equal(cache, before), "latents are in their places, and nothing else was written"


@pytest.mark.parametrize("heads", [4, 6])
def test_prompts_attend_to_latents_by_torch(heads):
    if DEVICE == "cuda":
        pytest.skip("on a CUDA device the kernels take it")
    check_prefill(latent_attention, torch.float32, heads)


@pytest.mark.parametrize("most", [1, 6 * 128 * 9, 2**22])
def test_latents_are_read_in_pieces_of_rows_and_tokens(most, monkeypatch):
    if DEVICE == "cuda":
        pytest.skip("on a CUDA device the kernels take it")
    monkeypatch.setattr(decode, "LATENT_BOX", most)
    check_prefill(latent_attention, torch.float32, 6)


@pytest.mark.parametrize("tokens", [1, 40])
def test_attention_to_latents_copies_them_once_for_all_heads(tokens):
    """All that is alive at the peak, in multiples of the latents that the rows read; and a part of a step at most."""
    if DEVICE == "cuda":
        pytest.skip("on a CUDA device the kernels take it")
    rows, heads, blocks = 8, 64, 16
    positions = torch.arange(blocks * BLOCK - tokens, blocks * BLOCK).repeat(rows).int()
    numbers = torch.arange(rows).repeat_interleave(tokens).int()
    table = torch.arange(rows * blocks).view(rows, blocks).int()
    starts = (torch.arange(blocks) * BLOCK).expand(rows, -1).contiguous().int()
    step = StepTokens(torch.zeros(rows * tokens).long(), positions, numbers, table, starts, blocks * BLOCK)
    cache = draw(rows * blocks, BLOCK, RANK + ROTATED)
    given = (draw(rows * tokens, heads, RANK + ROTATED), draw(rows * tokens, RANK + ROTATED), (cache,), step)
    with LiveBytes(torch.nn.Module()) as live:
        latent_attention(*given, rank=RANK, scale=0.3)
    scores = min(4 * decode.LATENT_BOX, cache.element_size() * rows * tokens * heads * blocks * BLOCK)
    assert live.peak < 3 * cache.nbytes + 4 * scores


@pytest.mark.gpu(interpreter=True)
@each_dtype
@pytest.mark.parametrize("heads", [6, 16, 80])
def test_prompts_attend_to_latents(heads, dtype):
    from posttrain.kernels.cuda.latent_attention import prefill_latents, store_latents

    def compute(query, latent, cache, step, *, rank, scale):
        store_latents(latent, cache[0], step.slots_T)
        tables = (step.wide_tiles, step.rows_T, step.positions_T, step.table_RN, step.starts_RN)
        return prefill_latents(query, cache[0], *tables, rank=rank, scale=scale, far=FAR)

    check_prefill(compute, dtype, heads)


@pytest.mark.gpu(interpreter=True)
@each_dtype
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("heads", [6, 80])
def test_newest_tokens_attend_to_live_latents_only(heads, splits, dtype):
    from posttrain.kernels.cuda.latent_attention import decode_latents
    from posttrain.kernels.cuda.paged_attention import StepRows

    prompts, newest = [40, 7, 64, 5], [45, 7, 100, 9]
    table = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 0], [6, 7, 8, 9], [10, 11, 0, 0]], dtype=torch.int32)
    full = [-(-prompt // BLOCK) * BLOCK for prompt in prompts]
    places = [
        [p if p < prompts[row] else full[row] + p - prompts[row] for p in range(newest[row] + 1)] for row in range(4)
    ]
    slots = [int(table[row, places[row][-1] // BLOCK]) * BLOCK + places[row][-1] % BLOCK for row in range(4)]
    ended = 3  # it writes nothing
    size = RANK + ROTATED
    flat = torch.full((12 * BLOCK, size), float("nan"), dtype=dtype, device=DEVICE)
    held = draw(12 * BLOCK, size, dtype=dtype, seed=4)
    index = [[int(table[row, p // BLOCK]) * BLOCK + p % BLOCK for p in places[row]] for row in range(4)]
    for row in range(4):
        flat[index[row][:-1]] = held[index[row][:-1]]
    flat[index[ended][-1]] = held[index[ended][-1]]
    query, latent = draw(4, heads, size, dtype=dtype), draw(4, size, dtype=dtype)
    columns = (newest, [*slots[:ended], -1], [one[-1] + 1 for one in places], prompts)
    given = [torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in columns]
    step = StepRows(given[0], given[1].long(), *given[2:], table.to(DEVICE), splits)
    before = flat.clone()
    found = decode_latents(query, latent, flat.view(12, BLOCK, size), step, rank=RANK, scale=0.3)
    for row in range(4):
        own = before[index[row]].clone()
        if row != ended:
            own[-1] = before[index[row][-1]] = latent[row]
        near(found[row], plain_latents(query[row], own, 0.3), at=3)
    torch.testing.assert_close(flat, before, rtol=0, atol=0, equal_nan=True, msg="nothing else was written")


def test_a_cache_of_latents_is_copied_token_by_token():
    (cache,) = new_cache(3, 0, 5, torch.float32, torch.device("cpu"))
    assert cache.shape == (3, BLOCK, 5)
    cache[0, 3], cache[0, 4] = 1.0, 2.0
    copy_tokens((cache,), torch.tensor([3, 4]), torch.tensor([2 * BLOCK, 2 * BLOCK + 1]))
    assert cache[2, 0].tolist() == [1.0] * 5 and cache[2, 1].tolist() == [2.0] * 5 and not cache[1].any()


@pytest.mark.gpu(interpreter=True)
@each_dtype
@pytest.mark.parametrize("tokens", [0, 1, 37])
@torch.no_grad()
def test_clamped_experts_are_those_of_transformers(tokens, dtype, monkeypatch):
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    from posttrain.kernels.cuda import clamped_experts

    monkeypatch.setattr(clamped_experts, "MOST_TOKENS", 16)
    config = GptOssConfig(hidden_size=48, intermediate_size=24, num_local_experts=6, swiglu_limit=1.5)
    config._experts_implementation = "eager"
    experts = GptOssExperts(config).to(DEVICE, dtype)
    for weight in experts.parameters():
        weight.copy_(draw(*weight.shape, dtype=dtype) * 0.3)
    x = draw(tokens, 48, dtype=dtype, seed=2)
    chosen = (
        torch.stack([torch.randperm(5)[:3] for _ in range(tokens)]).to(DEVICE) if tokens else torch.zeros(0, 3).long()
    )
    share = draw(tokens, 3, dtype=dtype).softmax(-1)
    weights = (experts.gate_up_proj, experts.down_proj, experts.gate_up_proj_bias, experts.down_proj_bias)
    how = {"alpha": experts.alpha, "limit": experts.limit}
    found = clamped_experts.clamped_expert_sum(x, chosen.to(DEVICE), share, *weights, **how)
    near(found, experts(x, chosen.to(DEVICE), share), at=3)


ROUTERS = {
    "glm4_moe": {"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    "deepseek_v3": {"n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    "deepseek_v3 plain": {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    "deepseek_v2": {"topk_method": "greedy"},
    "deepseek_v2 grouped": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
}


def test_a_router_whose_best_groups_have_too_few_experts_is_the_modules_own(monkeypatch):
    """The kernel would choose one of them twice."""
    from transformers import AutoConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    from posttrain.kernels import cuda
    from posttrain.models import paged_modules

    monkeypatch.setattr(paged_modules, "active_step", lambda: "a step")
    monkeypatch.setattr(cuda, "runs_here", lambda tensor: True)
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_local_experts": 8, "n_group": 4, "topk_group": 1}
    router = DeepseekV3TopkRouter(AutoConfig.for_model("deepseek_v3", **sizes, num_experts_per_tok=3))
    assert paged_modules._choose(router, draw(2, 24)) is None


@pytest.mark.gpu(interpreter=True)
@pytest.mark.parametrize("kind", ROUTERS)
@torch.no_grad()
def test_routers_choose_what_those_of_transformers_choose(kind, monkeypatch):
    from transformers import AutoConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    from posttrain.kernels import cuda
    from posttrain.models import paged_modules

    monkeypatch.setattr(paged_modules, "active_step", lambda: "a step")
    monkeypatch.setattr(cuda, "runs_here", lambda tensor: True)
    family = kind.split()[0]
    kinds = {"glm4_moe": Glm4MoeTopkRouter, "deepseek_v3": DeepseekV3TopkRouter, "deepseek_v2": DeepseekV2TopkRouter}
    sizes = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_experts": 12,
        "num_local_experts": 12,
        "n_routed_experts": 12,
    }
    config = AutoConfig.for_model(family, **sizes, num_experts_per_tok=3, routed_scaling_factor=1.7, **ROUTERS[kind])
    router = kinds[family](config).to(DEVICE)
    assert router.num_experts == 12
    router.weight.copy_(draw(12, 24, seed=5) * 0.2)
    if family != "deepseek_v2":
        router.e_score_correction_bias.copy_(draw(12) * 0.3)
    x = draw(37, 24)
    logits, share, chosen = paged_modules._choose(router, x)
    wanted_logits, wanted_share, wanted = router(x)
    near(logits, wanted_logits)
    assert torch.equal(chosen.sort(1).values, wanted.sort(1).values)
    near(share.gather(1, chosen.argsort(1)), wanted_share.gather(1, wanted.argsort(1)))


@pytest.mark.gpu(interpreter=True)
@each_dtype
@pytest.mark.parametrize("kind", ["deepseek_v2.DeepseekV2", "gpt_oss.GptOss", "gemma2.Gemma2", "glm4_moe.Glm4Moe"])
@torch.no_grad()
def test_norms_are_those_of_transformers_also_on_columns_of_wider_rows(kind, dtype, monkeypatch):
    from posttrain.kernels import cuda
    from posttrain.kernels.cuda import elementwise
    from posttrain.models import paged_modules

    monkeypatch.setattr(paged_modules, "active_step", lambda: "a step")
    monkeypatch.setattr(cuda, "runs_here", lambda tensor: True)
    folder, name = kind.split(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    norm = getattr(module, f"{name}RMSNorm")(40, eps=1e-3).to(DEVICE, dtype)
    norm.weight.copy_(draw(40, dtype=dtype, seed=7))
    wide = draw(1, 9, 56, dtype=dtype, seed=8)
    calls: list[int] = []
    kernel = elementwise.rms_norm
    monkeypatch.setattr(elementwise, "rms_norm", lambda *a, **b: (calls.append(1), kernel(*a, **b))[1])
    for x in (wide[..., :40], wide[..., 16:], draw(2, 3, 4, 40, dtype=dtype, seed=9)):
        paged_modules.watch_norms(norm, on=True)
        found = norm(x)
        paged_modules.watch_norms(norm, on=False)
        assert found.shape == x.shape
        near(found, norm(x))
    assert len(calls) == 3, "the kernel computed the first of each pair alone"

"""Every Triton kernel against its formula in torch, at small shapes.

On a CUDA device in float32 and bfloat16. Without one in Triton's interpreter, in float32, if Triton is installed:
`TRITON_INTERPRET=1 pytest tests/kernels/test_triton.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from posttrain.kernels import decode
from posttrain.kernels.decode import BLOCK, FAR, StepTokens
from posttrain.kernels.train import Sight
from posttrain.rollout import sampling

pytestmark = pytest.mark.gpu(interpreter=True)

ON_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if ON_CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if ON_CUDA else [torch.float32]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
H, K, D = 4, 2, 16


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int | None = None) -> torch.Tensor:
    if seed is not None:
        torch.manual_seed(seed)
    return torch.randn(*shape).to(DEVICE, dtype)


def near(found: torch.Tensor, wanted: torch.Tensor, *, at: float = 1.0) -> None:
    """Equal up to rounding: of float32, or of two or three bfloat16 operations."""
    half = found.dtype is torch.bfloat16
    limit = (3e-2 if half else 2e-5) * at
    torch.testing.assert_close(found.float(), wanted.float(), rtol=limit, atol=limit)


@each_dtype
def test_add_rms_norm(dtype):
    from posttrain.kernels.cuda.elementwise import add_rms_norm

    x, added, weight = draw(5, 48, dtype=dtype, seed=0), draw(5, 48, dtype=dtype), draw(48, dtype=dtype)
    kept = x.clone()
    near(add_rms_norm(kept, added, weight, 1e-6), F.rms_norm((x + added).float(), (48,), weight.float(), 1e-6))
    near(kept, x + added)
    near(add_rms_norm(kept, None, weight, 1e-6), F.rms_norm(kept.float(), (48,), weight.float(), 1e-6))


@each_dtype
def test_silu_mul_and_its_gradient(dtype):
    from posttrain.kernels.cuda.elementwise import silu_mul
    from posttrain.kernels.cuda.layers import gate_backward

    both, grad = draw(9, 40, dtype=dtype, seed=1), draw(9, 20, dtype=dtype)
    leaf = both.float().requires_grad_()
    product = F.silu(leaf[:, :20]) * leaf[:, 20:]
    near(silu_mul(both), product.detach())
    product.backward(grad.float())
    again, grad_both = gate_backward(grad, both)
    near(again, product.detach())
    near(grad_both, leaf.grad)


@each_dtype
@pytest.mark.parametrize("ranks", [(3, 3, 3), (40, 0, 5), (0, 8, 0), (0, 0, 70)], ids=str)
def test_the_gate_with_adapters_and_its_gradient(dtype, ranks, monkeypatch):
    """Against the plain formula; blocks of tokens, columns and ranks that are not full."""
    from posttrain.kernels.cuda import adapted_gate

    monkeypatch.setattr(adapted_gate, "TOKENS", 16)
    monkeypatch.setattr(adapted_gate, "COLUMNS", 16)
    tokens, size = 37, 44
    both, grad = draw(tokens, 2 * size, dtype=dtype, seed=6), draw(tokens, size, dtype=dtype)
    stacked = draw(tokens, 210, dtype=dtype) / 8
    factors = [  # left ones are columns of a wider tensor, right ones are transposed but for the last, as in a layer
        (stacked[:, place * 70 : place * 70 + rank], right) if rank else None
        for place, rank in enumerate(ranks)
        for right in [draw(size, rank, dtype=dtype).T if place < 2 else draw(rank, size, dtype=dtype)]
    ]
    sums = [x[0].double() @ x[1].double() if x else 0.0 for x in factors]
    leaf = both.double().requires_grad_()
    product = F.silu(leaf[:, :size] + sums[0]) * (leaf[:, size:] + sums[1])
    near(adapted_gate.forward(both, factors[0], factors[1]), product.detach(), at=2)
    product.backward(grad.double() + sums[2])
    again, grad_both = adapted_gate.backward(grad, both, *factors)
    near(again, product.detach(), at=2)
    near(grad_both, leaf.grad, at=4)


@each_dtype
def test_norm_of_training_and_its_gradient(dtype):
    from posttrain.kernels.cuda.layers import norm_backward, norm_forward

    x, weight = draw(37, 48, dtype=dtype, seed=2), draw(48, dtype=dtype)
    grad, added = draw(37, 48, dtype=dtype), draw(37, 48, dtype=dtype)
    leaf, scale = x.float().requires_grad_(), weight.float().requires_grad_()
    wanted = F.rms_norm(leaf, (48,), scale, 1e-6)
    wanted.backward(grad.float())
    copy = torch.full_like(x, float("nan"))
    found, inverse = norm_forward(x, weight, 1e-6, copy)
    near(found, wanted.detach())
    assert torch.equal(copy, x) and torch.equal(norm_forward(x, weight, 1e-6)[0], found)
    grad_x, grad_weight = norm_backward(grad, x, weight, inverse, added)
    near(grad_x, leaf.grad + added.float())
    near(grad_weight, scale.grad, at=4)
    near(norm_backward(grad, x, weight, inverse)[0], leaf.grad)
    frozen, nothing = norm_backward(grad, x, weight, inverse, added, trained=False)
    assert torch.equal(frozen, grad_x) and nothing is None


@each_dtype
@pytest.mark.parametrize("rows", [1, 37, 1100])
def test_columns_are_summed_up_whatever_the_number_of_rows(dtype, rows, monkeypatch):
    from posttrain.kernels.cuda import column_sums

    monkeypatch.setattr(column_sums, "PARTS", 20)
    x = draw(rows, 150, dtype=dtype, seed=7)
    near(column_sums.column_sums(x, dtype), x.double().sum(0), at=4)


@each_dtype
def test_heads_are_rotated_and_their_gradients_turned_back(dtype):
    from posttrain.kernels.cuda.layers import join_heads, split_heads

    qkv, cosine, sine = draw(9, (H + 2 * K) * D, dtype=dtype, seed=3), draw(9, D, dtype=dtype), draw(9, D, dtype=dtype)
    leaf = qkv.float().requires_grad_()
    heads = leaf.view(9, -1, D)
    half = torch.cat([-heads[..., D // 2 :], heads[..., : D // 2]], -1)
    turned = heads * cosine.float()[:, None] + half * sine.float()[:, None]
    wanted = (turned[:, :H], turned[:, H : H + K], heads[:, H + K :])
    for found, part in zip(split_heads(qkv.clone(), H, K, cosine, sine), wanted, strict=True):
        near(found, part.detach())
    grads = [draw(9, count, D, dtype=dtype) for count in (H, K, K)]
    torch.autograd.backward(wanted, [grad.float() for grad in grads])
    near(join_heads(*grads, cosine, sine), leaf.grad)


@each_dtype
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_statistics_of_logits_and_their_gradient(dtype, temperature):
    from posttrain.kernels.cuda.logprob import gradient, statistics

    logits = (3 * draw(6, 5000, seed=4)).requires_grad_()
    labels = torch.randint(0, 5000, (6,)).to(DEVICE)
    log_p = torch.log_softmax(logits / temperature, -1)
    wanted = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    log_prob, entropy, logsum = statistics(logits.detach(), labels, temperature)
    near(log_prob, wanted[0].detach(), at=5)
    near(entropy, wanted[1].detach(), at=5)
    grads = draw(6), draw(6)
    torch.autograd.backward(wanted, grads)
    near(gradient(logits.detach(), [labels, logsum, entropy, *grads], temperature, dtype), logits.grad)


@pytest.mark.parametrize("keep", [0, 2, 3], ids=["none kept", "some kept", "all kept"])
def test_the_head_gives_the_same_whether_logits_wait_or_are_computed_again(keep):
    from posttrain.kernels import logprob_head as head

    hidden, weight = draw(17, 24, seed=5).requires_grad_(), draw(300, 24).requires_grad_()
    labels = torch.randint(0, 300, (17,)).to(DEVICE)
    chunks = [slice(0, 7), slice(7, 14), slice(14, 17)]
    results = []
    for found in (
        head._CudaHead.apply(hidden, weight, labels, 0.7, chunks, keep),
        head.plain_logprob_head(hidden, weight, labels, temperature=0.7),
    ):
        results.append([*found, *torch.autograd.grad((found[0] - 0.3 * found[1]).sum(), [hidden, weight])])
    for ours, wanted in zip(*results, strict=True):
        near(ours.detach(), wanted.detach(), at=4)


def test_sampling_takes_the_tokens_that_the_cpu_takes():
    logits = 3 * draw(6, 5000, seed=5)
    source, places = np.array([0, 1, 2, 3, 4, 5, 0, 1]), np.arange(8) * 3
    seeds = np.arange(8).astype(np.uint64) * np.uint64(77)
    temperature = np.array([1, 0.7, 1, 1, 1.3, 1, 1, 1], np.float32)
    greedy = np.array([0, 0, 1, 0, 0, 0, 0, 1], np.uint8)
    wanted, log_probs = sampling.sample_plain(logits.cpu(), source, temperature, greedy, seeds, places)
    found, found_log_probs = sampling._sample_cuda(logits, source, temperature, greedy.astype(np.int32), seeds, places)
    assert found.tolist() == wanted.tolist()
    np.testing.assert_allclose(found_log_probs, log_probs, atol=2e-5)


HALF = (
    torch.bfloat16 if ON_CUDA else torch.float32
)  # the matrix units round float32; the interpreter cannot read halves


def test_sums_of_the_heads_product_and_tokens_from_logits_computed_again():
    """Rows and columns beyond the last whole tile; rows of all temperatures, sampled and greedy."""
    from posttrain.kernels.cuda.fused_products import head_sums
    from posttrain.kernels.cuda.sampling import _pick, chunk_room
    from posttrain.kernels.cuda.sizes import FINE

    rows, size, width = 130, 300, 128
    hidden, weight = draw(rows, width, dtype=HALF, seed=8), draw(size, width, dtype=HALF) / 4
    temperature = torch.linspace(0.5, 2, rows).to(DEVICE)
    logits = (hidden.double() @ weight.double().T / temperature[:, None].double()).float()
    room = chunk_room(rows, size, FINE, hidden.device)
    head_sums(hidden, weight, temperature, room)
    parts = F.pad(logits, (0, -size % FINE), value=float("-inf")).unflatten(1, (-1, FINE))
    near(room[0], parts.amax(2), at=5)
    near(room[1], (parts - parts.amax(2, keepdim=True)).exp().sum(2), at=20)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE)

    greedy, seeds, counts = (ints(*values) for values in ([row % 2 for row in range(rows)], range(rows), [3] * rows))
    token, log_prob = torch.empty(rows, dtype=torch.int64, device=DEVICE), torch.empty(rows, device=DEVICE)
    nothing = [None] * 8
    _pick[(rows,)](
        None, hidden, weight, None, temperature, greedy.int(), seeds, counts.int(), *room, token, log_prob, *nothing,
        size, 5, 0, 0, width, FINE, 8, 1, False, False,
    )  # fmt: skip
    numbers, given = (
        np.arange(rows).astype(np.uint64),
        (temperature.cpu().numpy(), greedy.cpu().numpy().astype(np.uint8)),
    )
    plain = (logits * temperature[:, None]).cpu()
    wanted, log_probs = sampling.sample_plain(plain, np.arange(rows), *given, numbers, np.full(rows, 3))
    assert (token.cpu().numpy() == wanted).mean() > 0.98  # a number may fall just beside a border
    same = token.cpu().numpy() == wanted
    np.testing.assert_allclose(log_prob.cpu().numpy()[same], log_probs[same], atol=1e-4)
    assert (log_prob <= 0).all()


def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary():
    """The next step looks it up: what is beyond the table would end the process before anybody can say why."""
    logits = torch.full((4, 2100), float("nan"), device=DEVICE)
    greedy, seeds = np.array([0, 1, 0, 1], np.int32), np.arange(4).astype(np.uint64)
    found, _ = sampling._sample_cuda(logits, np.arange(4), np.ones(4, np.float32), greedy, seeds, np.zeros(4, np.int64))
    assert ((found >= 0) & (found < 2100)).all()


@pytest.mark.parametrize("wide", [False, True])
def test_gate_and_up_in_one_product(wide, monkeypatch):
    from posttrain.kernels.cuda import fused_products

    monkeypatch.setattr(fused_products, "WIDE", 64 if wide else 1000)
    x, weight = draw(140, 128, dtype=HALF, seed=9), draw(2 * 136, 128, dtype=HALF) / 8
    gate, up = (x.float() @ weight.float().T).to(HALF).float().chunk(2, 1)
    near(fused_products.gated_product(x, weight), F.silu(gate) * up)


def test_gate_and_up_of_any_width_are_left_to_torch_where_tiles_cannot_be_written(monkeypatch):
    from posttrain.kernels.cuda import fused_products

    monkeypatch.setattr(fused_products, "takes", lambda x, weight, least: True)
    x = draw(4, 64)
    assert [fused_products.takes_gated(x, draw(2 * size, 64)) for size in (172, 176)] == [False, True]
    with pytest.raises(AssertionError):
        fused_products.gated_product(x.half(), draw(2 * 172, 64).half())


def half_turn(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


@each_dtype
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_decoding_attention_reads_live_keys_only(dtype, window, splits, normed):
    from posttrain.kernels.cuda.decode_attention import StepRows, decode_attention

    prompts, newest = [40, 7, 64, 5], [45, 7, 100, 9]
    table = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 0], [6, 7, 8, 9], [10, 11, 0, 0]], dtype=torch.int32)
    full = [-(-prompt // BLOCK) * BLOCK for prompt in prompts]
    rows = [
        [p if p < prompts[row] else full[row] + p - prompts[row] for p in range(newest[row] + 1)] for row in range(4)
    ]
    slots = [int(table[row, rows[row][-1] // BLOCK]) * BLOCK + rows[row][-1] % BLOCK for row in range(4)]
    slots[3] = -1  # a row that has ended: it writes nothing
    keys, values = draw(12, K, BLOCK, D, dtype=dtype, seed=6), draw(12, K, BLOCK, D, dtype=dtype)
    cache = (torch.full_like(keys, float("nan")), torch.full_like(values, float("nan")))
    for row, places in enumerate(rows):  # what lies at other places counts for nothing, whatever it is
        for at in [(table[row, p // BLOCK], slice(None), p % BLOCK) for p in places[:-1]]:
            cache[0][at], cache[1][at] = keys[at], values[at]
    qkv = draw(4, (H + 2 * K) * D, dtype=dtype)
    rotation, norms = (draw(128, D), draw(128, D)), (draw(D, dtype=dtype), draw(D, dtype=dtype)) if normed else None
    columns = (newest, slots, [places[-1] + 1 for places in rows], prompts)
    given = [torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in columns]
    step = StepRows(given[0], given[1].long(), *given[2:], table.to(DEVICE), splits)
    how = {"scale": 0.3, "window": window, "rotation": rotation, "norms": norms, "epsilon": 1e-6}
    before = [part.clone() for part in cache]
    found = decode_attention(qkv, cache, step, **how)

    query, key, value = qkv.float().view(4, -1, D).split([H, K, K], 1)
    if norms:
        query, key = (F.rms_norm(x, (D,), w.float(), 1e-6) for x, w in zip((query, key), norms, strict=True))
    cosine, sine = (part[torch.tensor(newest)][:, None].float() for part in rotation)
    query, key = (x * cosine + half_turn(x) * sine for x in (query, key))
    for row, places in enumerate(rows):
        seen = [(table[row, p // BLOCK], slice(None), p % BLOCK) for p in places[:-1]]
        pairs = ((keys, key), (values, value))
        own, held = (torch.stack([*(pool[at].float() for at in seen), new[row]], 1) for pool, new in pairs)
        scores = torch.einsum("hd,hld->hl", query[row], own.repeat_interleave(H // K, 0)) * 0.3
        if window:
            scores[:, : max(0, len(places) - window)] = float("-inf")
        wanted = torch.einsum("hl,hld->hd", scores.softmax(-1), held.repeat_interleave(H // K, 0))
        near(found[row], wanted.flatten(), at=2)
        at = (table[row, places[-1] // BLOCK], slice(None), places[-1] % BLOCK)
        if slots[row] >= 0:
            near(cache[0][at], key[row], at=2)
            near(cache[1][at], value[row])
            before[0][at], before[1][at] = cache[0][at], cache[1][at]
    for part, kept in zip(cache, before, strict=True):
        torch.testing.assert_close(part, kept, rtol=0, atol=0, equal_nan=True, msg="nothing else was written")


@each_dtype
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(3, 3, 24), (16, 1, 40), (6, 2, 96), (4, 1, 256)])
def test_decoding_attention_of_any_group_and_head_size(dtype, heads, key_heads, size):
    """Head sizes that are no power of two, and a row that fills its blocks to the last place."""
    from posttrain.kernels.cuda.decode_attention import StepRows, decode_attention

    lengths, table = [32, 63, 64], torch.tensor([[0, 1, 0], [2, 3, 0], [4, 5, 6]], dtype=torch.int32, device=DEVICE)
    columns = (heads + 2 * key_heads) * size
    qkv = draw(3, columns, dtype=dtype, seed=11)
    cache = tuple(draw(7, key_heads, BLOCK, size, dtype=dtype) for _ in range(2))
    slots = [int(table[row, place // BLOCK]) * BLOCK + place % BLOCK for row, place in enumerate(lengths)]
    given = [torch.tensor(x, device=DEVICE) for x in (lengths, slots, [place + 1 for place in lengths], [32, 32, 32])]
    step = StepRows(given[0].int(), given[1], given[2].int(), given[3].int(), table)
    how = {"scale": 0.2, "window": None, "rotation": None, "norms": None, "epsilon": 0.0}
    before = [part.clone() for part in cache]
    found = decode_attention(qkv, cache, step, **how).view(3, heads, size)
    query, key, value = qkv.float().view(3, -1, size).split([heads, key_heads, key_heads], 1)
    for row, length in enumerate(lengths):
        held = [part[table[row].long()].transpose(0, 1).flatten(1, 2)[:, :length].float() for part in before]
        own = [torch.cat([old, new[row][:, None]], 1) for old, new in zip(held, (key, value), strict=True)]
        keys, values = (x.repeat_interleave(heads // key_heads, 0) for x in own)
        scores = torch.einsum("hd,hld->hl", query[row], keys) * 0.2
        near(found[row], torch.einsum("hl,hld->hd", scores.softmax(-1), values), at=2)
        at = (table[row, length // BLOCK].long(), slice(None), length % BLOCK)
        assert torch.equal(cache[0][at], key[row].to(dtype)) and torch.equal(cache[1][at], value[row].to(dtype))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("normed", [False, True])
def test_prompts_are_written_into_the_cache_and_attend_as_the_twin_does(window, normed):
    many, few = 70, 5  # a prompt of three blocks; five tokens behind one of 40, whose second block has empty places
    positions = torch.cat([torch.arange(many), torch.arange(few) + 40]).int()
    rows = torch.cat([torch.zeros(many), torch.ones(few)]).int()
    table = torch.tensor([[3, 1, 6, 0], [2, 4, 5, 0]]).int()
    starts = torch.tensor([[0, 32, 64, FAR], [0, 32, 40, FAR]]).int()
    torch.manual_seed(7)
    rotation = (torch.randn(100, D), torch.randn(100, D))
    norms = (torch.randn(D), torch.randn(D)) if normed else None
    query, key, value = torch.randn(75, H, D), torch.randn(75, K, D), torch.randn(75, K, D)
    cache = (torch.randn(8, K, D, BLOCK), torch.randn(8, K, BLOCK, D))  # keys lie transposed on a CPU
    there = (cache[0].transpose(2, 3).contiguous().to(DEVICE), cache[1].clone().to(DEVICE))

    def on(device: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone().to(device) for tensor in tensors)

    def step(device: str) -> StepTokens:
        ids, places, of, blocks, begins = on(device, torch.zeros(75).long(), positions, rows, table, starts)
        return StepTokens(ids, places, of, blocks, begins, 70)

    rest = (0.3, window)
    wanted = decode._attention_twin(query.clone(), key, value, cache, step("cpu"), *rest, rotation, norms, 1e-6)
    turned, normers = on(DEVICE, *rotation), on(DEVICE, *norms) if norms else None
    found = decode._attention_cuda(*on(DEVICE, query, key, value), there, step(DEVICE), *rest, turned, normers, 1e-6)
    near(found.cpu(), wanted, at=5)
    near(there[0].cpu(), cache[0].transpose(2, 3), at=2)
    near(there[1].cpu(), cache[1])


@pytest.mark.parametrize("ends", [[0, 0, 0], [0, 1, 0]])
def test_where_the_newest_tokens_of_a_step_go(ends):
    from posttrain.kernels.cuda.graphs import _begin

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    table = torch.arange(12, dtype=torch.int32, device=DEVICE).view(3, 4)
    slot = torch.full((3,), -7, dtype=torch.int64, device=DEVICE)
    position, length, seen = ints(-1, -1, -1), ints(0, 0, 0), ints(0, 0, 0)
    _begin[(1,)](ints(40, 7, 65), ints(40, 7, 64), ints(*ends), table, position, slot, length, seen, 3, 4, BLOCK, 128)
    places = [64, 32, 65]  # behind the blocks of the prompt
    wanted = [(4 * row + place // BLOCK) * BLOCK + place % BLOCK for row, place in enumerate(places)]
    assert slot.tolist() == [-1 if end else at for at, end in zip(wanted, ends, strict=True)]
    assert length.tolist() == [1 if end else place + 1 for place, end in zip(places, ends, strict=True)]
    assert position.tolist() == [40, 0 if ends[1] else 7, 65], "a row that has ended stands where there is a rotation"


def test_pieces_of_shared_prompts_for_flash_attention():
    from posttrain.kernels.cuda.flash import Pieces

    segment = np.array([0, 0, 0, 1, 1, 2, 2, 2, 0, 0, 1, 1, 0, 0, 1, 2])
    sight = Sight.of([8, 4, 4], segment)
    found = Pieces.of(sight.unit_starts, sight.prompts, sight.first, torch.device(DEVICE))
    assert found.own.tolist() == [0, 3, 5, 8, 12, 14, 15, 16], "a prompt with a single response is one plain row"
    assert found.response_R.tolist() == [3, 4, 5, 6, 7, 14, 15]
    assert found.prompt_P.tolist() == [0, 1, 2, 0, 1, 2, 12, 13, 12, 13], "a copy for each response"
    queries, keys, longest_query, longest_key = found.over
    assert queries.tolist() == [0, 2, 5, 6, 7] and keys.tolist() == [0, 3, 6, 8, 10]
    assert (longest_query, longest_key) == (3, 3)
    torch.use_deterministic_algorithms(True)
    try:
        found = Pieces.of(sight.unit_starts, sight.prompts, sight.first, torch.device(DEVICE))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.response_R.tolist() == [3, 4, 5, 6, 7, 14, 15] and found.prompt_P.tolist() == [0, 1, 2, 12, 13]
    queries, keys, longest_query, longest_key = found.over
    assert queries.tolist() == [0, 5, 7] and keys.tolist() == [0, 3, 5] and (longest_query, longest_key) == (5, 3)
    long = Sight.of([9], np.array([0] * 6 + [1, 1, 2]))
    found = Pieces.of(long.unit_starts, long.prompts, long.first, torch.device(DEVICE))
    assert found.prompt_P.tolist() == [*range(6)], "copies of 12 tokens would be more than the pass of 9"
    plain = Sight.of([3, 4], None)
    assert Pieces.of(plain.unit_starts, plain.prompts, plain.first, torch.device(DEVICE)).over is None


@each_dtype
def test_parts_of_an_attention_are_joined_by_their_sums(dtype):
    from posttrain.kernels.cuda.join_parts import join_parts

    out, over = draw(9, 3, 40, dtype=dtype, seed=6), draw(4, 3, 40, dtype=dtype)
    logsum, over_logsum, places = draw(3, 9), 2 * draw(3, 4), torch.tensor([1, 2, 5, 8]).to(DEVICE)
    both = torch.logaddexp(logsum[:, places], over_logsum)
    wanted, sums = out.float().clone(), logsum.clone()
    shares = [(x - both).exp().T[..., None] for x in (logsum[:, places], over_logsum)]
    wanted[places], sums[:, places] = out[places].float() * shares[0] + over.float() * shares[1], both
    join_parts(out, logsum, over, over_logsum, places)
    near(out, wanted)
    near(logsum, sums)


@pytest.mark.skipif(not ON_CUDA, reason="torch's flash attention needs a CUDA device")
def test_flash_attention_over_shared_prompts_equals_plain_rows():
    from posttrain.kernels.train import PackedAttention

    segment = np.array([0] * 20 + [1] * 9 + [2] * 13 + [0] * 6 + [1] * 4)
    sight = Sight.of([42, 10], segment)
    tensors = [draw(52, count, 64, dtype=torch.bfloat16, seed=8 + count).requires_grad_() for count in (H, K, K)]
    found = PackedAttention.apply(*tensors, sight, 0.125)
    grad = draw(52, H, 64, dtype=torch.bfloat16)
    found.backward(grad)
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    seen = torch.zeros(52, 52, dtype=torch.bool, device=DEVICE)
    for start, prompt, ends in ((0, 20, [29, 42]), (42, 6, [52])):
        begin = start + prompt
        seen[start:begin, start:begin] = True
        for end in ends:
            seen[begin:end, start : start + prompt] = True
            seen[begin:end, begin:end] = True
            begin = end
    seen &= torch.ones_like(seen).tril()
    query, key, value = (x.transpose(0, 1) for x in wide)
    key, value = (x.repeat_interleave(H // K, 0) for x in (key, value))
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.125).transpose(0, 1)
    near(found.detach(), wanted.detach())
    wanted.backward(grad.float())
    for ours, theirs in zip(tensors, wide, strict=True):
        near(ours.grad, theirs.grad, at=2)


@pytest.mark.skipif(not ON_CUDA, reason="cuDNN's attention needs a CUDA device")
@pytest.mark.parametrize("size", [64, 128])
def test_long_rows_are_attended_to_by_cudnn_and_equal_the_plain_formula(size, monkeypatch):
    from posttrain.kernels.cuda import long_rows
    from posttrain.kernels.train import PackedAttention

    monkeypatch.setattr(long_rows, "LONG", 500)
    calls, backward = [], long_rows.attention_backward
    monkeypatch.setattr(long_rows, "attention_backward", lambda *args: calls.append(1) or backward(*args))
    lengths = [512, 700]
    sight = Sight.of(lengths, None)
    joined = draw(sum(lengths), H + 2 * K, size, dtype=torch.bfloat16, seed=3)  # heads are views into one tensor
    tensors = [part.detach().requires_grad_() for part in joined.split([H, K, K], 1)]
    scale = size**-0.5
    found = PackedAttention.apply(*tensors, sight, scale)
    grad = draw(sum(lengths), H, size, dtype=torch.bfloat16)
    found.backward(grad)
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    rows = []
    for row in zip(*(x.split(lengths) for x in wide), strict=True):
        query, key, value = (x.transpose(0, 1) for x in row)
        key, value = (x.repeat_interleave(H // K, 0) for x in (key, value))
        rows.append(F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(0, 1))
    wanted = torch.cat(rows)
    near(found.detach(), wanted.detach())
    wanted.backward(grad.float())
    for ours, theirs in zip(tensors, wide, strict=True):
        near(ours.grad, theirs.grad, at=2)
    assert calls
    monkeypatch.setattr(long_rows, "LONG", 4096)
    near(PackedAttention.apply(*tensors, sight, scale).detach(), found.detach(), at=2)
    assert len(calls) == 1

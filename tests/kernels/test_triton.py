"""Every Triton kernel of decoding and sampling against its formula in torch, at small shapes.

On a CUDA device in float32 and bfloat16. Without one in Triton's interpreter, in float32, if Triton is installed:
`TRITON_INTERPRET=1 pytest tests/kernels/test_triton.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from triton_tools import DEVICE, ON_CUDA, D, H, K, draw, each_dtype, near

from posttrain.kernels import decode
from posttrain.kernels.decode import BLOCK, FAR, StepTokens
from posttrain.kernels.scores import ScoreChanges
from posttrain.rollout import sampling

pytestmark = pytest.mark.gpu(interpreter=True)


@each_dtype
def test_add_rms_norm(dtype):
    from posttrain.kernels.cuda.elementwise import add_rms_norm

    x, added, weight = draw(5, 48, dtype=dtype, seed=0), draw(5, 48, dtype=dtype), draw(48, dtype=dtype)
    kept = x.clone()
    near(add_rms_norm(kept, added, weight, 1e-6), F.rms_norm((x + added).float(), (48,), weight.float(), 1e-6))
    near(kept, x + added)
    near(add_rms_norm(kept, None, weight, 1e-6), F.rms_norm(kept.float(), (48,), weight.float(), 1e-6))


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
    from posttrain.kernels.cuda import FINE
    from posttrain.kernels.cuda.fused_products import head_sums
    from posttrain.kernels.cuda.sampling import _pick, chunk_room

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


def test_as_many_tiles_are_on_their_way_as_let_a_product_end_first():
    from posttrain.kernels.cuda.fused_products import _stages

    assert [_stages(programs, 132) for programs in (608, 456, 304, 192)] == [2, 3, 2, 3]


def test_gate_and_up_of_any_width_are_left_to_torch_where_tiles_cannot_be_written(monkeypatch):
    from posttrain.kernels.cuda import fused_products

    monkeypatch.setattr(fused_products, "takes", lambda x, weight, least: True)
    x = draw(4, 64)
    assert [fused_products.takes_gated(x, draw(2 * size, 64)) for size in (172, 176)] == [False, True]
    with pytest.raises(AssertionError):
        fused_products.gated_product(x.half(), draw(2 * 172, 64).half())


def half_turn(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


CHANGES = {"plain": (None, False), "cap": (1.5, False), "sinks": (None, True), "both": (1.5, True)}


def score_changes(kind: str, dtype=torch.float32) -> ScoreChanges:
    cap, sinks = CHANGES[kind]
    return ScoreChanges(cap, 3 * draw(H, dtype=dtype, seed=12) if sinks else None)


@each_dtype
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_decoding_attention_reads_live_keys_only(dtype, window, splits, normed, kind):
    from posttrain.kernels.cuda.paged_attention import StepRows, decode_attention

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
    changes = score_changes(kind, dtype)
    how = {"scale": 0.3, "window": window, "rotation": rotation, "norms": norms, "epsilon": 1e-6}
    before = [part.clone() for part in cache]
    found = decode_attention(qkv, cache, step, **how, changes=changes)

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
        if changes.cap is not None:
            scores = changes.cap * torch.tanh(scores / changes.cap)
        if window:
            scores[:, : max(0, len(places) - window)] = float("-inf")
        if changes.sinks_H is not None:
            scores = torch.cat([scores, changes.sinks_H.float()[:, None]], 1)
        wanted = torch.einsum("hl,hld->hd", scores.softmax(-1)[:, : len(places)], held.repeat_interleave(H // K, 0))
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
    from posttrain.kernels.cuda.paged_attention import StepRows, decode_attention

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
@pytest.mark.parametrize("kind", CHANGES)
def test_prompts_are_written_into_the_cache_and_attend_as_the_twin_does(window, normed, kind):
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
    there_changes = score_changes(kind)
    here = there_changes.sinks_H
    changes = ScoreChanges(there_changes.cap, None if here is None else here.cpu())
    given = (query.clone(), key, value, cache, step("cpu"), *rest, rotation, norms, 1e-6, changes)
    wanted = decode._attention_torch(*given)
    turned, normers = on(DEVICE, *rotation), on(DEVICE, *norms) if norms else None
    given = (*on(DEVICE, query, key, value), there, step(DEVICE), *rest, turned, normers, 1e-6, there_changes)
    found = decode._attention_cuda(*given)
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

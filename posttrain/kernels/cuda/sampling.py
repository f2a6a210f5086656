"""The next token of every row from its logits, with its log-prob, by inverting the CDF at one uniform number per row.

First the sums of chunks of the vocabulary, then the one chunk in which the uniform number falls. The sums come from a
pass over the logits, or from the product itself (`fused_products.py`), which keeps no logits: then those of the one
chunk are computed again. The number is the hash of (seed, place) of `posttrain.rollout.sampling.uniforms`, so that a
token does not depend on the batch it is sampled in.

Shapes: N rows of logits, B rows that sample, V vocabulary, C chunks, E width of the model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 2048


@triton.jit
def _chunk_sums(LOGITS, SOURCE, TEMPERATURE, MAX, SUM, V, chunks, CHUNK: tl.constexpr, SOURCED: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    source = row
    if SOURCED:
        source = tl.load(SOURCE + row)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(LOGITS + source.to(tl.int64) * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    x = x / tl.load(TEMPERATURE + row)
    top = tl.max(x, 0)
    into = row.to(tl.int64) * chunks + chunk
    tl.store(MAX + into, top)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(SUM + into, tl.sum(tl.exp(x - safe), 0))


@triton.jit
def _logits_again(HIDDEN, WEIGHT, row, first, inside, E: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr):
    weight = WEIGHT + (first + tl.arange(0, CHUNK)).to(tl.int64)[:, None] * E
    sums = tl.zeros([CHUNK, AT_ONCE], tl.float32)
    for start in range(0, E, AT_ONCE):
        e = start + tl.arange(0, AT_ONCE)
        x = tl.load(HIDDEN + row.to(tl.int64) * E + e, mask=e < E, other=0.0).to(tl.float32)
        w = tl.load(weight + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)
        sums += w * x[None, :]
    return tl.where(inside, tl.sum(sums, 1), float("-inf"))


@triton.jit
def _mix(x):  # the finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, place):
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    bits = _mix(_mix(seed.to(tl.uint64, bitcast=True) + golden) + golden * (place.to(tl.uint64) + 1))
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)  # the upper 53 bits over 2**53


@triton.jit
def _reached(mass, want, CHUNKS: tl.constexpr):
    # (chunk, sum before it): the first chunk at which the cumulative mass exceeds `want`. In two levels, first the
    # group and then the chunk in it, because one long cumulative sum is slow.
    FEW: tl.constexpr = 32 if CHUNKS >= 1024 else CHUNKS
    groups: tl.constexpr = CHUNKS // FEW
    grouped = tl.reshape(mass, [groups, FEW])
    g, i = tl.arange(0, groups), tl.arange(0, FEW)
    sums = tl.sum(grouped, 1)
    group = tl.minimum(tl.sum((tl.cumsum(sums, 0) <= want).to(tl.int32), 0), groups - 1)
    before = tl.sum(tl.where(g < group, sums, 0.0), 0)
    own = tl.sum(tl.where((g == group)[:, None], grouped, 0.0), 0)
    place = tl.minimum(tl.sum((before + tl.cumsum(own, 0) <= want).to(tl.int32), 0), FEW - 1)
    return group * FEW + place, before + tl.sum(tl.where(i < place, own, 0.0), 0)


@triton.jit
def _pick(
    LOGITS, HIDDEN, WEIGHT, SOURCE, TEMPERATURE, GREEDY, SEED, COUNT, MAX, SUM, TOKEN, LOG_PROB,
    ENDED, MADE, POSITION, LIMIT, STOPS, STOP_IDS, TOKENS, LOG_PROBS, V, chunks, stop_width, steps,
    E: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STOP_BLOCK: tl.constexpr, SOURCED: tl.constexpr,
    ADVANCE: tl.constexpr, TOP=None, LOG_TOTAL=None, TOTALED: tl.constexpr = False,
):  # fmt: skip
    row = tl.program_id(0)
    c = tl.arange(0, CHUNKS)
    there = c < chunks
    base = row.to(tl.int64) * chunks
    chunk_max = tl.load(MAX + base + c, mask=there, other=float("-inf"))
    top = tl.max(chunk_max, 0)
    mass = tl.load(SUM + base + c, mask=there, other=0.0) * tl.exp(chunk_max - top)
    mass = tl.where(there, mass, 0.0)
    total = tl.sum(mass, 0)
    count = tl.load(COUNT + row)
    want = (_uniform(tl.load(SEED + row), count) * total.to(tl.float64)).to(tl.float32)
    last = tl.max(tl.where(mass > 0.0, c, 0), 0)  # rounding may carry `want` past the last chunk with any mass
    chunk, before = _reached(mass, want, CHUNKS)
    chunk = tl.minimum(chunk, last)
    greedy = tl.load(GREEDY + row) != 0
    chunk = tl.where(greedy, tl.min(tl.where(there & (chunk_max == top), c, chunks - 1), 0), chunk)
    at = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + at < V
    if E > 0:
        x = _logits_again(HIDDEN, WEIGHT, row, chunk * CHUNK, inside, E, CHUNK, 64)
    else:
        source = row
        if SOURCED:
            source = tl.load(SOURCE + row)
        logits = LOGITS + source.to(tl.int64) * V + chunk * CHUNK
        x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    x = x / tl.load(TEMPERATURE + row)
    p = tl.exp(x - top)
    reached = tl.cumsum(p, 0) + before <= want
    place = tl.minimum(tl.sum((inside & reached).to(tl.int32), 0), tl.max(tl.where(inside & (p > 0.0), at, 0), 0))
    place = tl.where(greedy, tl.argmax(x, 0), place)
    token = tl.minimum(chunk * CHUNK + place, V - 1)  # with NaN logits any place may be the largest
    value = tl.sum(tl.where(at == place, x, 0.0), 0)
    if TOTALED:  # as training computes it (`ordered.py`)
        log_prob = tl.minimum(value - tl.load(TOP + row) - tl.load(LOG_TOTAL + row), 0.0)
    else:  # a logit computed again may exceed the maximum by rounding
        log_prob = tl.minimum(value - top - tl.log(total), 0.0)
    if ADVANCE:  # a captured step also updates the state of the row, and ends it
        if tl.load(ENDED + row) == 0:
            made = tl.load(MADE + row)
            tl.store(TOKEN + row, token.to(tl.int64))
            tl.store(TOKENS + row * steps + made, token)
            tl.store(LOG_PROBS + row * steps + made, log_prob)
            tl.store(MADE + row, made + 1)
            tl.store(COUNT + row, count + 1)
            tl.store(POSITION + row, tl.load(POSITION + row) + 1)
            s = tl.arange(0, STOP_BLOCK)
            stop_at = STOP_IDS + tl.load(STOPS + row) * stop_width + s
            stopped = tl.max((tl.load(stop_at, mask=s < stop_width, other=-1) == token).to(tl.int32), 0)
            full = (count + 1 >= tl.load(LIMIT + row)).to(tl.int32)
            tl.store(ENDED + row, tl.where(stopped != 0, 1, 2 * full))
    else:
        tl.store(TOKEN + row, token.to(tl.int64))
        tl.store(LOG_PROB + row, log_prob)


def chunk_room(rows: int, vocabulary: int, chunk: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the sums of the chunks: largest, and sum of exponentials over it."""
    shape = (rows, triton.cdiv(vocabulary, chunk))
    return torch.empty(shape, device=device), torch.empty(shape, device=device)


def sum_chunks(
    logits_NV: torch.Tensor,
    temperature_B: torch.Tensor,
    room: tuple[torch.Tensor, torch.Tensor],
    source_B: torch.Tensor | None = None,
) -> None:
    """The sums of every CHUNK logits of each row, into `room`; row b has logits `source_B[b]`, or b."""
    size = logits_NV.shape[1]
    chunks, rows = triton.cdiv(size, CHUNK), len(logits_NV if source_B is None else source_B)
    _chunk_sums[(rows, chunks)](
        logits_NV, source_B, temperature_B, *room, size, chunks, CHUNK, source_B is not None, num_warps=4
    )


@triton.jit
def _totals(MAX, SUM, TOP, LOG_TOTAL, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    there = c < chunks
    chunk_max = tl.load(MAX + row * chunks + c, mask=there, other=float("-inf"))
    top = tl.max(chunk_max, 0)
    mass = tl.load(SUM + row * chunks + c, mask=there, other=0.0) * tl.exp(chunk_max - top)
    tl.store(TOP + row, top)
    tl.store(LOG_TOTAL + row, tl.log(tl.sum(tl.where(there, mass, 0.0), 0)))


def row_totals(
    room: tuple[torch.Tensor, torch.Tensor], rows: int, chunks: int, found: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """The largest logit of each row and the logarithm of its sum, from those of chunks. A kernel of its own, which
    decoding and training both call: another kernel might sum in another order."""
    _totals[(rows,)](*room, *found, chunks, triton.next_power_of_2(chunks), num_warps=4)


def sample_rows(
    logits_NV: torch.Tensor,
    source_B: torch.Tensor,
    temperature_B: torch.Tensor,
    greedy_B: torch.Tensor,
    seed_B: torch.Tensor,
    place_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, log-probs); row b samples from logits `source_B[b]` with the number of (`seed_B`, `place_B`)."""
    rows, size = len(source_B), logits_NV.shape[1]
    room = chunk_room(rows, size, CHUNK, logits_NV.device)
    chunks = room[0].shape[1]
    token = torch.empty(rows, dtype=torch.int64, device=logits_NV.device)
    log_prob = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    sum_chunks(logits_NV, temperature_B, room, source_B)
    top, log_total = torch.empty_like(log_prob), torch.empty_like(log_prob)
    row_totals(room, rows, chunks, (top, log_total))
    _pick[(rows,)](
        logits_NV, None, None, source_B, temperature_B, greedy_B, seed_B, place_B, *room, token, log_prob,
        None, None, None, None, None, None, None, None, size, chunks, 0, 0,
        0, CHUNK, triton.next_power_of_2(chunks), 1, True, False, top, log_total, True, num_warps=4,
    )  # fmt: skip
    return token, log_prob

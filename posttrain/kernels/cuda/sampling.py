"""The next token of every row from its logits, with its log-prob: one uniform number per row, inverse of the CDF.

Two passes over the logits, none of which writes tokens x vocabulary numbers: sums by chunk of the vocabulary, then the
one chunk of each row in which its uniform number falls. The number is the hash of (seed, place) that
`posttrain.rollout.sampling.uniforms` computes.

Shapes: N rows of logits, B rows that sample, V vocabulary, C chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 2048


@triton.jit
def _chunk_sums(LOGITS, SOURCE, TEMPERATURE, MAX, SUM, BEST, V, chunks, CHUNK: tl.constexpr, SOURCED: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    source = row
    if SOURCED:
        source = tl.load(SOURCE + row)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(LOGITS + source.to(tl.int64) * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    x = x / tl.load(TEMPERATURE + row)
    top, where = tl.max(x, 0, return_indices=True)
    into = row.to(tl.int64) * chunks + chunk
    tl.store(MAX + into, top)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(SUM + into, tl.sum(tl.exp(x - safe), 0))
    tl.store(BEST + into, chunk * CHUNK + where)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, place):
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    bits = _mix(_mix(seed.to(tl.uint64, bitcast=True) + golden) + golden * (place.to(tl.uint64) + 1))
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _pick(
    LOGITS, SOURCE, TEMPERATURE, GREEDY, SEED, COUNT, MAX, SUM, BEST, TOKEN, LOG_PROB,
    ENDED, MADE, POSITION, LIMIT, STOPS, STOP_IDS, TOKENS, LOG_PROBS, V, chunks, stop_width, steps,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STOP_BLOCK: tl.constexpr, SOURCED: tl.constexpr, ADVANCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    source = row
    if SOURCED:
        source = tl.load(SOURCE + row)
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
    last = tl.max(tl.where(mass > 0.0, c, 0), 0)
    chunk = tl.minimum(tl.sum((there & (tl.cumsum(mass, 0) <= want)).to(tl.int32), 0), last)
    before = tl.sum(tl.where(c < chunk, mass, 0.0), 0)
    at = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + at < V
    temperature = tl.load(TEMPERATURE + row)
    logits = LOGITS + source.to(tl.int64) * V
    x = tl.load(logits + chunk * CHUNK + at, mask=inside, other=float("-inf")).to(tl.float32) / temperature
    p = tl.exp(x - top)
    reached = tl.cumsum(p, 0) + before <= want
    place = tl.minimum(tl.sum((inside & reached).to(tl.int32), 0), tl.max(tl.where(inside & (p > 0.0), at, 0), 0))
    token = chunk * CHUNK + place
    value = tl.sum(tl.where(at == place, x, 0.0), 0)
    if tl.load(GREEDY + row) != 0:
        best = tl.min(tl.where(there & (chunk_max == top), c, CHUNKS), 0)
        token = tl.load(BEST + base + best)
        value = top
    log_prob = value - top - tl.log(total)
    if ADVANCE:
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


def chunk_room(rows: int, vocabulary: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Room for the sums of the chunks: largest, sum of exponentials, and where the largest is."""
    shape = (rows, triton.cdiv(vocabulary, CHUNK))
    kinds = (torch.float32, torch.float32, torch.int32)
    return tuple(torch.empty(shape, dtype=kind, device=device) for kind in kinds)


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
    room = chunk_room(rows, size, logits_NV.device)
    chunks = room[0].shape[1]
    token = torch.empty(rows, dtype=torch.int64, device=logits_NV.device)
    log_prob = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    _chunk_sums[(rows, chunks)](logits_NV, source_B, temperature_B, *room, size, chunks, CHUNK, True, num_warps=4)
    _pick[(rows,)](
        logits_NV, source_B, temperature_B, greedy_B, seed_B, place_B, *room, token, log_prob,
        None, None, None, None, None, None, None, None, size, chunks, 0, 0,
        CHUNK, triton.next_power_of_2(chunks), 1, True, False, num_warps=4,
    )  # fmt: skip
    return token, log_prob

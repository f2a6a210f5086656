"""One token for every row of a step: the flat pass that gives logits, and the sampling from them.

Shapes: T tokens of a step, N whose logits are wanted, B rows that get a token, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from posttrain.kernels.cuda import to_device
from posttrain.rollout.base import Request
from posttrain.rollout.native.decoder import Decoder, step_tokens, with_rows
from posttrain.rollout.native.pool import Pool
from posttrain.rollout.native.prompts import Piece, Prompt
from posttrain.rollout.native.slots import Slots
from posttrain.rollout.sampling import sample, sample_plain, uniforms


def forward(decoder: Decoder, pool: Pool, slots: Slots, decoding: np.ndarray, pieces: list[Piece]):
    """Logits of the decoding rows, then of the prompts that this step completes; None where there are none."""
    if not len(decoding) and not pieces:
        return None
    total = len(decoding)
    ids, positions = [slots.last[decoding]], [slots.length[decoding]]
    rows, wanted = [np.arange(total, dtype=np.int32)], list(range(total))
    states = slots.state[decoding].tolist()
    for number, (prompt, start, end) in enumerate(pieces, start=total):
        ids.append(np.asarray(prompt.ids[start:end], np.int64))
        positions.append(np.arange(start, end, dtype=np.int32))
        rows.append(np.full(end - start, number, np.int32))
        states.append(prompt.state)
        prompt.computed, total = end, total + end - start
        if prompt.ready:
            prompt.place = len(wanted)
            wanted.append(total - 1)
    slots.length[decoding] += 1
    slots.update_histories(decoding)
    slots.computed += len(decoding)
    table = with_rows((slots.table[decoding], slots.starts[decoding]), [(p.blocks, p.gap) for p, _, _ in pieces])
    fresh = [False] * len(decoding) + [start == 0 for _, start, _ in pieces]
    step = step_tokens(ids, positions, rows, table, pool.device, pool.states.of_rows(states, fresh))
    wanted_N = None if len(wanted) == total else to_device(torch.tensor(wanted).long(), pool.device)
    hidden_NE = decoder.hidden(step, pool.layer, wanted_N, pool.routes_PLK)
    return decoder.logits(hidden_NE) if wanted else None


def sources(logits_NV: torch.Tensor | None, decoding: int, prompts: list[Prompt]):
    """The logits that the rows of a step sample from, and which of them each row takes: the decoding rows first, then
    the new ones, whose prompts were computed in this step or kept their logits from an earlier one."""
    places, stored = list(range(decoding)), []
    first = 0 if logits_NV is None else len(logits_NV)
    for prompt in prompts:
        if prompt.place < 0:
            prompt.place = first + len(stored)
            stored.append(prompt.logits_V)
        places.append(prompt.place)
    if stored:
        logits_NV = torch.stack(stored) if logits_NV is None else torch.cat([logits_NV, torch.stack(stored)])
    return logits_NV, np.asarray(places, np.int64)


def sample_next(slots: Slots, slots_B: np.ndarray, logits_NV: torch.Tensor, source_B: np.ndarray) -> None:
    """The next token of every row."""
    places_B = slots.count[slots_B]
    tokens_B, log_probs_B, drawn = draw(slots, slots_B, logits_NV, source_B, np.zeros_like(slots_B), slots_B)
    for place, value in drawn.items():
        slots.drawn.setdefault(int(slots_B[place]), []).append(value)
    slots.tokens[slots_B, places_B] = slots.last[slots_B] = tokens_B
    slots.log_probs[slots_B, places_B] = log_probs_B
    slots.count[slots_B] += 1


def draw(
    slots: Slots,
    slots_T: np.ndarray,
    logits_NV: torch.Tensor,
    source_T: np.ndarray,
    ahead_T: np.ndarray,
    ids_T: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, dict[int, float]]:
    """(tokens, log-probs, and of special rows the log-probs of what was sampled from) after what rows have written and
    the `ahead_T` tokens of a draft, which end with `ids_T[t]`."""
    places_T = slots.count[slots_T] + ahead_T
    tokens_T, log_probs_T = sample_plain(
        logits_NV, source_T, slots.temperature[slots_T], slots.greedy[slots_T], slots.seed[slots_T], places_T
    )
    special = np.flatnonzero(slots.special[slots_T])
    if not len(special):
        return tokens_T, log_probs_T, {}
    requests: list[Request] = [slots.requests[slot] for slot in slots_T[special]]  # pyright: ignore
    seen = [
        (request.prompt_ids, slots.written(slots_T[place]) + ids_T[place + 1 - ahead_T[place] : place + 1].tolist())
        for request, place in zip(requests, special, strict=True)
    ]
    logits_BV = logits_NV[torch.from_numpy(source_T[special]).to(logits_NV.device)]
    uniform_B = torch.from_numpy(uniforms(slots.seed[slots_T[special]], places_T[special]))
    some = sample(logits_BV, [request.sampling for request in requests], uniform_B, seen)
    tokens_T[special], log_probs_T[special], drawn = (x.cpu().numpy() for x in some)
    return tokens_T, log_probs_T, dict(zip(special.tolist(), drawn.tolist(), strict=True))

"""The CUDA kernels of `trainer.exact`: right by their formulas, and with the same bits for one row as for many.

On a CUDA device in bfloat16 too. Without one in Triton's interpreter, in float32, if Triton is installed:
`TRITON_INTERPRET=1 pytest tests/kernels/test_triton_ordered.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_tools import DEVICE, D, H, K, draw, each_dtype, near

from posttrain.kernels.decode import BLOCK
from posttrain.kernels.train import Sight, ends_of_responses

pytestmark = pytest.mark.gpu(interpreter=True)
SCALE = 0.3


def attended(query_HD, key_SKD, value_SKD):
    """(outputs, logarithm of the sum) of one query, by the formula."""
    key, value = (x.repeat_interleave(H // K, 1).double() for x in (key_SKD, value_SKD))
    scores_HS = torch.einsum("hd,shd->hs", query_HD.double(), key) * SCALE
    return torch.einsum("hs,shd->hd", scores_HS.softmax(-1), value).float(), scores_HS.logsumexp(-1).float()


@each_dtype
def test_a_product_of_few_rows_is_that_of_many(dtype):
    from posttrain.kernels.cuda.ordered import product

    x, weight = draw(600, 200, dtype=dtype, seed=0), draw(70, 200, dtype=dtype)
    whole = x.new_empty(600, 70)
    product(x, weight, whole)
    near(whole, x.float() @ weight.float().T, at=20)
    for rows in (1, 17, 140, 300):
        part = x.new_empty(rows, 70)
        product(x[:rows], weight, part)
        near(part, whole[:rows])
        if DEVICE == "cuda" and dtype is torch.bfloat16:
            assert torch.equal(part, whole[:rows])


@each_dtype
def test_tiles_of_packed_trees_attend_as_the_formula_says_and_single_queries_have_the_same_bits(dtype):
    from posttrain.kernels.cuda.ordered import Walks, newest_attention, tile_attention

    lengths, segments = [90, 200], np.array([0] * 90 + [0] * 70 + [1] * 80 + [2] * 50)
    end_T, total = ends_of_responses(lengths, segments), 290
    query, key, value = draw(total, H, D, dtype=dtype, seed=1), *(draw(total, K, D, dtype=dtype) for _ in range(2))
    sight = Sight.of(lengths, end_T)
    walks = Walks.of(sight.unit_starts, sight.end, torch.device(DEVICE))
    where = (walks.tiles, walks.bases, walks.positions_T, walks.places)
    out, logsum = tile_attention(query, key, value, *where, scale=SCALE, sums=True)
    unit_T = np.repeat([0, 1], lengths)
    blocks = -(-total // BLOCK)
    cache = tuple(torch.zeros(2 * blocks, K, BLOCK, D, dtype=dtype, device=DEVICE) for _ in range(2))
    for token in (0, 1, 63, 64, 89, 90, 159, 160, 239, 240, 289):
        seen = [t for t in range(token + 1) if unit_T[t] == unit_T[token] and end_T[t] > token]
        wanted, sums = attended(query[token], key[seen], value[seen])
        near(out[token], wanted)
        near(logsum[:, token], sums)
        # The same keys in a paged cache, with a gap behind a prompt of 37 tokens, in blocks from the back.
        prompt = min(37, len(seen))
        places = [at if at < prompt else at - prompt + -(-prompt // BLOCK) * BLOCK for at in range(len(seen))]
        table = torch.arange(2 * blocks - 1, -1, -1, dtype=torch.int32, device=DEVICE)[None]
        for at, place in enumerate(places):
            for pool, source in zip(cache, (key, value), strict=True):
                pool[2 * blocks - 1 - place // BLOCK, :, place % BLOCK] = source[seen[at]]
        rows = (torch.tensor([len(seen) - 1]), torch.tensor([prompt]))
        rows = (x.to(DEVICE, torch.int32) for x in rows)
        found = newest_attention(query[token][None].contiguous(), cache, *rows, table, scale=SCALE)
        assert torch.equal(found.view(H, D), out[token]), token


def test_log_probs_are_those_of_sampling():
    from posttrain.kernels.cuda.ordered import label_log_probs
    from posttrain.kernels.cuda.sampling import sample_rows

    logits = 3 * draw(9, 5000, seed=2)
    rows = torch.arange(9, device=DEVICE)
    state = (torch.full((9,), 0.7, device=DEVICE), torch.zeros(9, dtype=torch.int32, device=DEVICE), rows, rows)
    token, log_prob = sample_rows(logits, rows, *state)
    found = label_log_probs(logits, token, 0.7)
    assert torch.equal(found, log_prob)
    assert torch.equal(label_log_probs(logits[3:5], token[3:5], 0.7), found[3:5])
    near(found, (logits / 0.7).log_softmax(-1).gather(1, token[:, None])[:, 0])

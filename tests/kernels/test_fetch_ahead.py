"""Which blocks a decode step names before its attention reads them; in Triton's interpreter, or on a CUDA device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
fetch_ahead = pytest.importorskip("posttrain.kernels.cuda.fetch_ahead")
pytestmark = pytest.mark.gpu(interpreter=True)
DEVICE, KIND = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
_wanted = fetch_ahead._wanted


@triton.jit
def _each(LENGTHS, PROMPTS, TABLE, BLOCKS, PIECES, width, own):
    row, t = tl.program_id(0), tl.arange(0, 32)
    block, piece, real = _wanted(LENGTHS, PROMPTS, TABLE, row, width, own, 32, 32, 4)
    tl.store(BLOCKS + row * 32 + t, tl.where(real, block, -1))
    tl.store(PIECES + row * 32 + t, piece)


def named(lengths: list[int], prompts: list[int], table: list[list[int]], own: int) -> list[set[tuple[int, int]]]:
    """(block, piece) that each row names, with blocks of 32 places in four pieces."""
    given = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (lengths, prompts, table)]
    blocks, pieces = (torch.empty(len(lengths), 32, dtype=torch.int32, device=DEVICE) for _ in range(2))
    _each[(len(lengths),)](*given, blocks, pieces, len(table[0]), own)
    pairs = zip(blocks.tolist(), pieces.tolist(), strict=True)
    return [{(b, p) for b, p in zip(*row, strict=True) if b >= 0} for row in pairs]


def whole(*blocks: int) -> set[tuple[int, int]]:
    return {(block, piece) for block in blocks for piece in range(4)}


def test_a_prompt_is_named_by_its_first_row_and_own_blocks_by_each():
    table = [[7, 8, 20, 21], [7, 8, 30, 31], [9, 40, 41, 0], [0, 0, 0, 0]]
    lengths, prompts = [97, 66, 40, 1], [64, 64, 20, 1]  # the newest token included; the last row has ended
    found = named(lengths, prompts, table, own=4)
    assert found == [whole(7, 8, 20), whole(30), whole(9, 40), set()]
    found = named(lengths, prompts, table, own=6)
    assert found[0] == whole(7, 8, 20), "nothing beyond the newest token"
    assert named([130, *lengths[1:]], prompts, table, own=6)[0] == whole(7, 8, 20) | {(21, 0), (21, 1)}
    assert named(lengths, prompts, table, own=2)[1] == {(30, 0), (30, 1)}
    assert named([65, *lengths[1:]], prompts, table, own=4)[0] == whole(7, 8), "its own block is empty as yet"


def test_the_norm_is_the_same_whatever_is_named():
    from posttrain.kernels.cuda.decode_attention import StepRows
    from posttrain.kernels.cuda.fetch_ahead import add_rms_norm_ahead

    torch.manual_seed(0)
    x, added = (torch.randn(3, 64, device=DEVICE, dtype=KIND) for _ in range(2))
    weight = torch.randn(64, device=DEVICE, dtype=KIND)
    cache = tuple(torch.randn(6, 2, 32, 64, device=DEVICE, dtype=KIND) for _ in range(2))
    ints = [
        torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([40] * 3, [0] * 3, [40] * 3, [32] * 3)
    ]
    table = torch.tensor([[0, 1], [0, 2], [3, 4]], dtype=torch.int32, device=DEVICE)
    kept = x.clone()
    found = add_rms_norm_ahead(kept, added, weight, 1e-6, cache, StepRows(*ints, table))
    assert torch.equal(kept, x + added)
    wanted = F.rms_norm((x + added).float(), (64,), weight.float(), 1e-6)
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)

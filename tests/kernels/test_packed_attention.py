"""Packed attention equals attention written out row by row, in value and gradient."""

import pytest
import torch
from references import plain_attention

from posttrain.kernels import train
from posttrain.kernels.packed_attention import PackedLayout, packed_attention, packed_rows


def inputs(lengths, heads=4, kv_heads=2, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    shapes = [(total, heads, size), (total, kv_heads, size), (total, kv_heads, size)]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("lengths", [[5, 3, 17, 1, 9, 9], [4, 4, 4], [1], [30, 1, 1, 1]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_the_row_by_row_twin_to_1e_12(lengths, kv_heads):
    q, k, v = inputs(lengths, kv_heads=kv_heads)
    ours = packed_attention(q, k, v, PackedLayout(lengths), scale=0.3)
    twin = plain_attention(q, k, v, lengths, 0.3)
    torch.testing.assert_close(ours, twin, rtol=0, atol=1e-12)
    weights = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), [q, k, v]),
        torch.autograd.grad((twin * weights).sum(), [q, k, v]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_row_does_not_see_its_neighbours():
    lengths = [6, 7]
    q, k, v = inputs(lengths)
    before = packed_attention(q, k, v, PackedLayout(lengths))
    changed = [x.detach().clone() for x in (q, k, v)]
    for x in changed:
        x[6:] += 1.0
    after = packed_attention(*changed, PackedLayout(lengths))
    assert torch.equal(before[:6], after[:6])
    assert not torch.equal(before[6:], after[6:])


def test_sliding_window_hides_older_tokens():
    lengths = [8, 5]
    q, k, v = inputs(lengths)
    ours = packed_attention(q, k, v, PackedLayout(lengths), scale=1.0, sliding_window=3)
    key, value = (x[5:8].repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q[7], key)
    expected = torch.einsum("ht,thd->hd", scores.softmax(-1), value)
    torch.testing.assert_close(ours[7], expected, rtol=0, atol=1e-12)


def test_rows_of_similar_length_share_a_rectangle_and_the_layout_is_closed_after_use():
    layout = PackedLayout([10, 9, 8, 2, 2])
    assert layout.shapes == [(3, 10), (2, 2)]
    from posttrain.kernels.packed_attention import active_layout

    with pytest.raises(RuntimeError), packed_rows(layout):
        assert active_layout() is layout
        raise RuntimeError
    assert active_layout() is None


def test_heads_that_are_rotated_by_themselves_and_gates_equal_the_formulas_and_their_gradients():
    """On a CPU in float32; on a CUDA device `test_triton_training.py` has the kernels that they are made of."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(11, count, 8, generator=generator).requires_grad_() for count in (6, 2, 2))
    angles = torch.randn(11, 4, generator=generator).repeat(1, 2)
    cosine, sine = angles.cos(), angles.sin()

    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]

    found = train.Rotated.apply(query, key, value, cosine, sine)
    wanted = turned(query), turned(key), value
    grads = [torch.randn(x.shape, generator=generator) for x in wanted]
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)
    by_formula = torch.autograd.grad(wanted, (query, key, value), grads)
    for mine, other in zip(torch.autograd.grad(found, (query, key, value), grads), by_formula, strict=True):
        torch.testing.assert_close(mine, other)

    both, grad = torch.randn(7, 20, generator=generator).requires_grad_(), torch.randn(7, 10, generator=generator)
    wanted = torch.nn.functional.silu(both[:, :10]) * both[:, 10:]
    found = train.Gated.apply(both)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x, both, grad)[0] for x in (found, wanted)))

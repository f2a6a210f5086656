"""Long rows, each lengthened into what stands behind it, are what they are alone: with a twin of cuDNN's attention on a
CPU, with cuDNN's own on a CUDA device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from posttrain.kernels.cuda import long_rows

H, K, D = 2, 1, 64
SCALE = D**-0.5


def causal(query, key, value):
    """(1, H, L, D) of each."""
    key, value = (x.repeat_interleave(H // K, 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE)


def twin_forward(query, key, value, *_, scale):
    assert query.shape[2] % long_rows.STRIDE == 0 and scale == SCALE
    return causal(query, key, value), torch.zeros(1, H, query.shape[2], 1), None, None, 0, 0, None, None, None


def twin_backward(grad, query, key, value, *_, scale):
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    return torch.autograd.grad(causal(*leaves), leaves, grad)


@pytest.mark.parametrize("spare", [False, True], ids=["no spare rows", "spare rows"])
@pytest.mark.parametrize("lengths", [[1023], [600, 1024], [513, 514, 515]], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_are_what_they_are_alone_whatever_stands_behind_them(device, lengths, spare, monkeypatch):
    if device == "cpu":
        ops = SimpleNamespace(
            _scaled_dot_product_cudnn_attention=twin_forward, _scaled_dot_product_cudnn_attention_backward=twin_backward
        )
        monkeypatch.setattr(long_rows, "_aten", ops)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    tokens, more = sum(lengths), long_rows.spare_rows(lengths) if spare else 0
    torch.manual_seed(0)
    joined = torch.randn(tokens + more, H + 2 * K, D, dtype=dtype, device=device)
    grad = torch.randn(tokens, H, D, dtype=dtype, device=device)
    parts = joined.split([H, K, K], 1)
    out, logsum, states = long_rows.attention_forward(*parts, lengths, SCALE)
    assert len(out) == len(joined) and out.is_contiguous()
    found = long_rows.attention_backward(grad, *parts, out, logsum, lengths, SCALE, states)
    start = 0
    for length in lengths:
        row = slice(start, start := start + length)
        leaves = [part[row].double().transpose(0, 1)[None].requires_grad_() for part in parts]
        wanted = causal(*leaves)
        grads = torch.autograd.grad(wanted, leaves, grad[row].double().transpose(0, 1)[None])
        for ours, theirs in zip([out, *found], [wanted, *grads], strict=True):
            exact = theirs[0].transpose(0, 1)
            off = (ours[row].double() - exact).norm() / exact.norm()
            assert off < (1e-12 if device == "cpu" else 1e-2)
    assert all(len(one) == tokens and one.is_contiguous() for one in found)

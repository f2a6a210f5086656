"""Rounding to fp8 by rows, and products of what was rounded: against plain formulas, kernels against emulation."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from triton_tools import draw

from posttrain.kernels import cuda as cuda_kernels
from posttrain.kernels import decode as twin
from posttrain.kernels import fp8 as fp8_kernels
from posttrain.kernels.fp8 import UNSUPPORTED, Fp8Weight, FrozenFp8Weight, product
from posttrain.kernels.quantized import LARGEST, Quantized, round_rows

gpu = pytest.mark.gpu
ROW = torch.tensor([448.0, -416.0, 1.0, 0.4375, 2**-9, 17.3, -0.0])


def test_a_row_whose_scale_is_one_takes_the_nearest_8_bit_floats():
    """Of e4m3: three bits behind the first, down to steps of 2**-9. 17.3 lies between 16 and 18."""
    wanted = torch.tensor([448.0, -416.0, 1.0, 0.4375, 2**-9, 18.0, -0.0])
    assert torch.equal(round_rows(ROW[None])[0], wanted)


def test_every_row_has_its_own_scale_and_keeps_its_largest_number():
    rows = torch.stack([ROW, ROW * 2**-20, ROW * 2**30, torch.zeros(7)])
    found = round_rows(rows)
    assert torch.equal(found[1], found[0] * 2**-20) and torch.equal(found[2], found[0] * 2**30)
    assert torch.equal(found[3], torch.zeros(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_off_by_at_most_a_sixteenth_of_a_number_and_changes_nothing_twice(dtype):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = round_rows(x)
    step = x.float().abs().amax(-1, keepdim=True) / LARGEST * 2**-10  # half of the smallest step of a row
    assert bool(((once - x).float().abs() <= x.float().abs() * 0.0665 + step).all())
    torch.testing.assert_close(round_rows(once), once, rtol=0.01 if dtype is torch.bfloat16 else 1e-6, atol=0)


def test_a_copy_follows_its_weight_when_it_is_refilled_and_keeps_its_address():
    weight, x = torch.randn(32, 48), torch.randn(5, 48)
    copy = Fp8Weight(weight)
    copy.refill()
    first, address = copy.product(x, None), copy.rounded.data_ptr()
    torch.testing.assert_close(first, round_rows(x) @ round_rows(weight).T)
    weight.mul_(2)
    assert torch.equal(copy.product(x, None), first)
    copy.refill()
    assert torch.equal(copy.product(x, None), 2 * first) and copy.rounded.data_ptr() == address


def formulas(x, grad, weight):
    """Written out, in float64: the product of rounded rows, and its input's gradient, which the same weight gives."""
    scales = weight.abs().amax(-1, keepdim=True).double() / LARGEST
    values = (weight.double() / scales).float().to(torch.float8_e4m3fn).double()
    given, back = x.double(), grad.double() * scales.T
    rounded = []
    for rows in (given, back):
        own = rows.abs().amax(-1, keepdim=True) / LARGEST
        rounded.append((rows / own).float().to(torch.float8_e4m3fn).double() * own)
    return rounded[0] @ (values * scales).T, rounded[1] @ values


def test_a_frozen_weight_gives_the_product_and_the_gradient_of_its_input_by_the_same_rounded_numbers():
    x, grad = draw(23, 48, seed=5).cpu(), draw(23, 32).cpu()
    weight = draw(32, 48).cpu() * torch.linspace(0.1, 10, 32)[:, None]
    frozen, (wanted, wanted_grad) = FrozenFp8Weight(weight), formulas(x, grad, weight)
    bias = torch.arange(32.0)
    torch.testing.assert_close(frozen.product(x, bias).double(), wanted + bias, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(frozen.back(grad).double(), wanted_grad, rtol=1e-4, atol=1e-3)
    in_half = FrozenFp8Weight(weight.bfloat16()).back(grad.bfloat16())  # where a width is no multiple of 16
    assert in_half.dtype is torch.bfloat16
    expected = formulas(x, grad.bfloat16(), weight.bfloat16())[1]
    assert float((in_half.double() - expected).norm() / expected.norm()) < 0.01
    for found, plain in ((wanted, x @ weight.T), (wanted_grad, grad @ weight)):
        assert 0.01 < float((found - plain).norm() / plain.norm()) < 0.06
    into = torch.full((25, 32), 7.0)
    frozen.product(x, bias, into[:23])
    assert torch.equal(into[:23], frozen.product(x, bias)) and bool((into[23:] == 7).all())


def test_gradients_of_tiny_losses_are_rounded_as_those_of_large_ones():
    """Means over many tokens: with fewer bits those of likely tokens would become 0."""
    weight, grad = draw(32, 48, seed=6).cpu() * 0.02, draw(23, 32).cpu()
    frozen = FrozenFp8Weight(weight)
    wanted = frozen.back(grad)
    assert float(wanted.norm()) > 0
    for size in (2**-20, 2**-30, 2**-60, 2**-90):
        assert torch.equal(frozen.back(grad * size), wanted * size)
    rows = torch.stack([ROW, ROW * 2**-90, torch.zeros(7)])
    found = round_rows(rows)
    assert torch.equal(found[1], found[0] * 2**-90) and torch.equal(found[2], torch.zeros(7))


class PlainDevice:
    """Rounds as the kernels of a CUDA device do, by the plain formula."""

    @staticmethod
    def quantize_rows(x, into=None, factors_E=None):
        x = x if factors_E is None else x * factors_E
        into, scales = into or Quantized.like(x), x.abs().amax(-1) / LARGEST
        into.values.copy_((x / scales[:, None]).to(torch.float8_e4m3fn))
        into.scales.copy_(scales)
        return into

    @staticmethod
    def takes_few_rows(rows, device):
        return False


@pytest.fixture
def refusing(monkeypatch):
    """(shapes, words): what torch's scaled product was asked for, and with which words it fails each time."""
    shapes, words = [], [UNSUPPORTED]

    def scaled_mm(x, weight, **how):
        shapes.append(weight.shape)
        assert x.dtype is weight.dtype is torch.float8_e4m3fn and weight.stride(0) == 1, "the layout that it needs"
        raise RuntimeError(f"CUDA error: {words[0]} when calling `cublasLtMatmulAlgoGetHeuristic`")

    monkeypatch.setattr(fp8_kernels, "can_multiply", lambda weight: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(cuda_kernels, "fp8", PlainDevice, raising=False)
    monkeypatch.setitem(sys.modules, "posttrain.kernels.cuda.fp8", PlainDevice)
    return shapes, words


def test_sizes_that_the_library_has_no_fp8_product_for_are_multiplied_wide_with_the_same_numbers(refusing):
    x, grad, weight, bias = (draw(*shape).cpu() for shape in ((23, 48), (23, 80), (80, 48), (80,)))
    frozen, (wanted, wanted_grad) = FrozenFp8Weight(weight), formulas(x, grad, weight)
    shapes, words = refusing
    torch.testing.assert_close(frozen.product(x, bias).double(), wanted + bias, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(frozen.back(grad).double(), wanted_grad, rtol=1e-4, atol=1e-4)
    assert shapes == [(48, 80), (80, 48)]
    into = torch.full((25, 80), 7.0)
    frozen.product(x, bias, into[:23])
    assert torch.equal(into[:23], frozen.product(x, bias)) and bool((into[23:] == 7).all())
    words[0] = "out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        frozen.product(x, bias)


def mixture_weights(dtype, experts=6, width=64, size=32):
    torch.manual_seed(3)
    return [
        torch.randn(shape).mul(0.3).to(dtype)
        for shape in ((experts, width), (experts, 2 * size, width), (experts, width, size))
    ]


@torch.no_grad()
def test_experts_read_rounded_inputs_and_weights_and_the_router_the_input_itself():
    router, gate_up, down = mixture_weights(torch.float32)
    x, how = torch.randn(19, 64), {"top_k": 2, "normalised": True, "share_dtype": torch.float32}
    found = twin.mixture(x, router, round_rows(gate_up), round_rows(down), fp8=True, **how)
    share, chosen = (x @ router.T).softmax(-1).topk(2)
    share = share / share.sum(-1, keepdim=True)
    wanted = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(share[token], chosen[token], strict=True):
            gate, up = (round_rows(x[token : token + 1]) @ round_rows(gate_up[expert]).T)[0].chunk(2)
            wanted[token] += weight * (round_rows((F.silu(gate) * up)[None]) @ round_rows(down[expert]).T)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# -- on a CUDA device that multiplies fp8 ---------------------------------------------------------------------------
def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for numbers at the edge between two roundings, which are few."""
    gap = (found.float() - wanted.float()).abs()
    assert float(gap.mean()) < 3e-3 * float(wanted.float().std())
    assert float(gap.max()) < 0.08 * float(wanted.float().abs().max())


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for what the matrix units lose of sums, and two roundings to bfloat16."""
    torch.testing.assert_close(found.float(), wanted, rtol=3e-2, atol=2e-2 * float(wanted.std()))


@gpu
@torch.no_grad()
def test_what_is_not_a_number_stays_so_as_by_the_formula():
    """Clamped as a number it would be an ordinary -448 times the scale, and hide a broken update."""
    from posttrain.kernels.cuda import fp8 as kernels

    x = draw(4, 96).to("cuda", torch.bfloat16)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    found = kernels.quantize_rows(x)
    wanted = (x.float() / found.scales[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
    values = found.values.float()
    assert torch.equal(values.isnan(), wanted.isnan()) and bool(values[1, 5].isnan()) and bool(values[2, 7].isnan())
    torch.testing.assert_close(
        values, wanted, rtol=0.13, atol=0, equal_nan=True
    )  # a rounding may fall to the other side
    gated = kernels.silu_mul(torch.cat([x, torch.ones_like(x)], dim=-1))
    assert bool(gated.values.float()[1, 5].isnan())


def numbers(x: Quantized) -> torch.Tensor:
    return x.values.float() * x.scales[..., None]


@gpu
@pytest.mark.parametrize("size", [48, 1024, 5000])
def test_kernels_round_as_the_emulation(size):
    from posttrain.kernels import decode
    from posttrain.kernels.cuda import fp8

    x = draw(37, size, dtype=torch.bfloat16, seed=1)
    near(numbers(fp8.quantize_rows(x)), round_rows(x))
    near(numbers(fp8.quantize_rows(x * 2.0**-60)) * 2.0**60, round_rows(x))
    added, weight = draw(37, size, dtype=torch.bfloat16), draw(size, dtype=torch.bfloat16)
    sums = x.clone(), x.clone()
    wanted = round_rows(decode.add_rms_norm(sums[0], added, weight, 1e-6))
    near(numbers(fp8.add_rms_norm(sums[1], added, weight, 1e-6)), wanted)
    assert torch.equal(*sums)
    both = draw(37, 2 * size, dtype=torch.bfloat16)
    near(numbers(fp8.silu_mul(both)), round_rows(decode.silu_mul(both)))


@gpu
@pytest.mark.parametrize(("rows", "width", "size"), [(1, 256, 96), (37, 272, 96), (64, 9216, 80), (65, 256, 9600)])
def test_products_are_those_of_the_rounded_numbers(rows, width, size):
    from posttrain.kernels.cuda import fp8

    x, weight, bias = (draw(*shape, dtype=torch.bfloat16) for shape in ((rows, width), (size, width), (size,)))
    given = fp8.quantize_rows(x), fp8.quantize_rows(weight)
    found = product(*given, bias, torch.bfloat16)
    wanted = numbers(given[0]) @ numbers(given[1]).T + bias.float()
    close(found, wanted)


@gpu
@pytest.mark.parametrize(("rows", "width", "size"), [(5, 256, 96), (300, 3584, 4608), (129, 9216, 80)])
def test_a_frozen_weight_gives_products_and_gradients_of_inputs_as_the_emulation(rows, width, size):
    x, grad, weight, bias = (
        draw(*shape, dtype=torch.bfloat16, seed=7) for shape in ((rows, width), (rows, size), (size, width), (size,))
    )
    weight *= torch.linspace(0.1, 10, size, device=weight.device, dtype=weight.dtype)[:, None]
    frozen = FrozenFp8Weight(weight)
    wanted, wanted_grad = (found.float().cuda() for found in formulas(x.cpu(), grad.cpu(), weight.cpu()))
    found, found_grad = frozen.product(x, bias), frozen.back(grad)
    near(found, wanted + bias)
    near(found_grad, wanted_grad)
    into = torch.zeros(rows + 8, size, dtype=torch.bfloat16, device=x.device)
    frozen.product(x, bias, into[:rows])
    assert torch.equal(into[:rows], found) and not into[rows:].any()


@gpu
@pytest.mark.parametrize("tokens", [1, 19, 300, 4000])
def test_experts_in_fp8_multiply_the_rounded_numbers(tokens):
    from posttrain.kernels.cuda import experts, fp8

    router, gate_up, down = (weight.cuda() for weight in mixture_weights(torch.bfloat16, width=256, size=128))
    x, how = draw(tokens, 256, dtype=torch.bfloat16), {"normalised": True, "share_dtype": torch.bfloat16}
    chosen, _ = experts.choose_experts(x @ router.T, 2, **how)
    order, ends = experts.sort_pairs(chosen, len(router))
    tiles = experts.tiles_for(len(order), len(router), torch.float8_e4m3fn)
    given, weights = fp8.quantize_rows(x), (fp8.quantize_rows(gate_up), fp8.quantize_rows(down))
    expert = chosen.view(-1)[order].long()
    found = experts.gate_up_pairs(given, weights[0], order, ends, tiles[0], torch.bfloat16)
    both = torch.einsum("pe,pfe->pf", numbers(given)[order // 2], numbers(weights[0])[expert])
    gate, up = both.chunk(2, -1)
    close(found, F.silu(gate) * up)
    inner = fp8.quantize_rows(found)
    parts = experts.down_pairs(inner, weights[1], order, ends, tiles[1], torch.bfloat16)
    wanted = torch.einsum("pi,pei->pe", numbers(inner), numbers(weights[1])[expert])
    close(parts[order.long()], wanted)


@gpu
def test_a_mixture_in_fp8_is_nearly_the_one_without():
    from posttrain.kernels.cuda import experts, fp8

    weights = [weight.cuda() for weight in mixture_weights(torch.bfloat16, width=256, size=128)]
    x, how = draw(300, 256, dtype=torch.bfloat16), {"top_k": 2, "normalised": True, "share_dtype": torch.bfloat16}
    plain = experts.mixture(x, *weights, **how)
    found = experts.mixture(x, weights[0], *map(fp8.quantize_rows, weights[1:]), fp8=True, **how)
    off = float((found - plain).float().abs().mean() / plain.float().std())
    assert 1e-3 < off < 5e-2

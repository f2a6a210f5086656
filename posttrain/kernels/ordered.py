"""Products and log-probs that sum in one order, whatever else is in the batch: what `trainer.exact` computes with.

A library's matrix product chooses its order of summation by the number of rows, so the last
bits of a token differ between a decode step of a few rows and a packed training pass of thousands. With these functions
they are bitwise identical. All other parts of a layer (norms, rotation, attention, gate) have one order anyway.

Shapes: T tokens, E width of the input, C columns of the output, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from posttrain.kernels import cuda
from posttrain.kernels.compiled import can_compile, kernel, why_not

_meta_is_cpu: ContextVar[bool] = ContextVar("meta_is_cpu", default=False)


@contextmanager
def meta_tensors_as(device: str) -> Iterator[None]:
    """Inside, meta tensors of a memory plan count as tensors of `device`."""
    token = _meta_is_cpu.set(device == "cpu")
    try:
        yield
    finally:
        _meta_is_cpu.reset(token)


def is_for_cpu(tensor: torch.Tensor) -> bool:
    """Whether this is a CPU's tensor, or one of a memory plan for a CPU."""
    return tensor.device.type == "cpu" or (tensor.is_meta and _meta_is_cpu.get())


def why_not_ordered(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why there are no such functions for this type and device; None if there are."""
    wanted = torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype is not wanted:
        kinds = tuple(str(kind).removeprefix("torch.") for kind in (wanted, dtype))
        return f"on {device.type} it is built for {kinds[0]}, and the model computes in {kinds[1]}"
    if device.type == "cuda":
        return None if cuda.has_triton() else "on CUDA it needs Triton, which is not installed"
    problem = why_not()
    return None if problem is None else f"it needs the compiled kernels, which are not used here ({problem})"


def ordered_product(
    x_TE: torch.Tensor,
    weight_CE: torch.Tensor,
    bias_C: torch.Tensor | None = None,
    *,
    into_TC: torch.Tensor | None = None,
    adds: bool = False,
) -> torch.Tensor:
    """x W' + bias, written (or, with `adds`, added) into `into_TC` if given, whose rows may be longer."""
    (tokens, inner), columns = x_TE.shape, len(weight_CE)
    out = x_TE.new_empty(tokens, columns) if into_TC is None else into_TC
    if x_TE.is_meta:  # a memory plan counts the tensors and computes nothing
        return out
    if cuda.runs_here(x_TE):
        return _product_on_cuda(x_TE, weight_CE, bias_C, out, adds)
    function = kernel("ordered_product", x_TE)
    assert function is not None and out.stride(1) == 1
    x_TE, weight_CE = x_TE.contiguous(), weight_CE.contiguous()
    bias = None if bias_C is None else bias_C.data_ptr()
    pointers = (x_TE.data_ptr(), weight_CE.data_ptr(), bias, out.data_ptr())
    # Waking other threads takes longer than a small product.
    threads = torch.get_num_threads() if tokens * inner * columns > 2**18 else 1
    function(*pointers, out.stride(0), tokens, inner, columns, adds, threads)
    return out


def _product_on_cuda(x_TE, weight_CE, bias_C, out_TC: torch.Tensor, adds: bool) -> torch.Tensor:
    from posttrain.kernels.cuda.ordered import product

    # Rounded before anything is added, since decode steps add to the residual after their products.
    found = torch.empty_like(out_TC) if adds else out_TC
    product(x_TE, weight_CE, found)
    if bias_C is not None:
        found.add_(bias_C)
    return out_TC.add_(found) if adds else found


def token_log_probs(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """(log-probs of the labels as sampling computes them, entropies, log-sum-exps of logits / temperature), each (T,)
    in float32; None if there is no compiled kernel for these logits (`cuda/ordered.py` has one for CUDA)."""
    if logits_TV.is_meta and is_for_cpu(logits_TV) and can_compile(logits_TV.dtype):
        return tuple(torch.empty(len(logits_TV), device=logits_TV.device) for _ in range(3))  # pyright: ignore
    function = kernel("token_log_probs", logits_TV)
    if function is None:
        return None
    logits_TV, labels_T = logits_TV.contiguous(), labels_T.contiguous()
    found = tuple(torch.empty(len(logits_TV), dtype=torch.float32) for _ in range(3))
    threads = torch.get_num_threads() if logits_TV.numel() > 16384 else 1
    pointers = (tensor.data_ptr() for tensor in found)
    function(logits_TV.data_ptr(), labels_T.data_ptr(), temperature, *pointers, *logits_TV.shape, threads)
    return found  # pyright: ignore


ENOUGH = 64  # rows and columns: smaller products are not given to oneDNN


def fix_product_library() -> None:
    """Make the first bfloat16 product of the process now. If it fails, BLAS is used from here on, which is as fast.

    torch gives products to oneDNN until the first one in bfloat16 on a processor without such instructions (older ARM)
    fails; from then on, for the rest of the process and for float32 too, it takes its BLAS, whose last bits differ. So
    what a run computes would depend on what the process did before it.
    """
    ones = torch.ones(ENOUGH, ENOUGH, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a page of C++ frames
        torch.nn.functional.linear(ones, ones, ones[0])

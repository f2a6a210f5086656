"""The feed-forward part of a mixture of experts: Triton kernels on a CUDA device (`cuda/experts.py`), torch
elsewhere. Both round where transformers rounds.

Shapes: T tokens, E width of the model, X experts, K experts of a token, P = T K pairs of a token and an expert, I width
of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from posttrain.kernels import cuda
from posttrain.kernels.decode import silu_mul
from posttrain.kernels.quantized import Quantized, round_rows


def mixture(
    x_TE: torch.Tensor,
    router_XE: torch.Tensor,
    gate_up_X2IE: torch.Tensor | Quantized,
    down_XEI: torch.Tensor | Quantized,
    *,
    top_k: int,
    normalised: bool,
    share_dtype: torch.dtype,
    fp8: bool = False,
) -> torch.Tensor:
    """What the `top_k` experts of a token give, by their shares, (T, E). A share is the softmax over all experts in
    float32, `normalised` over those that were chosen, as a number of `share_dtype`. With `fp8` both weights are rounded
    to fp8 by rows, and so are the inputs of their products; the router reads the input itself."""
    if cuda.runs_here(x_TE):
        from posttrain.kernels.cuda import experts

        given = (x_TE, router_XE, gate_up_X2IE, down_XEI)
        return experts.mixture(*given, top_k=top_k, normalised=normalised, share_dtype=share_dtype, fp8=fp8)
    assert isinstance(gate_up_X2IE, torch.Tensor) and isinstance(down_XEI, torch.Tensor)
    rounded = round_rows if fp8 else _as_it_is
    p_TX = F.linear(x_TE, router_XE).softmax(-1, dtype=torch.float32)
    share_TK, chosen_TK = p_TX.topk(top_k)
    if normalised:
        share_TK = share_TK / share_TK.sum(-1, keepdim=True)
    # Pairs in the order of their experts, so that each expert's tokens are one product.
    order_P = chosen_TK.view(-1).argsort(stable=True)
    counts = torch.bincount(chosen_TK.view(-1), minlength=len(router_XE)).tolist()
    parts_PE = x_TE.new_empty(len(order_P), x_TE.shape[1])
    for expert, pairs in enumerate(order_P.split(counts)):
        if len(pairs):
            gated = silu_mul(F.linear(rounded(x_TE[pairs // top_k]), gate_up_X2IE[expert]))
            parts_PE[pairs] = F.linear(rounded(gated), down_XEI[expert])
    return (parts_PE.view(-1, top_k, x_TE.shape[1]) * share_TK.to(share_dtype)[..., None]).sum(1).to(x_TE.dtype)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x

"""RMS norms of transformers' modules by one kernel each, in paged steps on a CUDA device.

transformers computes a norm in seven kernels. A decode step of Gemma-2 has 105 norms, which took a fifth of its time
with 512 sequences on an H200. Rounding is that of the module: some round the normalised row before the weight.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from posttrain.kernels import cuda
from posttrain.models.paged_step import active_step

# By class: whether the weight counts from -1, and whether the row is rounded before it is multiplied with the weight.
_KINDS = {
    "DeepseekV2RMSNorm": (False, True),
    "DeepseekV3RMSNorm": (False, True),
    "Glm4MoeRMSNorm": (False, True),
    "GptOssRMSNorm": (False, False),
    "Gemma2RMSNorm": (True, False),
    "Gemma3RMSNorm": (True, False),
}


def _kind(norm: torch.nn.Module) -> tuple[bool, bool] | None:
    return _KINDS.get(type(norm).__name__.removeprefix("FSDP"))


def watch_norms(module: torch.nn.Module, *, on: bool) -> None:
    """Let norms of known kinds be computed by our kernel in paged steps, or by transformers."""
    for norm in module.modules():
        if _kind(norm) is not None:
            vars(norm).pop("forward", None)
            if on:
                norm.forward = types.MethodType(_forward, norm)


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    kind = _kind(self)
    if kind is None or active_step() is None or not cuda.runs_here(x):
        return type(self).forward(self, x)
    from posttrain.kernels.cuda.elementwise import rms_norm

    flat = x.reshape(-1, x.shape[-1])
    epsilon = self.eps if hasattr(self, "eps") else self.variance_epsilon
    shifted, rounded = kind
    rows = flat if flat.stride(1) == 1 else flat.contiguous()
    return rms_norm(rows, self.weight, epsilon, shifted=shifted, rounded=rounded).view(x.shape)

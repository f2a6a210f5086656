"""RMS norms in one fused call, and in the model's own precision.

transformers writes the norm as several passes and always through float32, which costs time in float32 and throws
away half the digits of a float64 model. The fused form computes the same thing; bfloat16 models keep theirs.
"""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F

PLAIN_RMS_NORMS = {"Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm", "MistralRMSNorm", "Qwen3MoeRMSNorm"}


def _fused(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)  # pyright: ignore


def fuse_norms(model: torch.nn.Module) -> None:
    """Give every plain RMS norm of a float32 or float64 model the fused forward pass."""
    for module in model.modules():
        if type(module).__name__ in PLAIN_RMS_NORMS and module.weight.dtype in (torch.float32, torch.float64):
            module.forward = types.MethodType(_fused, module)

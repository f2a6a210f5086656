"""Experts and norms of transformers' modules by our kernels, in paged steps on a CUDA device.

transformers' own ways loop over experts, and wait for the device to know which have tokens, or copy tokens in the order
of their experts. Here nothing waits (`kernels/cuda/experts.py`), so that a step can be captured. The routers of
DeepSeek and GLM-4-MoE are one kernel after their product (`kernels/cuda/routers.py`), others the module's own.

transformers computes an RMS norm in seven kernels, here it is one. A decode step of Gemma-2 has 105 norms, which took a
fifth of its time with 512 sequences on an H200. Rounding is that of the module: some round the normalised row before
the weight.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.kernels import cuda
from posttrain.models.attention import active_step
from posttrain.models.routing import outnumber_best_groups, routers_of, watch_routers

_FUSED_ROUTERS = ("DeepseekV2TopkRouter", "DeepseekV3TopkRouter", "Glm4MoeTopkRouter")


def _is_plain(experts: Any) -> bool:
    # silu(gate) * up, with the weights of all experts stacked as (experts, 2 x size, width).
    layout = [getattr(experts, name, None) for name in ("has_gate", "is_concatenated", "has_bias", "is_transposed")]
    silu = type(getattr(experts, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return layout == [True, True, False, False] and silu and type(experts)._apply_gate.__name__ == "_default_apply_gate"


def _is_clamped(experts: Any) -> bool:
    # gpt-oss: clamped, with biases, gate and up interleaved, the input of a product first.
    return type(experts).__name__.removeprefix("FSDP") == "GptOssExperts"


def watch_experts(module: torch.nn.Module, *, on: bool) -> None:
    """Let experts of known kinds be computed by our kernels in paged steps, or by transformers."""
    for experts in module.modules():
        if hasattr(experts, "gate_up_proj") and hasattr(experts, "down_proj") and hasattr(experts, "has_gate"):
            weights = (experts.gate_up_proj, experts.down_proj)
            are_whole = all(type(weight) is torch.nn.Parameter for weight in weights)
            does_more = getattr(experts, "has_post_expert_norm", False)
            is_shared_out = getattr(experts, "_is_expert_parallel", False)
            known = _is_plain(experts) or _is_clamped(experts)
            if known and are_whole and not (does_more or is_shared_out):
                vars(experts).pop("forward", None)
                if on:
                    experts.forward = types.MethodType(_forward, experts)

    for router in routers_of(module):
        vars(router).pop("fused_choice", None)
        if on and type(router).__name__.removeprefix("FSDP") in _FUSED_ROUTERS:
            router.fused_choice = types.MethodType(_choose, router)
    if on:
        watch_routers(module)


def _choose(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if active_step() is None or not cuda.runs_here(hidden_states):
        return None
    sigmoid = not hasattr(self, "topk_method")  # DeepSeek-V2 has a softmax, never normalises, and may have no groups
    grouped = sigmoid or self.topk_method == "group_limited_greedy"
    if outnumber_best_groups(self):
        return None  # the kernel would choose one of them twice
    from posttrain.kernels.cuda.routers import Choice, choose_scored

    choice = Choice(
        self.top_k,
        sigmoid=sigmoid,
        normalised=sigmoid and self.norm_topk_prob,
        factor=self.routed_scaling_factor,
        bias_X=self.e_score_correction_bias if sigmoid else None,
        groups=self.num_group if grouped else 1,
        best=self.topk_group if grouped else 1,
    )
    hidden_TE = hidden_states.reshape(-1, self.hidden_dim)
    logits_TX = F.linear(hidden_TE.float(), self.weight.float())
    chosen_TK, share_TK = choose_scored(logits_TX, choice)
    return logits_TX, share_TK, chosen_TK


def _forward(self: Any, hidden_states: torch.Tensor, chosen_TK: torch.Tensor, share_TK: torch.Tensor) -> torch.Tensor:
    if active_step() is None or not cuda.runs_here(hidden_states):
        return type(self).forward(self, hidden_states, chosen_TK, share_TK)
    from posttrain.kernels.cuda import experts

    weights = (self.gate_up_proj, self.down_proj)
    if not _is_clamped(self):
        return experts.expert_sum(hidden_states, chosen_TK, share_TK, *weights)
    from posttrain.kernels.cuda.clamped_experts import clamped_expert_sum

    biases = (self.gate_up_proj_bias, self.down_proj_bias)
    how = {"alpha": self.alpha, "limit": self.limit}
    return clamped_expert_sum(hidden_states, chosen_TK, share_TK, *weights, *biases, **how)


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
                norm.forward = types.MethodType(_norm, norm)


def _norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    kind = _kind(self)
    if kind is None or active_step() is None or not cuda.runs_here(x):
        return type(self).forward(self, x)
    from posttrain.kernels.cuda.elementwise import rms_norm

    flat = x.reshape(-1, x.shape[-1])
    epsilon = self.eps if hasattr(self, "eps") else self.variance_epsilon
    shifted, rounded = kind
    rows = flat if flat.stride(1) == 1 else flat.contiguous()
    return rms_norm(rows, self.weight, epsilon, shifted=shifted, rounded=rounded).view(x.shape)

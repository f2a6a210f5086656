"""LoRA adapters of experts that a model stacks in one tensor: y = x W' + s (x A') B', each expert with its A and B.

peft holds them in a `ParamWrapper` around the module of the experts, whose forward pass adds B A to the weights of all
experts. Here tokens are put in the order of their experts, and are multiplied with A and B instead: two narrow products
beside each wide one, and nothing of the weights' size is made. The base's own gate, biases and layout are kept, so the
same code serves every kind of stacked experts. Training and rollout share it.

Shapes: T tokens, K experts of a token, P = T K pairs in the order of their experts, X experts, R rank, I inputs of a
product, O its outputs, E width of the model.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.errors import UserError

WEIGHTS = ("gate_up_proj", "down_proj")  # in the order in which tokens pass through them
_ALIGNED = 8  # grouped products on CUDA take strides of multiples of 16 bytes
_BASE = re.compile(r"\.base_layer(?=\.)")


def base_name(name: str) -> str:
    """The Hugging Face name of a weight inside peft's wrappers, of which stacked experts may have several."""
    return _BASE.sub("", name)


def is_wrapper(module: Any) -> bool:
    """Whether this is peft's holder of the adapters of one stacked weight."""
    return type(module).__name__.removeprefix("FSDP") == "ParamWrapper"


def wrappers(module: Any) -> Iterator[Any]:
    """peft's wrappers around experts, from the outermost on."""
    while is_wrapper(module):
        yield module
        module = module.base_layer


def plain_experts(module: Any) -> Any:
    """The experts inside their adapters."""
    return [module, *(wrapper.base_layer for wrapper in wrappers(module))][-1]


def can_adapt(module: Any) -> bool:
    """Whether these are stacked experts whose products are computed here: gated, and whole on this rank."""
    weights = [getattr(module, name, None) for name in WEIGHTS]
    stacked = all(isinstance(weight, torch.nn.Parameter) and weight.ndim == 3 for weight in weights)
    known = getattr(module, "has_gate", False) and hasattr(module, "_apply_gate")
    return stacked and known and not getattr(module, "_is_expert_parallel", False)


def expert_weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The stacked weights that can have adapters, under their Hugging Face names in the model."""
    return {
        base_name(f"{name}.{own}"): getattr(module, own)
        for name, module in model.named_modules()
        if can_adapt(module)
        for own in WEIGHTS
    }


def adapted_weights(model: torch.nn.Module) -> set[str]:
    """The names of those that have adapters."""
    found = (base_name(f"{name}.{part.parameter_name}") for name, part in model.named_modules() if is_wrapper(part))
    return {name.removeprefix("base_model.model.") for name in found}


@dataclass(frozen=True)
class ExpertAdapter:
    """The adapter of one stacked weight, as peft holds it: A of all experts end to end (X R, I), and B (O, R X), in
    which the columns of one rank are those of all experts."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    experts: int

    @classmethod
    def of(cls, wrapper: Any) -> ExpertAdapter:
        a, b = (part["default"].weight for part in (wrapper.lora_A, wrapper.lora_B))
        return cls(a, b, float(wrapper.scaling["default"]), wrapper.num_experts)

    def factors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A (X, R, I) and s B (X, O, R) in this type."""
        a_XRI = self.a.to(dtype).view(self.experts, -1, self.a.shape[1])
        b_ORX = self.b.to(dtype).view(len(self.b), -1, self.experts)
        return a_XRI, (b_ORX.permute(2, 0, 1) * self.scale).contiguous()


class Groups:
    """Pairs of a token and an expert, in the order of their experts."""

    def __init__(self, chosen_TK: torch.Tensor, experts: int) -> None:
        flat_P = chosen_TK.reshape(-1)
        self.picked, self.experts = chosen_TK.shape[1], experts
        self.order_P = flat_P.argsort(stable=True)
        self.expert_P = flat_P[self.order_P]
        # By search, because counting waits for the device.
        numbers_X = torch.arange(experts, device=flat_P.device, dtype=flat_P.dtype)
        self.ends_X = torch.searchsorted(self.expert_P, numbers_X, right=True, out_int32=True)
        self.parts = list(self._parts()) if flat_P.device.type == "cpu" else []

    def _parts(self) -> Iterator[tuple[int, slice]]:
        start = 0
        for expert, end in enumerate(self.ends_X.tolist()):
            if end > start:
                yield expert, slice(start, end)
            start = end

    def tokens(self, x_TE: torch.Tensor) -> torch.Tensor:
        """The inputs of all pairs."""
        return x_TE[self.order_P // self.picked]

    def summed(self, y_PE: torch.Tensor, share_TK: torch.Tensor) -> torch.Tensor:
        """The outputs of a token's experts by their shares; the sum is of fixed order, and so does not change."""
        weighted_PE = y_PE * share_TK.reshape(-1)[self.order_P, None]
        back_P = torch.empty_like(self.order_P)
        back_P[self.order_P] = torch.arange(len(back_P), device=back_P.device)
        return weighted_PE[back_P].view(-1, self.picked, y_PE.shape[1]).sum(1)


class _Product(torch.autograd.Function):
    """x W' + (x A') B' on a CPU, expert by expert, with a frozen W."""

    @staticmethod
    def forward(ctx, x_PI, weight_XOI, a_XRI, b_XOR, groups: Groups):
        y_PO, low_PR = x_PI.new_empty(len(x_PI), weight_XOI.shape[1]), x_PI.new_empty(len(x_PI), a_XRI.shape[1])
        for expert, rows in groups.parts:
            torch.mm(x_PI[rows], weight_XOI[expert].T, out=y_PO[rows])
            torch.mm(x_PI[rows], a_XRI[expert].T, out=low_PR[rows])
            y_PO[rows].addmm_(low_PR[rows], b_XOR[expert].T)
        ctx.save_for_backward(x_PI, low_PR, weight_XOI, a_XRI, b_XOR)
        ctx.groups = groups
        return y_PO

    @staticmethod
    def backward(ctx, grad_PO):  # pyright: ignore[reportIncompatibleMethodOverride]
        x_PI, low_PR, weight_XOI, a_XRI, b_XOR = ctx.saved_tensors
        grad_PO = grad_PO.contiguous()
        grad_x, grad_low = torch.empty_like(x_PI), torch.empty_like(low_PR)
        grad_a, grad_b = torch.zeros_like(a_XRI), torch.zeros_like(b_XOR)
        for expert, rows in ctx.groups.parts:
            torch.mm(grad_PO[rows], b_XOR[expert], out=grad_low[rows])
            torch.mm(grad_low[rows].T, x_PI[rows], out=grad_a[expert])
            torch.mm(grad_PO[rows].T, low_PR[rows], out=grad_b[expert])
            torch.mm(grad_PO[rows], weight_XOI[expert], out=grad_x[rows])
            grad_x[rows].addmm_(grad_low[rows], a_XRI[expert])
        return grad_x, None, grad_a, grad_b, None


def _by_loop(x: torch.Tensor) -> bool:
    return x.device.type == "cpu"


def _product(x_PI: torch.Tensor, weight_XOI: torch.Tensor, adapter: ExpertAdapter | None, groups: Groups):
    factors = None if adapter is None else adapter.factors(x_PI.dtype)
    if _by_loop(x_PI):
        if factors is None:
            experts, outputs, inputs = weight_XOI.shape
            factors = x_PI.new_zeros(experts, 0, inputs), x_PI.new_zeros(experts, outputs, 0)
        return _Product.apply(x_PI, weight_XOI, *factors, groups)  # pyright: ignore
    y_PO = _grouped(x_PI, weight_XOI, groups)
    if factors is None:
        return y_PO
    a_XRI, b_XOR = factors
    if fill := -a_XRI.shape[1] % _ALIGNED:
        a_XRI, b_XOR = F.pad(a_XRI, (0, 0, 0, fill)), F.pad(b_XOR, (0, fill))
    return y_PO + _grouped(_grouped(x_PI, a_XRI, groups), b_XOR, groups)


def _grouped(x_PI: torch.Tensor, weight_XOI: torch.Tensor, groups: Groups) -> torch.Tensor:
    if x_PI.is_meta:  # a memory plan: grouped products know no float32 there, and one expert's has the same shapes
        return x_PI @ weight_XOI[0].T
    return F.grouped_mm(x_PI, weight_XOI.transpose(1, 2), offs=groups.ends_X)


_PROOF = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 2e-2}  # of the largest number: float32 may be TF32


@cache
def _prove(device: torch.device, dtype: torch.dtype, rank: int) -> None:
    """Raise unless grouped products of this device, and their gradients, are those of the loop on a CPU.

    Fresh adapters add nothing, so that comparing a new model with transformers would not notice.
    """
    random = torch.Generator().manual_seed(0)
    sizes = {"x": (24, 64), "w": (4, 128, 64), "a": (4 * rank, 64), "b": (128, rank * 4), "g": (24, 128)}
    given = {name: (torch.randn(size, generator=random) / 8).to(dtype) for name, size in sizes.items()}
    chosen = torch.randint(0, 3, (24, 1), generator=random)  # the last expert has no tokens

    def compute(place: torch.device) -> list[torch.Tensor]:
        x, w, a, b, g = (part.to(place) for part in given.values())
        leaves = [part.detach().requires_grad_() for part in (x, a, b)]
        groups = Groups(chosen.to(place), 4)
        y = _product(leaves[0], w, ExpertAdapter(leaves[1], leaves[2], 2.0, 4), groups)
        return [part.detach().cpu().float() for part in (y, *torch.autograd.grad(y, leaves, g))]

    with torch.inference_mode(False), torch.enable_grad():
        found, expected = compute(device), compute(torch.device("cpu"))
    for ours, theirs in zip(found, expected, strict=True):
        if not float((ours - theirs).abs().max()) <= _PROOF.get(dtype, 1e-2) * float(theirs.abs().max()):
            raise UserError(
                f"model.target_modules: adapters of experts are not computed right on {device} in {dtype}: torch's "
                "grouped products differ from those on a CPU. Leave the experts out"
            )


class AdaptedExperts:
    """Experts with the adapters of some of their weights; both are read anew at every call."""

    def __init__(self, module: Any) -> None:
        self.base = plain_experts(module)
        self.wrappers = {wrapper.parameter_name: wrapper for wrapper in wrappers(module)}

    def __call__(self, x_TE: torch.Tensor, chosen_TK: torch.Tensor, share_TK: torch.Tensor) -> torch.Tensor:
        """What the chosen experts of each token give, by their shares."""
        if x_TE.is_cuda:
            for wrapper in self.wrappers.values():
                _prove(x_TE.device, x_TE.dtype, wrapper.r["default"])
        groups = Groups(chosen_TK, self.base.num_experts)
        both_PO = self._through("gate_up_proj", groups.tokens(x_TE), groups)
        y_PE = self._through("down_proj", self.base._apply_gate(both_PO), groups)
        if getattr(self.base, "has_post_expert_norm", False):
            y_PE = self.base.post_expert_norm(y_PE)
        return groups.summed(y_PE, share_TK).to(x_TE.dtype)

    def _through(self, name: str, x_PI: torch.Tensor, groups: Groups) -> torch.Tensor:
        weight, wrapper = getattr(self.base, name), self.wrappers.get(name)
        weight_XOI = weight.transpose(1, 2) if self.base.is_transposed else weight
        adapter = None if wrapper is None else ExpertAdapter.of(wrapper)
        y_PO = _product(x_PI, weight_XOI, adapter, groups)
        return y_PO + getattr(self.base, f"{name}_bias")[groups.expert_P] if self.base.has_bias else y_PO


def multiply_low_rank(model: torch.nn.Module) -> None:
    """Let experts with adapters be computed here instead of by peft."""
    inner = {id(module.base_layer) for module in model.modules() if is_wrapper(module)}
    for module in model.modules():
        if is_wrapper(module) and id(module) not in inner:
            module.forward = types.MethodType(_forward, module)


def _forward(self: Any, hidden_states: torch.Tensor, chosen_TK: torch.Tensor, share_TK: torch.Tensor) -> torch.Tensor:
    if self.disable_adapters or self.merged:
        return plain_experts(self)(hidden_states, chosen_TK, share_TK)
    return AdaptedExperts(self)(hidden_states, chosen_TK, share_TK)

"""LoRA on this rank's matrices: the adapters that peft made on the Hugging Face model, cut as the matrices are.

Where tensor ranks hold rows of a matrix (columns of its output), they all have `lora_A` whole and cut `lora_B`; where
they hold columns, they cut `lora_A` and have `lora_B` whole. What passes between ranks is as narrow as the adapter.
With sequence parallelism, whole adapters see this rank's stretch of the tokens, and the optimizer adds up their
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from posttrain.engine.megatron.groups import RankGroups
from posttrain.engine.megatron.package import MegatronError, part
from posttrain.engine.megatron.weights import Match
from posttrain.engine.settings import EngineKeys
from posttrain.models.expert_adapters import base_name, is_wrapper
from posttrain.models.forward import without_adapters

NAME = "adapters"
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Matrices that are read row by row, or by a head of our own: an adapter would have no effect there."""


def scalings_of(module: torch.nn.Module) -> dict[str, float]:
    """By the names of a model's adapted matrices: what their adapters are multiplied with."""
    from peft.tuners.lora import LoraLayer

    layers = [part for part in without_adapters(module).named_modules() if isinstance(part[1], LoraLayer)]
    # A stacked weight is named itself; `check_adapters` rejects it.
    names = [base_name(f"{name}.{part.parameter_name}") if is_wrapper(part) else name for name, part in layers]
    return {name: part.scaling["default"] for name, (_, part) in zip(names, layers, strict=True)}  # pyright: ignore


def adapter_matches(matches: Sequence[Match], adapted: Mapping[str, float]) -> list[Match]:
    """The adapters of these weights: this rank's names, and peft's."""
    found = []
    for match in matches:
        for number, name in enumerate(match.theirs):
            linear = name.removesuffix(".weight")
            if linear in adapted:
                kinds = ("columns", "same") if match.kind == "columns" else ("same", "rows")
                if match.kind == "same":
                    kinds = "same", "same"
                ours = f"{match.ours[0].removesuffix('.weight')}.{NAME}"
                for letter, kind in zip("AB", kinds, strict=True):
                    theirs = f"{linear}.lora_{letter}.default.weight"
                    found.append(Match((f"{ours}.lora_{letter}.{number}",), (theirs,), kind))
    return found


def check_adapters(matches: Sequence[Match], adapted: Mapping[str, float], keys: EngineKeys) -> None:
    """Rejects adapters on matrices that are not built for them; `matches` are those of all stages."""
    able = {
        name for match in matches if match.ours[0] not in TABLES and match.kind != "experts" for name in match.theirs
    }
    if odd := sorted(name for name in adapted if f"{name}.weight" not in able):
        raise MegatronError(
            f"{keys.model}.target_modules: adapters on {', '.join(odd[:4])} are not built for the engine megatron; "
            f"leave them out, or set {keys.strategy}=fsdp2"
        )


class Adapters(torch.nn.Module):
    """Adapters of one matrix of this rank, which may hold several of the Hugging Face model (queries, keys, values)."""

    def __init__(
        self,
        match: Match,
        adapted: Mapping[str, float],
        whole: Mapping[str, torch.Tensor],
        key_heads: int,
        group: dist.ProcessGroup,
        device: torch.device,
        sequence: bool,
    ) -> None:
        super().__init__()
        self.kind, self.group, self.enabled = match.kind, group, True
        linears = [name.removesuffix(".weight") for name in match.theirs]
        ranks = group.size()
        self.sizes = [len(whole[name]) // ranks for name in match.theirs]
        self.key_heads = key_heads // ranks
        self.scaling = {str(number): adapted[name] for number, name in enumerate(linears) if name in adapted}
        self.lora_A, self.lora_B = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        cut_A, cut_B = (ranks, 1) if match.kind == "columns" else (1, 1 if match.kind == "same" else ranks)
        for number in self.scaling:
            first, second = (whole[f"{linears[int(number)]}.lora_{letter}.default.weight"] for letter in "AB")
            shapes = (len(first), first.shape[1] // cut_A), (len(second) // cut_B, second.shape[1])
            made = {"dtype": first.dtype, "device": device}
            self.lora_A[number], self.lora_B[number] = (
                torch.nn.Parameter(torch.empty(shape, **made)) for shape in shapes
            )
        region = part("tensor_parallel.mappings")
        self.added, self.copied = (
            (region.reduce_scatter_to_sequence_parallel_region, region.gather_from_sequence_parallel_region)
            if sequence
            else (region.reduce_from_tensor_model_parallel_region, region.copy_to_tensor_model_parallel_region)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the adapters add to the matrix's output of this rank."""
        parts = {}
        for number, scaling in self.scaling.items():
            first = self.lora_A[number]
            low = torch.nn.functional.linear(x.to(first.dtype), first)
            if self.kind == "columns":
                low = self.added(low, group=self.group)
            elif self.kind != "same":
                # Each rank's columns give a part of its gradient, which are added up on the way back.
                low = self.copied(low, group=self.group)
            parts[int(number)] = torch.nn.functional.linear(low, self.lora_B[number]) * scaling
        if len(self.sizes) == 1:
            return parts[0]
        like = next(iter(parts.values()))
        each = [parts.get(n, like.new_zeros(1).expand(*like.shape[:-1], size)) for n, size in enumerate(self.sizes)]
        if self.kind == "qkv":  # group by group, as the matrix has them
            return torch.cat([one.unflatten(-1, (self.key_heads, -1)) for one in each], -1).flatten(-2)
        return torch.cat(each, -1)

    def add_to_output(self, module: torch.nn.Module, given: Any, output: Any) -> Any:
        """A forward hook of the matrix, which keeps the names of its own weights."""
        if not self.enabled:
            return output
        out = output[0] if isinstance(output, tuple) else output
        out = out + self(given[0]).to(out.dtype)
        return (out, *output[1:]) if isinstance(output, tuple) else out


def adapt(
    own: torch.nn.Module,
    matches: Sequence[Match],
    adapted: Mapping[str, float],
    whole: Mapping[str, torch.Tensor],
    key_heads: int,
    groups: RankGroups,
    device: torch.device,
) -> None:
    """Give this rank's matrices their adapters, with weights that are not set. `whole` are all of the model's."""
    for match in matches:
        if any(name.removesuffix(".weight") in adapted for name in match.theirs):
            matrix = own.get_submodule(match.ours[0].removesuffix(".weight"))
            adapters = Adapters(match, adapted, whole, key_heads, groups.tensor, device, groups.sizes.sequence)
            matrix.add_module(NAME, adapters)
            matrix.register_forward_hook(adapters.add_to_output)


@contextmanager
def adapters_off(own: torch.nn.Module) -> Iterator[None]:
    """Inside, the base computes alone."""
    found = [module for module in own.modules() if isinstance(module, Adapters)]
    for adapters in found:
        adapters.enabled = False
    try:
        yield
    finally:
        for adapters in found:
            adapters.enabled = True

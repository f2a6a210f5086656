"""LoRA adapters beside the base inside vLLM: a sync replaces the adapters alone, and the base stays as it was loaded.

Folding adapters into the base would copy every weight at each sync, and round a small update away in bfloat16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from posttrain.models.adapter_files import adapter_parameters, adapter_settings, write_adapter
from posttrain.models.expert_adapters import base_name
from posttrain.rollout.outside import Weights
from posttrain.rollout.vllm.inside import can_hold_adapters

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for; it takes any adapter of at most that rank."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def has_experts(config: Any) -> bool:
    return any(getattr(config.get_text_config(), name, None) for name in _EXPERTS)


def adapted_layers(module: Any) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [part for part in module.modules() if isinstance(part, LoraLayer)]


def why_folded(module: Any, kind: str) -> str | None:
    """Why vLLM cannot compute these adapters beside the base; None where it can."""
    base = module.get_base_model()
    if getattr(base, "is_quantized", False):
        return "the base is quantised"
    if has_experts(base.config):
        return "the model is a mixture of experts"
    if base.get_output_embeddings() in adapted_layers(module):
        return "the head has an adapter"
    if largest_rank(module) > RANKS[-1]:
        return f"their rank is above {RANKS[-1]}"
    if not can_hold_adapters(kind):
        return f"this version of vLLM cannot load {kind} with adapters beside it"
    return None


def largest_rank(module: Any) -> int:
    return max(part.r["default"] for part in adapted_layers(module))


def base_and_adapters(module: Any) -> Weights:
    """The base under its Hugging Face names, then the adapters under their names in an adapter file."""
    for name, weight in module.get_base_model().state_dict().items():
        if ".lora_" not in name:
            yield base_name(name), weight
    yield from adapter_parameters(module).items()


class HeldAdapters:
    """The adapters that an engine computes with. `settings` are the content of their `adapter_config.json`."""

    def __init__(self, llm: Any, settings: Mapping[str, Any]) -> None:
        self.llm, self.settings = llm, settings
        self.weights: dict[str, torch.Tensor] = {}
        self.changed = False
        self._folder = tempfile.TemporaryDirectory(prefix="posttrain-adapters-")

    @classmethod
    def of(cls, llm: Any, module: Any) -> HeldAdapters:
        return cls(llm, adapter_settings(module, ""))

    def request(self, *, replace: bool = False) -> Any:
        """What a request to vLLM names its adapters by; with `replace` vLLM reads their files again."""
        from vllm.lora.request import LoRARequest  # pyright: ignore

        return LoRARequest("policy", 1, self._folder.name, load_inplace=replace)

    def take_from(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Keep the adapters among these weights, and give the others."""
        for name, weight in weights:
            if ".lora_" in name:
                # A copy: the trainer's own tensor changes with its next update, and a sync may come in several parts.
                self.weights[name], self.changed = weight.detach().to("cpu", copy=True), True
            else:
                yield name, weight

    def renew(self) -> None:
        """Have vLLM compute with what arrived last."""
        if not self.changed:
            return
        # vLLM takes adapters from files only. A folder of one's own, so that ranks of a machine do not meet in it.
        write_adapter(Path(self._folder.name), self.weights, self.settings)
        if not self.llm.add_lora(self.request(replace=True)):
            raise RuntimeError("vLLM did not load the adapters of a weight sync")
        self.changed = False

    def forget(self) -> None:
        """The memory in which vLLM held them was given back."""
        self.changed = True

    def close(self) -> None:
        self._folder.cleanup()

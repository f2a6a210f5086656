"""Decides which modules get LoRA adapters: resolves `all-linear`, names or a regular expression for one model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from posttrain.errors import UserError
from posttrain.models.quantized import numbers_in


class AdapterShape(Protocol):
    """The adapter settings of a role: the section `model` of a policy, or the critic's."""

    lora_rank: int
    lora_alpha: int
    target_modules: Any
    exclude_modules: Any


class AdapterError(UserError):
    """Adapters that cannot be created or loaded; the text says what to do."""


def find_targets(
    model: torch.nn.Module,
    wanted: Any,
    exclude: Any = None,
    *,
    whole: Sequence[str] = (),
    key: str = "target_modules",
) -> list[str]:
    """Return module names for peft: short ones (`q_proj`) if they mean exactly the requested modules, else full ones.

    Top modules named in `whole` are fully trained and get no adapters.
    """
    linear = linear_modules(model)
    chosen = [name for name in _choose_modules(model, linear, wanted, key) if name.partition(".")[0] not in whole]
    if exclude:
        unwanted = set(_matches(list(chosen), exclude, model, key.replace("target_", "exclude_")))
        chosen = [name for name in chosen if name not in unwanted]
    chosen = _without_taken_for_experts(model, chosen, wanted, key)
    if not chosen:
        raise AdapterError(
            f"{key}={wanted} without {exclude or list(whole)} leaves no module for an adapter. {_list_modules(linear)}"
        )
    short = sorted({name.rpartition(".")[2] for name in chosen})
    meant = {name for name, _ in model.named_modules() for end in short if _has_suffix(name, end)}
    return short if meant == set(chosen) else chosen


def _without_taken_for_experts(model: Any, chosen: list[str], wanted: Any, key: str) -> list[str]:
    """Without the dense and shared layers of mixtures such as DeepSeek-V3 whose names the experts once had: there peft
    adapts the stacked experts instead, which neither a merged model nor a rollout engine takes."""
    taken = {end for end in {name.rpartition(".")[2] for name in chosen} if _is_taken_for_experts(model, end)}
    if taken and wanted != "all-linear":
        raise AdapterError(
            f"{key}={wanted}: in models of type {model.config.model_type} peft puts adapters of this name on the "
            f"stacked experts, which are not trained here; leave out {', '.join(sorted(taken))}"
        )
    return [name for name in chosen if name.rpartition(".")[2] not in taken]


def _is_taken_for_experts(model: Any, name: str) -> bool:
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers as convert
    except ImportError:  # an older peft leaves names alone
        return False
    settings = LoraConfig(target_modules=[name])
    try:
        convert(settings, model, None)
    except ValueError:  # a part of a matrix of the experts
        return True
    return name not in (settings.target_modules or ())


def check_rank(rank: int, model: torch.nn.Module, targets: Sequence[str], key: str) -> None:
    # A product of rank r through a layer can hold no more than the layer is wide.
    chosen = [
        module for name, module in linear_modules(model).items() if any(_has_suffix(name, end) for end in targets)
    ]
    sides = ("in_features", "out_features", "nx", "nf")
    widest = max((getattr(module, side, 0) for module in chosen for side in sides), default=rank)
    if rank > widest:
        raise AdapterError(f"{key}={rank}: the widest layer that would get an adapter has {widest} columns; lower it.")


def linear_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return every module that can get an adapter, by its full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's linear layers
    }


def stacked_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return weights that stack several matrices, such as experts: they are no modules, so they get no adapters."""
    homes = (
        (name, part) for name, part in model.named_modules() if not isinstance(part, torch.nn.modules.conv._ConvNd)
    )
    return {
        f"{name}.{own}": weight
        for name, part in homes
        for own, weight in part.named_parameters(recurse=False)
        if weight.ndim == 3
    }


def describe_stacked(model: torch.nn.Module) -> str | None:
    """Describe such weights: their names and their share of the base; None for a model without any."""
    stacked = stacked_weights(model)
    if not stacked:
        return None
    names = dict.fromkeys(re.sub(r"\d+", "N", name.removeprefix("base_model.model.")) for name in stacked)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    ends = dict.fromkeys(name.rpartition(".")[2] for name in linear_modules(inner))
    taken = [end for end in ends if _is_taken_for_experts(inner, end)]
    beside = f" and {', '.join(taken)} of other layers, whose names peft takes for experts," if taken else ""
    whole = sum(numbers_in(weight) for name, weight in model.named_parameters() if ".lora_" not in name)
    return f"{', '.join(names)} ({sum(weight.numel() for weight in stacked.values()) / whole:.0%} of the base){beside}"


def stacked_note(words: str | None, shape: AdapterShape, key: str) -> str | None:
    """Return a sentence on weights that `all-linear` leaves without adapters; `key` is the setting."""
    words = words if shape.lora_rank > 0 and shape.target_modules == "all-linear" else None
    return words and (
        f"{key}=all-linear: experts that lie in one tensor are no linear modules and get no adapters. {words} stay as "
        "they are; lora_rank=0 would train all weights."
    )


def _choose_modules(model: Any, linear: dict[str, torch.nn.Module], wanted: Any, key: str) -> list[str]:
    if wanted == "all-linear":
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        return [name for name, module in linear.items() if module is not head]
    return _matches(list(linear), wanted, model, key)


def _matches(names: list[str], wanted: Any, model: torch.nn.Module, key: str) -> list[str]:
    # `wanted` is a list of name suffixes, one suffix, or a regular expression.
    items = [wanted] if isinstance(wanted, str) else list(wanted)
    found: set[str] = set()
    for item in items:
        hits = {name for name in names if _has_suffix(name, item)}
        if not hits and isinstance(wanted, str):
            hits = _by_expression(names, wanted, key)
        if not hits:
            raise AdapterError(_unknown(str(item), wanted, model, key))
        found |= hits
    return [name for name in names if name in found]


def _has_suffix(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _by_expression(names: list[str], expression: str, key: str) -> set[str]:
    try:
        return {name for name in names if re.fullmatch(expression, name)}
    except re.error as error:
        raise AdapterError(f"{key}={expression} is no name here and no regular expression: {error}") from None


def _unknown(item: str, wanted: Any, model: torch.nn.Module, key: str) -> str:
    linear = linear_modules(model)
    other = next((type(module).__name__ for name, module in model.named_modules() if _has_suffix(name, item)), None)
    what = f"no linear module of the model is called {item}"
    if any(_has_suffix(name, item) for name in stacked_weights(model)):
        what = f"{item} holds experts in one tensor; adapters stand beside linear modules only"
    if other is not None and not any(_has_suffix(name, item) for name in linear):
        what = f"{item} is of the kind {other}; adapters stand beside linear modules only"
    elif other is not None:
        what = f"{item} is not among the modules that get adapters"
    return f"{key}={wanted}: {what}. {_list_modules(linear)}"


def _list_modules(linear: dict[str, torch.nn.Module]) -> str:
    counts = Counter(name.rpartition(".")[2] for name in linear)
    names = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())
    return f"Linear modules of this model: {names}; full names look like {next(iter(linear), 'none')}"

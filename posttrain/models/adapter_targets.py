"""Which modules get LoRA adapters: `all-linear`, names or a regular expression become modules of one model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from posttrain.errors import UserError
from posttrain.models.quantized import numbers_in


class AdapterShape(Protocol):
    """What the adapters of a role look like: the section `model` of a policy, or the critic's."""

    lora_rank: int
    lora_alpha: int
    target_modules: Any
    exclude_modules: Any


class AdapterError(UserError):
    """Adapters that cannot be made or loaded; the text says what to do."""


def find_targets(
    model: torch.nn.Module,
    wanted: Any,
    exclude: Any = None,
    *,
    whole: Sequence[str] = (),
    key: str = "target_modules",
) -> list[str]:
    """Names for peft: short ones (`q_proj`) where they mean exactly the modules that were asked for, else full ones.

    Top modules named in `whole` are trained themselves: nothing in them gets adapters.
    """
    linear = linear_modules(model)
    chosen = [name for name in _chosen(model, linear, wanted, key) if name.partition(".")[0] not in whole]
    if exclude:
        unwanted = set(_matches(list(chosen), exclude, model, key.replace("target_", "exclude_")))
        chosen = [name for name in chosen if name not in unwanted]
    if not chosen:
        raise AdapterError(
            f"{key}={wanted} without {exclude or list(whole)} leaves no module for an adapter. {_there_are(linear)}"
        )
    short = sorted({name.rpartition(".")[2] for name in chosen})
    meant = {name for name, _ in model.named_modules() for end in short if _ends(name, end)}
    return short if meant == set(chosen) else chosen


def check_rank(rank: int, model: torch.nn.Module, targets: Sequence[str], key: str) -> None:
    """A product of rank r through a layer can hold no more than the layer is wide."""
    chosen = [module for name, module in linear_modules(model).items() if any(_ends(name, end) for end in targets)]
    sides = ("in_features", "out_features", "nx", "nf")
    widest = max((getattr(module, side, 0) for module in chosen for side in sides), default=rank)
    if rank > widest:
        raise AdapterError(f"{key}={rank}: the widest layer that would get an adapter has {widest} columns; lower it.")


def linear_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Every module that adapters can stand beside, by its full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's linear layers
    }


def stacked_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Matrices that lie in one tensor, such as a layer's experts: no module stands for each, so none gets adapters."""
    homes = (
        (name, part) for name, part in model.named_modules() if not isinstance(part, torch.nn.modules.conv._ConvNd)
    )
    return {
        f"{name}.{own}": weight
        for name, part in homes
        for own, weight in part.named_parameters(recurse=False)
        if weight.ndim == 3
    }


def stacked_words(model: torch.nn.Module) -> str | None:
    """The names of such weights and their share of the base, in words; None for a model without any."""
    stacked = stacked_weights(model)
    if not stacked:
        return None
    names = dict.fromkeys(re.sub(r"\d+", "N", name.removeprefix("base_model.model.")) for name in stacked)
    whole = sum(numbers_in(weight) for name, weight in model.named_parameters() if ".lora_" not in name)
    return f"{', '.join(names)} ({sum(weight.numel() for weight in stacked.values()) / whole:.0%} of the base)"


def stacked_note(words: str | None, shape: AdapterShape, key: str) -> str | None:
    """A sentence on the weights that `all-linear` leaves without adapters: `stacked_words` names them; `key` is the
    setting's."""
    words = words if shape.lora_rank > 0 and shape.target_modules == "all-linear" else None
    return words and (
        f"{key}=all-linear: experts that lie in one tensor are no linear modules and get no adapters. {words} stay as "
        "they are; lora_rank=0 would train all weights."
    )


def _chosen(model: Any, linear: dict[str, torch.nn.Module], wanted: Any, key: str) -> list[str]:
    if wanted == "all-linear":
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        return [name for name, module in linear.items() if module is not head]
    return _matches(list(linear), wanted, model, key)


def _matches(names: list[str], wanted: Any, model: torch.nn.Module, key: str) -> list[str]:
    """The `names` that a list of name ends, one name end, or a regular expression means."""
    items = [wanted] if isinstance(wanted, str) else list(wanted)
    found: set[str] = set()
    for item in items:
        hits = {name for name in names if _ends(name, item)}
        if not hits and isinstance(wanted, str):
            hits = _by_expression(names, wanted, key)
        if not hits:
            raise AdapterError(_unknown(str(item), wanted, model, key))
        found |= hits
    return [name for name in names if name in found]


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _by_expression(names: list[str], expression: str, key: str) -> set[str]:
    try:
        return {name for name in names if re.fullmatch(expression, name)}
    except re.error as error:
        raise AdapterError(f"{key}={expression} is no name here and no regular expression: {error}") from None


def _unknown(item: str, wanted: Any, model: torch.nn.Module, key: str) -> str:
    linear = linear_modules(model)
    other = next((type(module).__name__ for name, module in model.named_modules() if _ends(name, item)), None)
    what = f"no linear module of the model is called {item}"
    if any(_ends(name, item) for name in stacked_weights(model)):
        what = f"{item} holds experts in one tensor; adapters stand beside linear modules only"
    if other is not None and not any(_ends(name, item) for name in linear):
        what = f"{item} is of the kind {other}; adapters stand beside linear modules only"
    elif other is not None:
        what = f"{item} is not among the modules that get adapters"
    return f"{key}={wanted}: {what}. {_there_are(linear)}"


def _there_are(linear: dict[str, torch.nn.Module]) -> str:
    counts = Counter(name.rpartition(".")[2] for name in linear)
    names = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())
    return f"Linear modules of this model: {names}; full names look like {next(iter(linear), 'none')}"

"""Decides what gets LoRA adapters: resolves `all-linear`, names or a regular expression for one model.

Linear modules, and weights that stack experts: peft adapts these as `target_parameters`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from posttrain.errors import UserError
from posttrain.models.expert_adapters import adapted_weights, base_name, expert_weights, is_wrapper
from posttrain.models.quantized import numbers_in
from posttrain.models.recurrent import recurrent_layers

EXPERTS = "experts"  # what transformers calls the module whose weights stack the experts of a layer
LARGE = 0.1  # share of the base above which adapters are called large
_OUTER = "base_model.model."  # before the names of a model inside peft
# The names that parts of stacked weights have in files, and had as modules.
_PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("w2",),),
}


class AdapterShape(Protocol):
    """The adapter settings of a role: the section `model` of a policy, or the critic's."""

    lora_rank: int
    lora_alpha: int
    target_modules: Any
    exclude_modules: Any


class AdapterError(UserError):
    """Adapters that cannot be created or loaded; the text says what to do."""


@dataclass(frozen=True)
class Targets:
    """What gets adapters, as peft takes it: names of linear modules, and of weights that stack experts."""

    modules: list[str]
    parameters: list[str]


def find_targets(
    model: torch.nn.Module,
    wanted: Any,
    exclude: Any = None,
    *,
    whole: Sequence[str] = (),
    key: str = "target_modules",
) -> Targets:
    """Return short names (`q_proj`) if they mean exactly what is requested, else full ones.

    Top modules named in `whole` are fully trained and get no adapters.
    """
    linear, stacked = linear_modules(model), list(expert_weights(model))
    chosen = [name for name in _choose(model, linear, wanted, key) if name.partition(".")[0] not in whole]
    if exclude:
        unwanted = set(_matches(chosen, exclude, model, key.replace("target_", "exclude_")))
        chosen = [name for name in chosen if name not in unwanted]
    experts = [name for name in chosen if name in stacked]
    modules = _without_taken_for_experts(model, [name for name in chosen if name in linear], experts, wanted, key)
    if not modules and not experts:
        raise AdapterError(
            f"{key}={wanted} without {exclude or list(whole)} leaves no module for an adapter. {_list_modules(model)}"
        )
    names = [name for name, _ in model.named_modules()]
    return Targets(_shortened(modules, names, parts=1), _shortened(experts, stacked, parts=3))


def _shortened(chosen: list[str], names: Sequence[str], *, parts: int) -> list[str]:
    # The last `parts` of the names (`mlp.experts.down_proj`), if these mean no others.
    short = sorted({".".join(name.split(".")[-parts:]) for name in chosen})
    meant = {name for name in names for end in short if _has_suffix(name, end)}
    return short if meant == set(chosen) else chosen


def stored_targets(
    model: torch.nn.Module, settings: Mapping[str, Any], source: str, *, whole: Sequence[str] = ()
) -> Targets:
    """Return what an adapter's own file names, which peft reads in its own way."""
    wanted, parameters = settings.get("target_modules") or [], list(settings.get("target_parameters") or [])
    known = expert_weights(model)
    for item in parameters:
        if not any(_has_suffix(name, item) for name in known):
            raise AdapterError(
                f"The adapter {source} has target_parameters={parameters}, but {item} is no weight of this model that "
                "stacks experts. It was made for another base: set model.path to that one."
            )
    if not wanted and parameters:
        return Targets([], parameters)
    linear, exclude = linear_modules(model), settings.get("exclude_modules")
    chosen = _choose(model, linear, wanted, "target_modules", of_experts=False)
    chosen = [name for name in chosen if name.partition(".")[0] not in whole]
    if exclude:
        chosen = [name for name in chosen if name not in _matches(chosen, exclude, model, "exclude_modules")]
    chosen = _without_taken_for_experts(model, chosen, [], wanted, "target_modules")
    return Targets(_shortened(chosen, [name for name, _ in model.named_modules()], parts=1), parameters)


def _without_taken_for_experts(
    model: Any, chosen: list[str], experts: Sequence[str], wanted: Any, key: str
) -> list[str]:
    """Without the dense and shared layers of mixtures such as DeepSeek-V3 whose names the experts once had: there peft
    adapts the stacked experts instead. Where these were meant as well, a note names what is left out."""
    taken = {end for end in {name.rpartition(".")[2] for name in chosen} if _is_taken_for_experts(model, end)}
    meant = {old.rpartition(".")[2] for name in experts for old in (name, *chain(*_old_names(name)))}
    if (alone := taken - meant) and "all-linear" not in _items(wanted):
        raise AdapterError(
            f"{key}={wanted}: in models of type {model.config.model_type} peft puts adapters of this name on the "
            f"stacked experts, not on other layers; leave out {', '.join(sorted(alone))}, or name {EXPERTS} instead"
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


def check_rank(rank: int, model: torch.nn.Module, targets: Targets, key: str) -> None:
    # A product of rank r through a layer can hold no more than the layer is wide.
    linear = linear_modules(model).items()
    chosen = [module for name, module in linear if any(_has_suffix(name, end) for end in targets.modules)]
    sides = ("in_features", "out_features", "nx", "nf")
    widths = [getattr(module, side, 0) for module in chosen for side in sides]
    for name, weight in expert_weights(model).items():
        if any(_has_suffix(name, end) for end in targets.parameters):
            widths += weight.shape[1:]
    widest = max(widths, default=rank)
    if rank > widest:
        raise AdapterError(f"{key}={rank}: the widest layer that would get an adapter has {widest} columns; lower it.")


def linear_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return every module that can get an adapter, by its full name."""
    without = _linear_without_adapters(model)
    return {name: module for name, module in model.named_modules() if _is_linear(module) and name not in without}


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's linear layers


def _linear_without_adapters(model: torch.nn.Module) -> dict[str, str]:
    """Linear modules of recurrent layers that cannot get an adapter, and why."""
    layers, found = {id(layer) for layer in recurrent_layers(model)}, {}
    for home, layer in model.named_modules():
        for own, part in layer.named_children() if id(layer) in layers else ():
            if not _is_linear(part):
                continue
            if own == "dt_proj":  # of Mamba's first version; an adapter would have no gradient
                found[f"{home}.{own}"] = "its layer reads the weight itself, beside any adapter"
            elif _is_rejected_by_peft(model, own):
                found[f"{home}.{own}"] = "peft builds none, because kernels of this layer read the weight themselves"
    return found


def _is_rejected_by_peft(model: Any, name: str) -> bool:
    try:
        from peft import LoraConfig
        from peft.tuners.tuners_utils import _check_lora_target_modules_mamba as check
    except ImportError:  # another peft: it says so itself
        return False
    try:
        check(LoraConfig(), model, name)
    except ValueError:
        return True
    return False


def stacked_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return weights that stack several matrices, such as experts: they are no modules, so `all-linear` leaves them."""
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
    """Describe those without adapters: their names and their share of the base; None for a model without any."""
    stacked, adapted = stacked_weights(model), adapted_weights(model)
    if not stacked:
        return None
    left = {name: w for name, w in stacked.items() if base_name(name.removeprefix(_OUTER)) not in adapted}
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    ends = dict.fromkeys(name.rpartition(".")[2] for name in linear_modules(inner))
    taken = [end for end in ends if _is_taken_for_experts(inner, end)]
    share = _count(left.values()) / _base_size(model)
    words = [f"{_numbered(left)} ({share:.0%} of the base)"] if left else []
    words += [f"{', '.join(taken)} of other layers, whose names peft takes for experts,"] if taken else []
    return " and ".join(words) or None


def describe_adapted(model: torch.nn.Module) -> str | None:
    """Describe the adapters of stacked experts: beside which weights they stand, and how large they are."""
    if not (adapted := adapted_weights(model)):
        return None
    held: list[Any] = [part for part in model.modules() if is_wrapper(part)]
    experts = max(part.num_experts for part in held)
    count = _count(part["default"].weight for one in held for part in (one.lora_A, one.lora_B))
    return (
        f"{_numbered(sorted(adapted, key=len, reverse=True))} have adapters for {experts} experts of each layer: "
        f"{count / 1e6:,.3g} million numbers, {count / _base_size(model):.1%} of the base"
    )


def adapters_share(model: torch.nn.Module) -> float:
    """The size of all adapters as a share of the base's; 0 where no experts have adapters."""
    if not adapted_weights(model):
        return 0.0
    return _count(w for name, w in model.named_parameters() if ".lora_" in name) / _base_size(model)


def large_note(share: float, key: str) -> str | None:
    """Return a sentence on adapters that are large beside their base; `key` is the rank's setting."""
    if share <= LARGE:
        return None
    return (
        f"{key}: the adapters have {share:.0%} of the base's numbers, because every expert has its own; each of them "
        "takes 16 bytes in training (value, gradient and two moments). A lower rank makes them smaller."
    )


def _numbered(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(re.sub(r"\d+", "N", base_name(name.removeprefix(_OUTER))) for name in names))


def _base_size(model: torch.nn.Module) -> int:
    return _count(weight for name, weight in model.named_parameters() if ".lora_" not in name)


def _count(weights: Iterable[torch.Tensor]) -> int:
    return sum(map(numbers_in, weights))


def stacked_note(words: str | None, shape: AdapterShape, key: str, adapted: str | None = None) -> str | None:
    """Return a sentence on stacked weights: those that have no adapters although others do, and those that have.

    `words` and `adapted` describe them (`describe_stacked`, `describe_adapted`); `key` is the setting.
    """
    if shape.lora_rank == 0:
        return None
    if adapted is not None:
        return f"{key}: {adapted}." + (f" {words.removesuffix(',')} get none." if words else "")
    if not words or "all-linear" not in _items(shape.target_modules):
        return None
    return (
        f"{key}=all-linear: experts that lie in one tensor are no linear modules and get no adapters. {words} stay as "
        f"they are; {key}=[all-linear,{EXPERTS}] gives adapters to the experts as well, lora_rank=0 trains all weights."
    )


def _items(wanted: Any) -> list[Any]:
    return [wanted] if isinstance(wanted, str) else list(wanted or [])


def _old_names(name: str) -> list[tuple[str, ...]]:
    # What stacked experts were called while each expert had modules of its own: all names of a tuple mean the weight.
    home, _, own = name.rpartition(".")
    names = _PARTS.get(own, ())
    return [tuple(f"{home}.{part}" for part in parts) for parts in names]


def _choose(
    model: Any, linear: dict[str, torch.nn.Module], wanted: Any, key: str, *, of_experts: bool = True
) -> list[str]:
    stacked = expert_weights(model) if of_experts else {}
    items = [item for item in _items(wanted) if item != "all-linear"]
    named = _matches([*linear, *stacked], wanted if isinstance(wanted, str) else items, model, key) if items else []
    found = set(named)
    if len(items) < len(_items(wanted)):
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        found |= {name for name, module in linear.items() if module is not head}
    return [name for name in (*linear, *stacked) if name in found]


def _matches(names: list[str], wanted: Any, model: torch.nn.Module, key: str) -> list[str]:
    # `wanted` is one suffix of names or regular expression, or a list of them. A weight of experts is also meant by the
    # name of its module, and by its old names together.
    stacked = expert_weights(model)
    ways = {
        name: [(name,), (name.rpartition(".")[0],), *_old_names(name)] if name in stacked else [(name,)]
        for name in names
    }
    spelled = {each for either in ways.values() for way in either for each in way}
    hits: dict[str, set[str]] = {}
    for item in _items(wanted):
        hits[item] = {name for name in spelled if _has_suffix(name, item)}
        if not hits[item]:
            hits[item] = _by_expression(spelled, str(item), key)
        if not hits[item]:
            raise AdapterError(_unknown(str(item), wanted, model, key))
    hit = set[str]().union(*hits.values())
    whole = {name: [way for way in either if hit.issuperset(way)] for name, either in ways.items()}
    used = {each for met in whole.values() for way in met for each in way}
    for item, own in hits.items():
        if not own & used:
            raise AdapterError(
                f"{key}={wanted}: {item} of the experts lies in one tensor with its other half (gate_up_proj), and "
                f"they share an adapter: name both halves, or gate_up_proj. {_list_modules(model)}"
            )
    return [name for name in names if whole[name]]


def _has_suffix(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _by_expression(names: Iterable[str], expression: str, key: str) -> set[str]:
    try:
        return {name for name in names if re.fullmatch(expression, name)}
    except re.error as error:
        raise AdapterError(f"{key}={expression} is no name here and no regular expression: {error}") from None


def _unknown(item: str, wanted: Any, model: torch.nn.Module, key: str) -> str:
    linear = linear_modules(model)
    other = next((type(module).__name__ for name, module in model.named_modules() if _has_suffix(name, item)), None)
    what = f"no linear module of the model is called {item}"
    if any(_has_suffix(name, item) for name in stacked_weights(model)):
        what = f"{item} holds several matrices in one tensor, and not as experts for which adapters are built"
    why = next((why for name, why in _linear_without_adapters(model).items() if _has_suffix(name, item)), None)
    if why is not None:
        what = f"{item} gets no adapter in models of type {model.config.model_type}: {why}"  # pyright: ignore
    elif other is not None and not any(_has_suffix(name, item) for name in linear):
        what = f"{item} is of the kind {other}; adapters stand beside linear modules and experts only"
    elif other is not None:
        what = f"{item} is not among the modules that get adapters"
    return f"{key}={wanted}: {what}. {_list_modules(model)}"


def _list_modules(model: torch.nn.Module) -> str:
    linear, stacked = linear_modules(model), expert_weights(model)
    counts = Counter(name.rpartition(".")[2] for name in linear)
    names = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())
    text = f"Linear modules of this model: {names}; full names look like {next(iter(linear), 'none')}"
    return f"{text}. Its {EXPERTS}: {_numbered(stacked)}" if stacked else text

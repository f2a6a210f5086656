"""LoRA with peft: small trained adapters on frozen base weights."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from posttrain.config.model import ModelConfig
from posttrain.models.adapter_files import fill_adapters, read_adapter, trained_parameters, write_adapter
from posttrain.models.adapter_targets import AdapterError, AdapterShape, check_rank, find_targets, stored_targets
from posttrain.models.expert_adapters import base_name, expert_weights, is_wrapper, multiply_low_rank
from posttrain.models.quantized import is_quantized, plain_weight

_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_FROM_FILES = ("use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern")


def add_adapters(
    model: torch.nn.Module,
    shape: AdapterShape,
    *,
    more: Mapping[str, Any] | None = None,
    source: str = "",
    whole: Sequence[str] = (),
    role: str = "actor_rollout_ref.",
) -> torch.nn.Module:
    """Add adapters of `lora_rank` to a model; only they are trained, in float32 even if the weights are bfloat16.

    `more` are the fields of peft's configuration from an adapter's own file, `source`, which also names its targets.
    Top modules named in `whole` (an untrained head) get no adapters and are fully trained. `role` precedes the keys
    that errors name.
    """
    from peft import LoraConfig, get_peft_model

    key = f"{role}model.target_modules"
    if more is None:
        targets = find_targets(model, shape.target_modules, shape.exclude_modules, whole=whole, key=key)
    else:
        targets = stored_targets(model, more, source, whole=whole)
    if targets.parameters:
        _check_experts(model, key)
    check_rank(shape.lora_rank, model, targets, f"{role}model.lora_rank")
    settings = LoraConfig(
        r=shape.lora_rank,
        lora_alpha=shape.lora_alpha,
        lora_dropout=0.0,  # RL compares passes over the same tokens: none may be random
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        task_type="CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
        **{name: value for name, value in (more or {}).items() if name in _FROM_FILES and value},
    )
    with warnings.catch_warnings():  # about tied heads and transposed layers, handled here, and a name that peft uses
        about = "Model has `tie_word_embeddings=True`|fan_in_fan_out is set to|`is_gradient_checkpointing` is"
        warnings.filterwarnings("ignore", message=about)
        empty = next(model.parameters()).is_meta  # then the adapters stay on the meta device too, and nothing is drawn
        adapted = get_peft_model(model, settings, low_cpu_mem_usage=empty)  # pyright: ignore
    if any(is_wrapper(part) and not hasattr(part, "_did_swap_in_out_features") for part in adapted.modules()):
        # Older versions hold A and B of most models the other way round.
        raise AdapterError(f"{key}: adapters of experts need a newer peft than {version('peft')}: pip install -U peft")
    multiply_low_rank(adapted)
    for name in whole:
        if hasattr(model, name):
            getattr(model, name).requires_grad_(True)
    return adapted


def _check_experts(model: torch.nn.Module, key: str) -> None:
    if any(is_quantized(weight) or hasattr(weight, "held_bytes") for weight in model.parameters()):
        raise AdapterError(
            f"{key}: adapters of experts are not built beside a base of 4 bits. Leave the experts out, or remove "
            "model.quantization"
        )


def with_adapters(
    model: torch.nn.Module, config: ModelConfig, *, whole: Sequence[str] = (), role: str = "actor_rollout_ref."
) -> torch.nn.Module:
    """Add fresh adapters, which change nothing yet, or those of `lora_adapter_path`; see `add_adapters`."""
    if config.lora_adapter_path is None:
        return add_adapters(model, config, whole=whole, role=role)
    settings, weights = read_adapter(Path(config.lora_adapter_path), whole)
    if expert_weights(model) and any(_ONE_EXPERT.search(name) for name in weights):
        raise AdapterError(
            f"model.lora_adapter_path={config.lora_adapter_path}: the folder holds the adapter of each expert by "
            "itself, as for models whose experts are modules. Have peft convert it: "
            "PeftModel.from_pretrained(base, folder).save_pretrained(new_folder), and give the new folder"
        )
    adapted = add_adapters(model, config, more=settings, source=config.lora_adapter_path, whole=whole, role=role)
    fill_adapters(adapted, weights, config.lora_adapter_path)
    return adapted


def has_adapters(model: torch.nn.Module) -> bool:
    return any(".lora_" in name for name, _ in model.named_parameters())


@contextmanager
def base_only(model: Any) -> Iterator[None]:
    """Switch the adapters off inside: the base model is its own reference."""
    with model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
        yield


def merged_state(model: Any) -> dict[str, torch.Tensor]:
    """Return weights under their Hugging Face names, adapters merged into copies; the live weights do not change."""
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    state: dict[str, torch.Tensor] = {}
    copies: dict[int, torch.Tensor] = {}  # keyed by the live tensor, so that tied weights stay tied
    for name, weight in {**base.state_dict(), **dict(base.named_parameters(remove_duplicate=False))}.items():
        if ".lora_" in name or ".weight." in name:  # the latter are scales of 4-bit weights
            continue
        if id(weight) not in copies:
            plain = plain_weight(weight)
            copies[id(weight)] = plain.detach().clone() if plain is weight else plain
        state[base_name(name)] = copies[id(weight)]
    for name, module in base.named_modules():
        if isinstance(module, LoraLayer):
            merge_into(state, name, module)
    return state


def merge_into(state: dict[str, torch.Tensor], name: str, module: Any) -> None:
    """Replace the weight of an adapted module, called `name`, by one with its adapter merged."""
    key = base_name(f"{name}.{module.parameter_name if is_wrapper(module) else 'weight'}")
    state[key] = state[key] + module.get_delta_weight("default").to(state[key].dtype)


def save_merged(model: Any, folder: Path, state: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the model with merged adapters as a Hugging Face folder; a 4-bit base is written in the compute dtype.

    `state` holds the merged weights, if the model does not hold them all.
    """
    base = model.get_base_model()
    state = merged_state(model) if state is None else dict(state)
    hidden = {name: base.__dict__.pop(name) for name in ("hf_quantizer", "hf_device_map") if name in base.__dict__}
    config, base.config = base.config, copy.deepcopy(base.config)
    try:
        if hasattr(base.config, "quantization_config"):
            del base.config.quantization_config
        head = base.get_output_embeddings()
        if head is not None and has_adapters(head):  # it is no longer equal to the embedding that it was tied to
            base.config.tie_word_embeddings = False
        base.save_pretrained(folder, state_dict=state)
    finally:
        base.config = config
        base.__dict__.update(hidden)


def save_model(
    model: Any,
    folder: Path,
    adapter: Mapping[str, Any] | None,
    *,
    merged: bool,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the trained model. With adapters, whose settings are `adapter`: the merged model, or only the adapters.

    `state` is what is written, if the model does not hold it all.
    """
    if adapter is None:
        model.save_pretrained(folder, state_dict=model.state_dict() if state is None else dict(state))
    elif merged:
        save_merged(model, folder, state)
    else:
        write_adapter(folder, trained_parameters(model) if state is None else state, adapter)

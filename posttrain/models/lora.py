"""LoRA by peft: small trained adapters beside frozen base weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from posttrain.config.model import ModelConfig


def add_adapters(model: torch.nn.Module, config: ModelConfig, *, whole: Sequence[str] = ()) -> torch.nn.Module:
    """The model with adapters of `lora_rank`; only they are trained, in float32 even beside bfloat16 weights.

    Top modules named in `whole` (a head that begins untrained) get no adapters and are trained themselves.
    """
    from peft import LoraConfig, get_peft_model

    targets = config.target_modules
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=list(whole) or None,
        task_type="CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
    )
    try:
        adapted = get_peft_model(model, settings)  # pyright: ignore
    except ValueError as error:
        names = sorted({name.split(".")[-1] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
        raise ValueError(
            f"actor_rollout_ref.model.target_modules={targets}: {error}\n"
            f"  linear modules of this model: {', '.join(names)}"
        ) from error
    for name in whole:
        if hasattr(model, name):
            getattr(model, name).requires_grad_(True)
    return adapted


@contextmanager
def base_only(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the adapters are off: the model is its own reference."""
    with model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():  # pyright: ignore
        yield


def merged_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights under their Hugging Face names, adapters folded into copies of the base weights; the live ones stay."""
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()  # pyright: ignore
    state: dict[str, torch.Tensor] = {}
    for name, tensor in base.state_dict().items():
        if ".lora_" not in name:
            state[name.replace(".base_layer.", ".")] = tensor.detach().clone()
    for name, module in base.named_modules():
        if isinstance(module, LoraLayer):
            state[f"{name}.weight"] += module.get_delta_weight("default").to(state[f"{name}.weight"].dtype)  # pyright: ignore
    return state

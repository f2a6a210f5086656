"""Section `actor_rollout_ref.model`: which model is trained and how it is loaded; and folders of LoRA adapters.

An adapter's folder is in peft's format, and is read before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from posttrain.config.schema import Section, section
from posttrain.settings import DTYPES, POSITIVE, ZERO_OR_MORE, setting

NO_ADAPTERS = ".lora_rank is 0, so that there are no adapters"


@section
class ModelConfig(Section):
    """The policy's model. Example: `actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct`."""

    path: str | None = setting(None, is_path=True)
    """Local folder or hub id of the model; `embedded` (or unset) is the small model that posttrain makes itself."""
    tokenizer_path: str | None = setting(None, is_path=True)
    """Folder or hub id of the tokenizer, if it does not lie with the model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    dtype: str = setting("auto", choices=DTYPES)
    """Compute type of the weights: `auto` (bfloat16 on CUDA, float32 on CPU), `float32`, `bfloat16` or `float64`."""
    use_remove_padding: bool = True
    """Pack rows without padding for training; false computes padded rows (same result, slower)."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    external_lib: str | None = None
    """Python module or file imported before training, for example one that registers your own estimator."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Values laid over the model's own `config.json`."""
    allow_other_weights: bool = False
    """Train although the folder lacks weights of the model (they begin random), or holds others or other shapes."""
    lora_rank: int = setting(0, range=ZERO_OR_MORE)
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: int = setting(16, range=POSITIVE, idle=NO_ADAPTERS)
    """LoRA scale: adapters are multiplied by alpha / rank."""
    target_modules: Any = setting("all-linear", idle=NO_ADAPTERS, is_literal=True)
    """Modules with adapters: `all-linear` (no head, no stacked `experts`), names, or a regular expression of names."""
    exclude_modules: Any = setting(None, idle=NO_ADAPTERS, is_literal=True)
    """Names, or a regular expression of full names, that get no adapter although `target_modules` means them."""
    lora_adapter_path: str | None = setting(None, is_path=True)
    """Folder of a LoRA adapter in peft's format to start from; it also says rank, alpha and target modules."""
    quantization: str | None = setting(None, choices=("nf4",))
    """`nf4` holds the base in 4 bits by bitsandbytes (QLoRA); adapters are then trained beside it. null: `dtype`."""


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What transformers calls the layer that gives the label; decoders call it `score`.
SCORE_HEADS = ("score", "classifier", "classification_head", "logits_proj")


def read_adapter_config(folder: Path, heads: Sequence[str] = ()) -> dict[str, Any] | str:
    """The adapter's settings, or a sentence on why the folder cannot serve; it may hold `heads` whole."""
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    if not (folder / ADAPTER_CONFIG).is_file():
        return f"the folder {folder} holds no {ADAPTER_CONFIG}: it is no LoRA adapter in peft's format"
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        rest = "; adapter_model.bin is a pickle, which is never loaded" if pickled else ""
        return f"the folder {folder} holds no {ADAPTER_WEIGHTS}{rest}"
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        problem = _unusable(settings, heads)
    except (OSError, ValueError, AttributeError) as error:
        problem = f"cannot be read: {error}"
    return settings if problem is None else f"{folder / ADAPTER_CONFIG}: {problem}"


def stored_names(settings: dict[str, Any]) -> Any:
    """What `target_modules` would name here for an adapter's settings: peft lists stacked weights of experts apart."""
    modules, parameters = settings.get("target_modules"), settings.get("target_parameters")
    if not parameters:
        return modules
    return [*([modules] if isinstance(modules, str) else modules or []), *parameters]


# These change the base too, so that the stored base is not the one beside which the adapter was trained.
_CHANGES_THE_BASE = ("pissa", "olora", "loftq", "corda", "eva", "lora_ga")


def _unusable(settings: dict[str, Any], heads: Sequence[str]) -> str | None:
    """Why an adapter of this kind cannot be trained on here."""
    rank, start = settings.get("r"), str(settings.get("init_lora_weights", True)).lower()
    if str(settings.get("peft_type")).upper() != "LORA":
        return f"peft_type={settings.get('peft_type')} is not LORA"
    if not isinstance(rank, int) or rank < 1:
        return f"r={rank} is no rank"
    for name in ("modules_to_save", "trainable_token_indices", "layer_replication"):
        if settings.get(name) and not (name == "modules_to_save" and set(settings[name]) <= set(heads)):
            return f"{name}={settings[name]} is more than LoRA beside matrices: merge this adapter into its base"
    for name in ("use_dora", "lora_bias", "use_qalora", "alora_invocation_tokens", "arrow_config"):
        if settings.get(name):
            return f"{name}={settings[name]} is a variant of LoRA that is not built here"
    if settings.get("bias", "none") != "none":
        return f"bias={settings['bias']}: it trained biases of the base; merge this adapter into its base"
    if start.startswith(_CHANGES_THE_BASE):
        return f"init_lora_weights={start} changed the base that it stands beside; convert it to plain LoRA with peft"
    return None

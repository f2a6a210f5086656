"""Section `actor_rollout_ref.model`: which model is trained, and how it is loaded."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from posttrain.config.schema import Section, section
from posttrain.settings import DTYPES, POSITIVE, ZERO_OR_MORE, setting


@section
class ModelConfig(Section):
    """The policy's model. Example: `actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct`."""

    path: str | None = None
    """Local folder or hub id of the model; `embedded` (or unset) is the small model that posttrain makes itself."""
    tokenizer_path: str | None = None
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
    lora_alpha: int = setting(16, range=POSITIVE)
    """LoRA scale: adapters are multiplied by alpha / rank."""
    target_modules: Any = "all-linear"
    """Linear modules with adapters: `all-linear` (all but the head), names, or a regular expression of full names."""
    exclude_modules: Any = None
    """Names, or a regular expression of full names, that get no adapter although `target_modules` means them."""
    lora_adapter_path: str | None = None
    """Folder of a LoRA adapter in peft's format to start from; it also says rank, alpha and target modules."""
    quantization: str | None = setting(None, choices=("nf4",))
    """`nf4` holds the base in 4 bits by bitsandbytes (QLoRA); adapters are then trained beside it. null: `dtype`."""

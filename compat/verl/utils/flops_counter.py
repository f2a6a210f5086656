"""The operations of training passes by verl's count: 6 per parameter and token, and attention over each sequence.

`posttrain bench step` measures what a device reaches; `posttrain plan` counts a whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_DEVICE_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "MI300X": 1307e12,
    "MI350X": 2300e12,
    "MI355X": 2500e12,
    **dict.fromkeys(("H100", "H800", "H200"), 989e12),
    **dict.fromkeys(("A100", "A800"), 312e12),
    "L40S": 362.05e12,
    "L40": 181.05e12,
    "A40": 149.7e12,
    "L20": 119.5e12,
    "H20": 148e12,
    "RTX 3070 Ti": 21.75e12,
    "CPU": 448e9,
}
"""Operations per second in bfloat16 without sparsity, by a part of the device's name."""
_UNITS = ("B", "K", "M", "G", "T", "P")
_DENSE = ("qwen2", "llama", "qwen3", "mistral", "seed_oss", "mimo", "gemma3_text", "apertus")
_EXPERTS = ("qwen2_moe", "qwen3_moe", "gpt_oss", "hy_v3")
_LATENT = ("deepseek_v3",)


def get_device_flops(unit: str = "T", device_name: str | None = None) -> float:
    """What the device promises, in that unit; infinite for a device that is not known."""
    if device_name is None:
        import torch

        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    # The longest name first: `L40S` is not `L40`.
    known = [rate for name, rate in sorted(_DEVICE_FLOPS.items(), reverse=True) if name in device_name]
    return (known[0] if known else float("inf")) / 1000 ** _UNITS.index(unit)


class FlopsCounter:
    """Example: `reached, promised = FlopsCounter(config).estimate_flops([512, 300], seconds)`, in 1e12 per second."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.is_known = config.model_type in _DENSE + _EXPERTS + _LATENT
        if not self.is_known:
            print(f"FlopsCounter does not know models of type {config.model_type}: it reports 0")

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float, **kwargs: Any) -> tuple[float, float]:
        """(reached, promised) by training passes over sequences of these lengths in so many seconds."""
        if kwargs.get("images_seqlens"):
            raise NotImplementedError("FlopsCounter: models with images are not built")
        if not self.is_known:
            return 0, get_device_flops()
        config, tokens = self.config, sum(batch_seqlens)
        passed = 6 * (_layers(config) + 2 * config.vocab_size * config.hidden_size) * tokens
        return (passed + _attention(config, batch_seqlens)) / delta_time / 1e12, get_device_flops()


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _layers(config: Any) -> int:
    """Parameters of all layers that one token passes."""
    layers, dense = config.num_hidden_layers, getattr(config, "first_k_dense_replace", 0)
    first = _mlp(config) * dense if dense else 0
    return _projections(config) * layers + _experts(config) * (layers - dense) + first


def _mlp(config: Any) -> int:
    has_gate = config.model_type != "apertus"
    return config.hidden_size * config.intermediate_size * (3 if has_gate else 2)


def _experts(config: Any) -> int:
    """The experts that a token is sent to and their router; the only ones of a dense model."""
    if config.model_type in _DENSE:
        return _mlp(config)
    count = next(getattr(config, name) for name in _COUNTS if getattr(config, name, None) is not None)
    width = next(getattr(config, name) for name in _WIDTHS if getattr(config, name, None) is not None)
    shared = getattr(config, "n_shared_experts", None) or getattr(config, "num_shared_experts", None) or 0
    return config.hidden_size * (width * (config.num_experts_per_tok + shared) * 3 + count)


_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
_WIDTHS = ("moe_intermediate_size", "expert_hidden_dim", "intermediate_size")


def _projections(config: Any) -> int:
    """Parameters of one layer's queries, keys, values and output."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.model_type not in _LATENT:
        head_dim, keys = _head_dim(config), config.num_key_value_heads
        norms = hidden + keys * head_dim if config.model_type == "apertus" else 0
        return hidden * head_dim * (2 * heads + 2 * keys) + norms
    query, rope, rank = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_rope_head_dim, config.q_lora_rank
    asks = hidden * heads * query if rank is None else hidden * rank + heads * query * rank
    latent = hidden * (config.kv_lora_rank + rope)
    latent += heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
    return asks + latent + heads * config.v_head_dim * hidden


def _attention(config: Any, lengths: Sequence[int]) -> int:
    """Scores and weighted values of all layers under a causal mask; a window bounds what a token sees."""
    windows = _windows(config)
    pairs = sum(length * min(length, window or length) for window in windows for length in lengths)
    if config.model_type in _LATENT:
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        return 3 * pairs * width * config.num_attention_heads
    return 6 * pairs * _head_dim(config) * config.num_attention_heads


def _windows(config: Any) -> list[int | None]:
    """The window of each layer; None: the whole sequence."""
    if config.model_type not in ("gemma3_text", "gpt_oss"):
        return [None] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    every = getattr(config, "sliding_window_pattern", 6)
    if not kinds and config.model_type == "gemma3_text" and every:
        kinds = ["sliding" if (layer + 1) % every else "full" for layer in range(config.num_hidden_layers)]
    window = getattr(config, "sliding_window", 1024 if config.model_type == "gemma3_text" else 128)
    return [window if kind.startswith("sliding") else None for kind in kinds or ["full"] * config.num_hidden_layers]

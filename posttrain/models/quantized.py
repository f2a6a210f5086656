"""4-bit base weights (QLoRA) with bitsandbytes: loads them, and reads them as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from posttrain.errors import UserError

BLOCK, ABSMAX_BLOCK = 64, 256  # numbers that share a scale; scales that share a second-level scale


def loading_options(
    kind: str, dtype: torch.dtype, device: torch.device, keep: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the options of `from_pretrained` that hold linear layers (not the head) in 4 bits.

    `keep` names modules that stay unquantized, if the head is not the model's output embedding.
    """
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError, OSError) as error:
        raise UserError(
            f"model.quantization={kind} needs the package bitsandbytes, which cannot be used here: "
            f'{error}\n  pip install "posttrain[qlora]", or remove the setting to hold the base in model.dtype'
        ) from error
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=None if keep is None else list(keep),
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def keep_one_layout(model: torch.nn.Module) -> None:
    # On some CPUs bitsandbytes changes the layout of weights, in lower precision, at the first pass without gradient.
    # Passes that are compared with each other would then differ, and the weights could no longer be read.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # pyright: ignore


def is_quantized(weight: torch.Tensor) -> bool:
    return type(weight).__name__ == "Params4bit"


def numbers_in(weight: torch.Tensor) -> int:
    """Return how many numbers a weight holds; in 4 bits, two share one element."""
    return weight.quant_state.shape.numel() if is_quantized(weight) else weight.numel()  # pyright: ignore


def plain_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a 4-bit weight; any other weight as it is."""
    if not is_quantized(weight):
        return weight
    from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

    return dequantize_4bit(weight.data, weight.quant_state)  # pyright: ignore


def quantized_bytes(count: int) -> int:
    """Return the bytes of `count` numbers in 4 bits with their scales (one byte per block, and scales of those)."""
    blocks = -(-count // BLOCK)
    return -(-count // 2) + blocks + 4 * -(-blocks // ABSMAX_BLOCK)

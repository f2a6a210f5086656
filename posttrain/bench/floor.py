"""The physical floor of decoding: no engine can be faster than the machine's arithmetic and its memory.

A step that decodes one token of each of B rows, which have c tokens before it, needs at least
    FLOPs = B (2 W + 4 L H D c)        W weights in matrices (the head included), L layers, H query heads of width D
    bytes = s (W + B c 2 L G D)        G key-value heads, s bytes per number: weights once, the cache of each row
and takes at least max(FLOPs / peak, bytes / bandwidth). The prompt's prefill is left out, which only lowers the floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.bench.machine import bandwidth_for

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class Shape:
    """What of a model's configuration decides the cost of a token."""

    weights: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    size: int

    def flops(self, rows: int, context: float) -> float:
        return rows * (2 * self.weights + 4 * self.layers * self.heads * self.width * context)

    def bytes(self, rows: int, context: float) -> float:
        cache = rows * context * 2 * self.layers * self.kv_heads * self.width
        return self.size * (self.weights + cache)


def shape_of(config: dict[str, Any], dtype: str) -> Shape:
    """From a `config.json` of the Llama family (gated MLP)."""
    text = config.get("text_config", config)
    hidden, heads, layers = text["hidden_size"], text["num_attention_heads"], text["num_hidden_layers"]
    kv_heads, width = text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden // heads
    layer = 2 * hidden * heads * width + 2 * hidden * kv_heads * width + 3 * hidden * text["intermediate_size"]
    return Shape(layers * layer + hidden * text["vocab_size"], layers, heads, kv_heads, width, BYTES[dtype])


def floor_seconds(
    shape: Shape, *, rows: int, prompt: int, tokens: int, peak: float, bandwidth: dict[int, float]
) -> float:
    """The least time in which `rows` responses of `tokens` tokens can be decoded."""
    total = 0.0
    for context in range(prompt, prompt + tokens):
        needed = shape.bytes(rows, context)
        total += max(shape.flops(rows, context) / peak, needed / bandwidth_for(needed, bandwidth))
    return total


def decoding_floor(
    shape: Shape, prompts: list[list[int]], lengths: list[int], *, slots: int | None, peak: float, bandwidth: float
) -> float:
    """Seconds below which these rows cannot be decoded, `slots` at a time, if all arithmetic hides behind all reading.

    Distinct prompts are computed once; the weights are read once per step, and there are at least as many steps as the
    longest row has tokens, or as all tokens make with every slot busy.
    """
    rows = len(lengths)
    steps = max(max(lengths), -(-sum(lengths) // min(rows, slots or rows)))
    contexts = [len(prompt) * n + n * (n + 1) / 2 for prompt, n in zip(prompts, lengths, strict=True)]
    seen, tokens = sum(contexts), sum(lengths) + sum(map(len, set(map(tuple, prompts))))
    flops = 2 * shape.weights * tokens + 4 * shape.layers * shape.heads * shape.width * seen
    read = shape.size * (shape.weights * steps + seen * 2 * shape.layers * shape.kv_heads * shape.width)
    return max(flops / peak, read / bandwidth)


def update_flops(shape: Shape, lengths: list[int]) -> float:
    """Of an update over rows of these lengths: (6 N + 6 L H T) a token, N the weights in matrices with the head, H the
    width of all query heads, T the mean length seen by a token; look-up and recomputation are not counted."""
    tokens = sum(lengths)
    mean = sum(n * n for n in lengths) / tokens
    return tokens * (6 * shape.weights + 6 * shape.layers * shape.heads * shape.width * mean)

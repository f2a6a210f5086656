"""What one rank of the engine `megatron` holds, by the sizes that cut a model over ranks.

Weights, gradients and optimizer state are counted as the engine deals them out (`engine/megatron/weights.py`). What
layers keep for their backward pass is written out here from the engine's code, a token at a time: Megatron-Core's
modules do not run without process groups. Each number is that of the rank with most of it: the first stage of a
pipeline holds the most passes, the last one the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch

from posttrain.engine.heads import Head, ScoreHead, head_of
from posttrain.engine.megatron.adapters import adapter_matches, scalings_of
from posttrain.engine.megatron.groups import ParallelSizes, check_sizes
from posttrain.engine.megatron.model import (
    check_model,
    experts_of,
    head_size,
    is_latent,
    is_mixture,
    shared_width,
    stage_chunks,
)
from posttrain.engine.megatron.package import MegatronError
from posttrain.engine.megatron.weights import CUT, stage_matches
from posttrain.engine.pipeline import lead_of
from posttrain.engine.ranks import RanksError
from posttrain.kernels.logprob_head import CHUNK_ELEMENTS, DEVICE_SHARE
from posttrain.models.expert_adapters import base_name
from posttrain.models.forward import without_adapters
from posttrain.models.lora import has_adapters
from posttrain.planning.counting import ModelBytes
from posttrain.planning.meta_models import is_scorer

WIDE = 4  # bytes of a float32
LOGITS = 3  # chunks of logits that the head holds at once: scores, their powers, and a product of both


@dataclass(frozen=True)
class _Facts:
    """Of a model, whatever the sizes: a search for sizes asks for them hundreds of times."""

    counts: dict[str, tuple[int, int, bool]]  # by name: numbers, bytes of each, whether it is trained
    adapted: dict[str, float]
    head: Head
    itemsize: int


_FACTS: WeakKeyDictionary[torch.nn.Module, _Facts] = WeakKeyDictionary()


def _facts(model: Any) -> _Facts:
    if model not in _FACTS:
        state = without_adapters(model).state_dict(keep_vars=True)  # peft calls a matrix that it adapts `base_layer`
        counts = {
            base_name(name): (weight.numel(), weight.itemsize, weight.requires_grad) for name, weight in state.items()
        }
        adapted = scalings_of(model) if has_adapters(model) else {}
        head = ScoreHead() if is_scorer(model) else head_of(model)
        _FACTS[model] = _Facts(counts, adapted, head, next(model.parameters()).itemsize)
    return _FACTS[model]


def held_bytes(model: Any, sizes: ParallelSizes, workers: int) -> ModelBytes:
    """Weights, gradients and optimizer state of one rank, each of the stage that has most."""
    return ModelBytes(*(max(column) for column in zip(*_by_stage(model, sizes, workers), strict=True)))


def _by_stage(model: Any, sizes: ParallelSizes, workers: int) -> list[tuple[int, ...]]:
    facts = _facts(model)
    found = []
    for stage in range(sizes.pipeline):
        matches = stage_matches(model.config, sizes, stage, facts.head, facts.counts)
        # Ranks with the same weights share the moments: those of a stage, less the ones that hold other parts.
        of_stage = workers // sizes.pipeline
        weights = gradients = optimizer = largest = masters = 0
        for match in [*matches, *adapter_matches(matches, facts.adapted)]:
            parts = sizes.expert if match.kind == "experts" else sizes.tensor if match.kind in CUT else 1
            copies = of_stage // (sizes.expert if match.kind == "experts" else sizes.tensor)
            for numbers, itemsize, is_trained in (facts.counts[name] for name in match.theirs):
                numbers = -(-numbers // parts)
                weights += numbers * itemsize
                if is_trained:
                    wide, own = numbers * max(WIDE, itemsize), numbers * WIDE if itemsize < WIDE else 0
                    share = copies if sizes.shared_moments else 1
                    gradients, largest = gradients + wide, max(largest, wide)
                    optimizer, masters = optimizer + (2 * wide + own) // share, masters + own // share
        found.append((weights, gradients, optimizer, largest, masters))
    return found


def token_bytes(config: Any, sizes: ParallelSizes, layer: int, itemsize: int) -> int:
    """Bytes of a token that this layer keeps for its backward pass."""
    width, heads, tensor = config.hidden_size, config.num_attention_heads, sizes.tensor
    stretch = tensor if sizes.sequence else 1  # ranks that share the tokens between the matrices of a layer
    between = 4 * width  # its input, the norm of it, the middle, the norm of that
    if is_latent(config):
        size, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        between += 2 * (config.q_lora_rank or 0) + 2 * config.kv_lora_rank + config.qk_rope_head_dim
        # Queries, and rotated; keys and values from the latent; keys, values and the output at the size of keys.
        cut = heads * (2 * size + config.qk_nope_head_dim + value + 3 * size)
    else:
        keys = config.num_key_value_heads
        # Queries, keys and values in one; queries and keys rotated; the output.
        cut = head_size(config) * (heads + 2 * keys + heads + keys + heads)
    if is_mixture(config, layer):
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        # Tokens on their way to experts and back; gate and up, the activated gate, and the product.
        between += config.num_experts_per_tok * (3 * width + 4 * inner)
        between += (experts_of(config) or 0) * WIDE // itemsize
        cut += 4 * (shared_width(config) or 0)
    else:
        cut += 4 * config.intermediate_size
    return math.ceil(itemsize * (between / stretch + cut / tensor))


def update_bytes(
    model: Any, sizes: ParallelSizes, tokens: int, predicted: int, passes: int, checkpointing: bool, memory: int | None
) -> tuple[int, int]:
    """(kept for the backward pass, most alive besides weights and summed gradients) on the rank with most of it, with
    passes of `tokens` and log-probs of `predicted` of them; `memory` is a CUDA device's, None on a CPU."""
    config, itemsize = model.config.get_text_config(), _facts(model).itemsize
    own = math.ceil(tokens / sizes.context)
    layers = [token_bytes(config, sizes, layer, itemsize) for layer in range(config.num_hidden_layers)]
    stream = math.ceil(config.hidden_size * itemsize / (sizes.tensor if sizes.sequence else 1))
    kept = [stream] * len(layers) if checkpointing else layers
    stages = _by_stage(model, sizes, sizes.pipeline * sizes.tensor * sizes.expert)
    found = []
    for stage, (_, gradients, *_) in enumerate(stages):
        chunks = stage_chunks(config, sizes, stage)
        under_way = min(lead_of(stage, sizes.pipeline, sizes.virtual) + 1, passes * sizes.virtual)
        largest = max(sum(kept[layer] for layer in chunk) for chunk in chunks)
        activations = own * min(under_way * largest, passes * sum(kept[layer] for chunk in chunks for layer in chunk))
        layer = own * max(layers[layer] for chunk in chunks for layer in chunk)
        work = layer * (2 if checkpointing else 1)  # gradients of what it kept; and what it keeps, computed again
        if stage == sizes.pipeline - 1:
            work = max(work, head_bytes(model, sizes, predicted, memory))
        low = gradients * itemsize // WIDE if itemsize < WIDE else 0  # until they are added to the float32 sums
        found.append((activations, max(activations + work, low)))
    return max(one for one, _ in found), max(peak for _, peak in found)


def scoring_bytes(model: Any, sizes: ParallelSizes, tokens: int, predicted: int, memory: int | None) -> int:
    """Most bytes alive in a pass without gradient, besides the weights."""
    config, itemsize = model.config.get_text_config(), _facts(model).itemsize
    layer = max(token_bytes(config, sizes, layer, itemsize) for layer in range(config.num_hidden_layers))
    return max(math.ceil(tokens / sizes.context) * layer, head_bytes(model, sizes, predicted, memory))


def head_bytes(model: Any, sizes: ParallelSizes, predicted: int, memory: int | None) -> int:
    """Hidden states that are read, chunks of this rank's logits, and the gradient of its part of the head."""
    config, itemsize = model.config.get_text_config(), _facts(model).itemsize
    own = math.ceil(predicted / sizes.context)
    states = 2 * own * config.hidden_size * max(WIDE, itemsize)
    if _facts(model).head.projection is not None:
        return states
    vocabulary = math.ceil(config.vocab_size / sizes.tensor)
    most = CHUNK_ELEMENTS if memory is None else max(CHUNK_ELEMENTS, int(memory * DEVICE_SHARE / WIDE))
    chunk = WIDE * vocabulary * min(own, max(1, most // vocabulary))
    trained = not _facts(model).adapted
    return states + LOGITS * chunk + (2 * WIDE * vocabulary * config.hidden_size if trained else 0)


def possible_cuts(model: Any, given: ParallelSizes, workers: int) -> list[dict[str, int]]:
    """All sizes that this model and so many workers allow, by their settings; other settings stay as they are given."""
    counts = [size for size in range(1, workers + 1) if workers % size == 0]
    # Tensor ranks exchange in every layer, so they share a machine; a pass of more than 4 stretches has few tokens.
    tensors, contexts = ([size for size in counts if size <= most] for most in (8, 4))
    found = []
    for tensor, pipeline, context, in_full in product(tensors, counts, contexts, (False, True)):
        # Experts on one rank, or over as many ranks of a stage as can be.
        expert = math.gcd(experts_of(model.config) or 1, workers // pipeline) if in_full else 1
        if tensor * pipeline * context > workers or (in_full and expert == 1):
            continue
        sizes = ParallelSizes(
            tensor, pipeline, given.virtual if pipeline > 1 else 1, expert, context, tensor > 1, keys=given.keys
        )
        try:
            check_sizes(sizes, workers)
            check_model(model.config, sizes)
        except (MegatronError, RanksError):
            continue
        names = ("tensor", "pipeline", "context", "expert")
        chosen = dict(zip(names, (tensor, pipeline, context, expert), strict=True))
        found.append({f"{name}_parallel_size": size for name, size in chosen.items() if size > 1})
    return found

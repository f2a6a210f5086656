"""What a run holds on a CUDA device, by formula: its kernels (`kernels/cuda/`, `models/fused_layer.py`) do not run on
the meta device, so that their tensors are written out here.

Bytes of a token in a layer are those that the fused layer saves for its backward pass: input, its norm, queries with
keys and values, attention's output, the middle, its norm, gate and up; and in float32 the logarithms of attention's
sums and two norms' inverses. Logits are float32: a chunk of them is 1/64 of the device, and up to 1/16 of it is kept
for the backward pass. Gradients of matrices are added to float32 sums by the products that make them; only of a model
that is cut over ranks each pass has its own. Tests count the same layer on the meta device in float32, to the byte.

Shapes: T tokens of a pass, N of them with log-probs, V vocabulary, E width, I width of the gated layer, H query heads
and K key heads of size D.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from posttrain.kernels.cuda import DEPTH, FINE, LEAST_ROWS, MOST_TOKENS, bucket
from posttrain.kernels.decode import BLOCK
from posttrain.kernels.logprob_head import CHUNK_ELEMENTS, DEVICE_SHARE, KEPT_SHARE, kept_chunks
from posttrain.models.decodable import KNOWN
from posttrain.models.forward import ValueModel
from posttrain.planning.meta_models import is_scorer

WIDE = 4  # bytes of a float32

_FIRST_LOW = re.compile(r"\blayers\.0\..*\.lora_A\.")


@dataclass(frozen=True)
class Sizes:
    """What of a model decides how much its kernels hold."""

    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    size: int
    vocabulary: int
    itemsize: int
    normed_heads: bool
    ranks: int = 0  # ranks of a layer's adapters, added up; with adapters the head has no gradient
    bare_head: bool = True  # logits are one matrix product, and no more

    @property
    def columns(self) -> int:
        """Of queries, keys and values together."""
        return (self.heads + 2 * self.key_heads) * self.size

    @property
    def kept(self) -> int:
        """Bytes of one token that a layer keeps for its backward pass."""
        # Input, its norm, the middle and its norm; queries, keys and values; attention's output; gate and up.
        halves = 4 * self.width + self.columns + self.heads * self.size + 2 * self.inner + self.ranks
        wide = self.heads + 2
        if self.normed_heads:
            halves += (self.heads + self.key_heads) * self.size
            wide += self.heads + self.key_heads
        return halves * self.itemsize + wide * WIDE

    @property
    def passing(self) -> int:
        """Bytes of one token that are alive at once in a layer that keeps nothing."""
        # Three of the model's width, and either attention's tensors or the gated layer's: never both at once.
        halves = 3 * self.width + max(self.columns + self.heads * self.size, 3 * self.inner)
        return halves * self.itemsize

    def going_back(self, wanted: float) -> int:
        """Bytes of one token that a layer's backward pass makes beside what was kept: gradients of what it kept, of
        gate and up and of their product once more (of the last layer for a share `wanted` of the tokens), and the flash
        kernel's own: a float32 sum of the queries' gradient, gradients of keys and values for every query head."""
        out = self.heads * self.size
        halves = wanted * (3 * self.inner + self.width + out) + 2 * self.columns + out + 3 * self.width
        gated = wanted * (4 * self.inner + self.width)  # before attention's
        return int(max(halves * self.itemsize + out * (WIDE + 2 * self.itemsize), gated * self.itemsize))


def sizes_of(model: Any) -> Sizes | None:
    """None for a model whose passes these kernels do not serve: other families, values, scores, float32, 4 bits."""
    if isinstance(model, ValueModel) or is_scorer(model):
        return None
    settings, weight = model.config.get_text_config(), next(model.parameters())
    if settings.model_type not in KNOWN or settings.hidden_act != "silu" or weight.dtype.itemsize != 2:
        return None
    heads = settings.num_attention_heads
    size = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    if size % 8 or size > 256 or any(hasattr(p, "held_bytes") for p in model.parameters()):
        return None
    return Sizes(
        layers=settings.num_hidden_layers,
        width=settings.hidden_size,
        inner=settings.intermediate_size,
        heads=heads,
        key_heads=settings.num_key_value_heads,
        size=size,
        vocabulary=settings.vocab_size,
        itemsize=weight.dtype.itemsize,
        normed_heads=settings.model_type == "qwen3",
        ranks=sum(len(p) for name, p in model.named_parameters() if _FIRST_LOW.search(name)),
        bare_head=not any(
            "lm_head" in name and not name.endswith("head.weight") for name, _ in model.named_parameters()
        ),
    )


def chunk_bytes(sizes: Sizes, tokens: int, memory: int) -> int:
    """Logits that are held at once."""
    most = max(CHUNK_ELEMENTS, int(memory * DEVICE_SHARE / WIDE)) // sizes.vocabulary
    return WIDE * sizes.vocabulary * min(tokens, max(1, most))


def update_bytes(
    sizes: Sizes, tokens: int, predicted: int, checkpointing: bool, memory: int, *, alone: bool = True
) -> tuple[int, int]:
    """(kept for the backward pass, most alive besides weights and summed gradients), of `tokens` with log-probs of
    `predicted`, in a process that has the model `alone` or cut over ranks. The worst moment is the head's backward pass
    or the last layer's, when the tensors of the layers before it are still there, or, where few tokens are predicted,
    that of the layer before; with checkpointing the layer is computed again first. At the end there is the gradient of
    the look-up."""
    each = sizes.width * sizes.itemsize if checkpointing else sizes.kept
    rotation, states = 2 * tokens * sizes.size * sizes.itemsize, 2 * predicted * sizes.width * sizes.itemsize
    activations = sizes.layers * tokens * each + rotation + states
    logits, chunk = WIDE * predicted * sizes.vocabulary, chunk_bytes(sizes, predicted, memory)
    chunks = [chunk] * (logits // max(1, chunk)) + [logits % max(1, chunk)]
    held = min(logits, (kept_chunks(chunks, memory * KEPT_SHARE) + 1) * chunk)
    table = sizes.vocabulary * sizes.width
    shares = 0 if sizes.ranks or alone else 2 if logits > chunk else 1  # of the head's gradient: all, and a chunk's
    head = held + chunk * sizes.itemsize // WIDE + shares * WIDE * table
    head += predicted * sizes.width * WIDE  # and the last norm's input
    again = sizes.kept if checkpointing else 0
    layer = tokens * (sizes.going_back(min(1.0, predicted / tokens)) + again)
    if sizes.layers > 1:  # all tokens go through the one before it, whose next has let go what it kept
        layer = max(layer, tokens * (sizes.going_back(1.0) + again - each))
    look_up = 0 if sizes.ranks else sizes.itemsize * table
    return activations, max(activations + max(head, layer), look_up)


def scoring_bytes(sizes: Sizes, tokens: int, predicted: int, memory: int) -> int:
    """Most bytes alive in a pass without gradient, besides the weights."""
    rotation = 2 * tokens * sizes.size * sizes.itemsize
    head = (tokens + 2 * predicted) * sizes.width * sizes.itemsize + chunk_bytes(sizes, predicted, memory)
    return rotation + max(tokens * (sizes.passing + 2 * sizes.width * sizes.itemsize), head)


def captured_bytes(sizes: Sizes, rows: int, longest: int, *, hopper: bool) -> int:
    """Held by captured decode steps for as long as there are any: the rows' buffers, and the tensors of one step of the
    largest graph, which all graphs share. On Hopper only the graphs of few rows write logits."""
    size = bucket(rows)
    table = 1 << max(0, (-(-longest // BLOCK)).bit_length())
    numbers = 3 * 8 + 12 * 4 + 2 * 4 * MOST_TOKENS + 4 * table + 8 * -(-sizes.vocabulary // FINE)
    writing = size
    if hopper and sizes.bare_head and sizes.width % DEPTH == 0:
        writing = max(few for few in map(bucket, range(min(size, LEAST_ROWS - 1) + 1)) if few < LEAST_ROWS)
    return size * (numbers + sizes.passing) + writing * WIDE * sizes.vocabulary


def prefill_bytes(sizes: Sizes, tokens: int, prompts: int) -> int:
    """Most bytes alive while prompts are computed: a flat pass, or the logits after each prompt."""
    return max(tokens * sizes.passing, prompts * (WIDE * sizes.vocabulary + sizes.width * sizes.itemsize))

"""A fast decoder for Qwen2, Qwen3, Llama, Mistral and their mixtures of experts (with OLMoE): flat tokens, fused
weights, a paged cache.

It computes the same function as transformers' module, over the same weights; `paged_decoder.py` is the general
way, and `decodable.py` says which models need it. Several ranks may hold one model, each a part of every layer
(`shards.py`): all of them get the same calls and return the same results.

Shapes: T tokens of one step, N of them wanted, E width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.kernels import cuda
from posttrain.kernels.decode import BLOCK, LayerCache, StepTokens, add_rms_norm, attention
from posttrain.kernels.fp8 import Fp8Weight
from posttrain.kernels.quantized import Quantized
from posttrain.kernels.tensor_parallel import Team
from posttrain.kernels.train import norm_forward, split_heads
from posttrain.kernels.whole_step import MATRICES, DecodeRows, EndWeights, LayerWeights, WholeStep, can_run_whole
from posttrain.models.adapter_files import take_adapters
from posttrain.models.arena import Arena, Projection
from posttrain.models.decodable import window_of
from posttrain.models.feed_forward import Gated, Mixture, feed_forward
from posttrain.models.forward import head_of, without_adapters
from posttrain.models.shards import WeightShards

KEPT = 2**28  # packed copies up to this many bytes keep their memory: allocating it again costs more than filling it
# Returns a layer's cache by its number, key heads and head size; created at the first request.
Caches = Callable[[int, int, int], LayerCache]


@dataclass
class _Layer:
    qkv: Projection
    out: Projection
    feed: Gated | Mixture
    before: torch.Tensor  # norm weights
    between: torch.Tensor
    heads: tuple[torch.Tensor, torch.Tensor] | None
    all_heads: tuple[torch.Tensor, torch.Tensor] | None  # for a norm over all heads of a token at once
    window: int | None

    def weights(self) -> LayerWeights:
        assert isinstance(self.feed, Gated)
        query_norm, key_norm = self.heads or (None, None)
        parts = dict(zip(MATRICES, self.projections, strict=True))
        matrices = (self.out.weight, self.feed.gate_up.weight, self.feed.down.weight)
        norms = (self.before, self.between, query_norm, key_norm)
        adapted = {name: part.merged for name, part in parts.items() if part.adapters}
        return LayerWeights(self.qkv.weight, self.qkv.bias, *matrices, *norms, self.window, adapted)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.out, *self.feed.projections

    def hold_in_fp8(self) -> None:
        for projection in self.projections:
            projection.fp8 = Fp8Weight.of(projection.weight)  # which the trainer may have already
        if isinstance(self.feed, Mixture):
            self.feed.hold_in_fp8()

    def fp8_copies(self) -> Iterator[Fp8Weight]:
        yield from (projection.fp8 for projection in self.projections if projection.fp8 is not None)
        if isinstance(self.feed, Mixture):
            yield from self.feed.fp8 or ()


class _Routes:
    """Records the experts of a step's tokens layer by layer, and writes them to the store of all tokens in the cache.

    Shapes: P places in the cache and an extra one, L layers with experts, K experts of a token.
    """

    def __init__(self, store_PLK: torch.Tensor | None, tokens: int) -> None:
        self.store_PLK, self.layer = store_PLK, 0
        self.noted_TLK = None if store_PLK is None else store_PLK.new_empty(tokens, *store_PLK.shape[1:])

    def through(self, feed: Gated | Mixture, x_TE: torch.Tensor | Quantized, *, captured: bool = False) -> torch.Tensor:
        """Return the output of a layer's feed-forward part, and record its experts."""
        if self.noted_TLK is None or not isinstance(feed, Mixture):
            return feed.captured(x_TE) if captured else feed(x_TE)
        routes_TK = self.noted_TLK[:, self.layer]
        self.layer += 1
        return feed.captured(x_TE, routes_TK) if captured else feed(x_TE, routes_TK)

    def store(self, places_T: torch.Tensor) -> None:
        assert self.store_PLK is not None and self.noted_TLK is not None
        self.store_PLK[places_T] = self.noted_TLK  # sequences that have ended write to place -1, the extra one


class FastDecoder:
    """Computes hidden states and logits of flat tokens."""

    def __init__(
        self,
        module: Any,
        *,
        share: bool,
        team: Team | None = None,
        device: torch.device | None = None,
        exact: bool = False,
    ) -> None:
        # With a team, this rank holds its shard of the model, copied to `device`. `exact`: log-probs are bitwise
        # identical to those of a training pass.
        self.module, self.share, self.team, self.device, self.fp8 = module, share, team, device, False
        self.exact = exact
        self.graphs: Any = None  # captured steps, on a CUDA device
        self.is_released = False  # whether it holds no weights, because they were moved to other memory
        self._bind()

    def _bind(self) -> None:
        base = without_adapters(self.module)
        config, stack = base.config, base.base_model
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.size, self.scale = stack.layers[0].self_attn.head_dim, stack.layers[0].self_attn.scaling
        self.shards = None if self.team is None else WeightShards(self.team, config, self.size)
        if self.shards is not None:
            self.heads, self.key_heads, self.vocabulary = self.shards.heads, self.shards.key_heads, config.vocab_size
        self.arena = Arena(self.module, share=self.share, shards=self.shards, device=self.device)
        self.epsilon = config.rms_norm_eps
        self.prefix = base.base_model_prefix
        self.layers = [self._layer(number, layer, config) for number, layer in enumerate(stack.layers)]
        self.embedding, self.norm = self._named("embed_tokens.weight"), self._named("norm.weight")
        if self.fp8:
            self.use_fp8()
        self.head = self.arena.projection("lm_head", [head_of(self.module)])
        for projection in self._projections():
            projection.exact = self.exact
        self.rotary, self.rotation = stack.rotary_emb, None
        self.whole: WholeStep | None = None
        if self.graphs is not None:
            self.graphs.forget()
        self.room: torch.Tensor | None = None  # memory of packed copies, kept if it is small
        self.copies_old, self.is_released = True, False

    def use_fp8(self) -> None:
        """Compute the products of all layers with fp8 copies of weights and inputs; not embedding, router and head."""
        self.fp8, self.copies_old = True, True
        for layer in self.layers:
            layer.hold_in_fp8()
        if self.graphs is not None:
            self.graphs.forget()

    def _named(self, name: str) -> torch.Tensor:
        return self.arena.named[f"{self.prefix}.{name}"]

    def _layer(self, number: int, layer: Any, config: Any) -> _Layer:
        fused, name, module = self.arena.layers[number], f"layers.{number}", layer.self_attn
        norms, by_head = None, False
        if hasattr(module, "q_norm"):
            norms = (self._named(f"{name}.self_attn.q_norm.weight"), self._named(f"{name}.self_attn.k_norm.weight"))
            by_head = len(norms[0]) == self.size
        return _Layer(
            fused["qkv"],
            fused["out"],
            feed_forward(self.arena, number, layer.mlp, f"{self.prefix}.{name}.mlp"),
            before=self._named(f"{name}.input_layernorm.weight"),
            between=self._named(f"{name}.post_attention_layernorm.weight"),
            heads=norms if by_head else None,
            all_heads=None if by_head else norms,
            window=window_of(layer),
        )

    def _norm(
        self, residual_TE: torch.Tensor, added_TE: torch.Tensor | None, weight_E: torch.Tensor, quantized: bool
    ) -> torch.Tensor | Quantized:
        # The result is in fp8 if everything that reads it accepts fp8.
        if not quantized:
            return add_rms_norm(residual_TE, added_TE, weight_E, self.epsilon)
        from posttrain.kernels.cuda import fp8

        return fp8.add_rms_norm(residual_TE, added_TE, weight_E, self.epsilon)

    def _qkv(self, layer: _Layer, x_TE: torch.Tensor | Quantized) -> torch.Tensor:
        # Some models (OLMoE) normalize queries and keys over all heads at once.
        qkv_TC = layer.qkv(x_TE)
        if self._prepares_heads and layer.heads is not None:
            self._norm_heads(qkv_TC, layer.heads)
        if layer.all_heads is not None:
            sizes = [self.heads * self.size, self.key_heads * self.size]
            for part, weight in zip(qkv_TC.split([*sizes, sizes[1]], 1), layer.all_heads, strict=False):
                part.copy_(F.rms_norm(part, weight.shape, weight, self.epsilon))
        return qkv_TC

    @property
    def _prepares_heads(self) -> bool:
        # On a CUDA device, exact norms and rotations of heads are made by training's kernels.
        return self.exact and cuda.runs_here(self.embedding)

    def _norm_heads(self, qkv_TC: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor]) -> None:
        sizes = [self.heads * self.size, self.key_heads * self.size]
        for part, weight in zip(qkv_TC.split([*sizes, sizes[1]], 1), norms, strict=False):
            normed, _ = norm_forward(part.reshape(-1, self.size), weight, self.epsilon)
            part.copy_(normed.view(part.shape))

    def hidden(
        self,
        step: StepTokens,
        caches: Caches,
        wanted_N: torch.Tensor | None = None,
        routes_PLK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return final hidden states of the wanted tokens (ascending; all, if None). All tokens enter the caches, and
        their experts `routes_PLK`, by their places in the cache."""
        self._refresh_weights()
        rotation = self._rotation(step.longest, step.device)
        residual_TE = self._embedded(step.ids_T)
        if self.whole is not None:
            found = [caches(number, self.key_heads, self.size) for number in range(len(self.layers))]
            residual_TE = self.whole.run(residual_TE, step, found, rotation, wanted_N)
            return add_rms_norm(residual_TE, None, self.norm, self.epsilon)
        added_TE: torch.Tensor | None = None
        noted = _Routes(routes_PLK, len(step.ids_T))
        # After the last attention only wanted tokens are computed, unless the routes of all tokens are recorded.
        narrow = wanted_N if routes_PLK is None else None
        for number, layer in enumerate(self.layers):
            x_TE = self._norm(residual_TE, added_TE, layer.before, layer.qkv.takes_quantized)
            cache = caches(number, self.key_heads, self.size)
            attended = self._attend(layer, self._qkv(layer, x_TE), cache, step, rotation)
            if narrow is not None and number == len(self.layers) - 1:
                attended, residual_TE = attended[narrow], residual_TE[narrow]
            added_TE = self._sum_over_ranks(layer.out(attended))
            x_TE = self._norm(residual_TE, added_TE, layer.between, layer.feed.takes_quantized)
            added_TE = self._sum_over_ranks(noted.through(layer.feed, x_TE))
        if routes_PLK is not None:
            noted.store(step.slots_T)
            if wanted_N is not None and added_TE is not None:
                residual_TE, added_TE = residual_TE[wanted_N], added_TE[wanted_N]
        return add_rms_norm(residual_TE, added_TE, self.norm, self.epsilon)

    def _embedded(self, ids_T: torch.Tensor) -> torch.Tensor:
        if self.shards is None:
            return F.embedding(ids_T, self.embedding)
        places_T = ids_T - self.shards.vocabulary.start
        others_T = (places_T < 0) | (places_T >= len(self.embedding))
        rows_TE = F.embedding(places_T.masked_fill(others_T, 0), self.embedding)
        return self._sum_over_ranks(rows_TE.masked_fill_(others_T[:, None], 0))

    def _sum_over_ranks(self, part_TE: torch.Tensor) -> torch.Tensor:
        # Over the ranks that share the model.
        return part_TE if self.team is None else self.team.sum(part_TE)

    def decode(self, rows: DecodeRows, caches: Caches, routes_PLK: torch.Tensor | None = None) -> bool:
        """Decode for the rows' number of steps, if the weights' layout allows it; return whether it was done. Routes
        are noted as by `hidden`."""
        if self.team is not None:  # ranks communicate in every layer, so they decode token by token
            return False
        if not rows.steps:
            if self.graphs is not None:
                self.graphs.collect(rows)
            return True
        self._follow_weights()
        if cuda.runs_here(self.embedding):
            return rows.drafts is None and self._decode_captured(rows, caches, routes_PLK)
        if self.whole is None:
            return False
        found = [caches(number, self.key_heads, self.size) for number in range(len(self.layers))]
        self.whole.decode(rows, found, self._rotation(rows.longest, self.embedding.device))
        return True

    def _decode_captured(self, rows: DecodeRows, caches: Caches, routes_PLK: torch.Tensor | None) -> bool:
        # Captured graphs hold the addresses of weights, cache and rotation: they are captured again if one moves.
        from posttrain.kernels.cuda.graphs import GraphedSteps

        self._refresh_weights()
        rotation = self._rotation(rows.longest, self.embedding.device)
        found = [caches(number, self.key_heads, self.size) for number in range(len(self.layers))]
        if self.graphs is None:
            sizes = {"vocabulary": self.head.weight.shape[0], "key_heads": self.key_heads, "block": BLOCK}
            self.graphs = GraphedSteps(self, **sizes, device=self.embedding.device)
        addresses = [tensor.data_ptr() for tensor in (*chain.from_iterable(found), *rotation, self.embedding)]
        addresses.append(0 if routes_PLK is None else routes_PLK.data_ptr())
        self.captured_caches, self.captured_routes = found, routes_PLK
        try:
            self.graphs.decode(rows, addresses)
        finally:
            # Only the pool may refer to the caches: when it sleeps, their memory must be freed.
            self.captured_caches, self.captured_routes = [], None
        return True

    captured_caches: list[LayerCache]
    captured_routes: torch.Tensor | None = None

    def next_hidden(self, tokens_B: torch.Tensor, rows: Any) -> torch.Tensor:
        """Return final hidden states of each row's newest token, which enters the cache; all calls are captured."""
        from posttrain.kernels.cuda.paged_attention import decode_attention

        attend = self._attend_exactly if self.exact else decode_attention
        residual_BE, added_BE = F.embedding(tokens_B, self.embedding), None
        how: dict[str, Any] = {"scale": self.scale, "rotation": self.rotation, "epsilon": self.epsilon}
        if self.exact:
            how["angles"] = self._angles(rows.positions)
        noted = _Routes(self.captured_routes, len(tokens_B))
        for layer, cache in zip(self.layers, self.captured_caches, strict=True):
            x_BE = self._norm(residual_BE, added_BE, layer.before, layer.qkv.takes_quantized)
            qkv_BC = self._qkv(layer, x_BE)
            added_BE = layer.out(attend(qkv_BC, cache, rows, window=layer.window, norms=layer.heads, **how))
            x_BE = self._norm(residual_BE, added_BE, layer.between, layer.feed.takes_quantized)
            added_BE = noted.through(layer.feed, x_BE, captured=True)
        if self.captured_routes is not None:
            noted.store(rows.slots)
        return add_rms_norm(residual_BE, added_BE, self.norm, self.epsilon)

    def _rotated(
        self, qkv_TC: torch.Tensor, cosine_TD: torch.Tensor, sine_TD: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # By training's own kernel: in another kernel the compiler may fuse other operations and round differently.
        return split_heads(qkv_TC, self.heads, self.key_heads, cosine_TD, sine_TD)

    def _angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.rotation is not None
        cosine_TD, sine_TD = (table.index_select(0, positions_T).to(self.embedding.dtype) for table in self.rotation)
        return cosine_TD, sine_TD

    def _attend_exactly(self, qkv_BC: torch.Tensor, cache: LayerCache, rows: Any, *, scale, angles, **_: Any):
        # Heads are normed already, and there is no window.
        from posttrain.kernels.cuda.elementwise import rotate_and_store
        from posttrain.kernels.cuda.ordered import newest_attention

        query, key, value = self._rotated(qkv_BC, *angles)
        places = (cache, rows.positions, rows.slots)
        query_BHD = rotate_and_store(query, key, value, *places, rotation=None, norms=None, epsilon=0.0)
        return newest_attention(query_BHD, cache, rows.positions, rows.prompts, rows.table, scale=scale)

    def head_weight(self) -> torch.Tensor | None:
        return self.head.bare

    def _attend(self, layer: _Layer, qkv: torch.Tensor, cache: LayerCache, step: StepTokens, rotation) -> torch.Tensor:
        norms = layer.heads
        if self._prepares_heads:
            query, key, value = self._rotated(qkv, *self._angles(step.positions_T))
            norms = rotation = None
        else:
            heads = qkv.unflatten(1, (-1, self.size))
            query, key, value = heads.split([self.heads, self.key_heads, self.key_heads], dim=1)
        return attention(
            query, key, value, cache, step,
            scale=self.scale, window=layer.window, rotation=rotation, norms=norms, epsilon=self.epsilon,
            exact=self.exact,
        )  # fmt: skip

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        part_NV = self.head.wide(hidden_NE)
        return part_NV if self.team is None else self.team.joined(part_NV, self.vocabulary)

    def _rotation(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        # Cosines and sines by position, from the model's own rotary embedding and in its precision.
        if self.rotation is None or len(self.rotation[0]) < length or self.rotation[0].device != device:
            places = torch.arange(max(256, 2 * length), device=device)[None]
            like = self.embedding.new_empty(0, device=device)
            wide = torch.promote_types(like.dtype, torch.float32)
            cosine, sine = (x[0].to(wide).contiguous() for x in self.rotary(like, places))
            self.rotation = (cosine, sine)
        return self.rotation

    def _refresh_weights(self) -> None:
        # Weights may have moved, and adapters may have changed.
        self._follow_weights()
        if self.copies_old:
            for projection in self._projections():
                projection.copy_adapters()
            for copy in chain.from_iterable(layer.fp8_copies() for layer in self.layers):
                copy.refill()
            self.copies_old = False

    def _follow_weights(self) -> None:
        if self.is_released or self.arena.is_outdated():
            self._bind()

    def let_go(self) -> None:
        """Drop references to weights that were moved away, so that their memory can be reused until they return."""
        if self.is_released or not self.arena.is_outdated():
            return
        self.drop_fast_copies()
        if self.graphs is not None:
            self.graphs.forget()
        empty = self.embedding.new_empty(0, device="cpu")
        self.layers, self.embedding, self.norm = [], empty, empty
        self.head = Projection(empty, None, [], adapters=False)
        self.arena.layers, self.arena.named = [], {}
        self.rotation, self.is_released = None, True

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.is_released:
            self._bind()
        self.arena.load(take_adapters(self.module, weights))

    def make_fast_copies(self) -> None:
        """Create copies that multiply faster; called when the weights stay the same for many steps."""
        if self.whole is not None or self.head.packed is not None or self.fp8:
            return
        self._follow_weights()
        # Most products are those of the experts, which have no such copies.
        if any(isinstance(layer.feed, Mixture) for layer in self.layers):
            return
        if self.team is None and self._may_merge() and self._plain_biases() and can_run_whole(self.layers[0].weights()):
            sizes = {"heads": self.heads, "key_heads": self.key_heads, "size": self.size}
            weights = [layer.weights() for layer in self.layers]
            ends = EndWeights(self.embedding, self.norm, self.head.merged() if self.head.adapters else self.head.weight)
            self.whole = WholeStep(weights, ends, **sizes, scale=self.scale, epsilon=self.epsilon, room=self.room)
            self.room = self.whole.room if self.whole.room.nbytes <= KEPT else None
            self.head.pack()
            return
        for projection in self._projections():
            projection.pack()

    def drop_unsharded_weights(self) -> None:
        """Free the full weights once this rank has copied its shard."""
        for weight in self.module.parameters():
            weight.data = weight.data.new_empty(0)

    def drop_fast_copies(self) -> None:
        """Drop the copies, because the weights have changed or the memory is needed."""
        self.whole, self.copies_old = None, True
        for projection in self._projections():
            projection.packed = projection.whole = None

    @contextmanager
    def without_fast_copies(self) -> Iterator[None]:
        """Compute with the weights themselves, also where there are copies, which round differently."""
        self._follow_weights()
        whole, self.whole = self.whole, None
        packed = [(projection, projection.packed) for projection in self._projections()]
        for projection, _ in packed:
            projection.packed = None
        try:
            yield
        finally:
            self.whole = whole
            for projection, copy in packed:
                projection.packed = copy

    def _may_merge(self) -> bool:
        # In bfloat16, merging an adapter would round away most of a small change.
        adapted = any(projection.adapters for projection in self._projections())
        return not adapted or self.embedding.dtype is torch.float32

    def _plain_biases(self) -> bool:
        # Only the first product of a layer may have a bias.
        products = [p for layer in self.layers for p in layer.projections[1:]]
        return all(product.bias is None for product in (*products, self.head))

    def _projections(self) -> Iterator[Projection]:
        for layer in self.layers:
            yield from layer.projections
        yield self.head

"""Attention with compressed keys and values (MLA, DeepSeek-V2 and V3), over Megatron-Core's parallel matrices.

Megatron-Core's own MLA needs TransformerEngine for packed rows, and builds its down projections as column-parallel
matrices that every tensor rank gathers again. Here they are whole on every rank, as they are small, and only the up
projections, by heads, are cut.

Shapes: T packed tokens, H heads of this rank, D size of a query's or key's head, V of a value's, R of its rotated part.
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain.engine.megatron.package import part
from posttrain.kernels.packed_attention import active_layout
from posttrain.kernels.sequence_parallel import stretch_attention

EPSILON = 1e-6  # of the norms of latents: transformers does not take it from the model's config


class LatentAttention(torch.nn.Module):
    """Takes the place of `self_attention` in a layer of Megatron-Core. `model` is the Hugging Face config; cosines and
    sines are multiplied by `rotation_factor`."""

    def __init__(
        self,
        config: Any,
        *_: Any,
        model: Any,
        scale: float,
        rotation_factor: float,
        pg_collection: Any,
        **__: Any,
    ) -> None:
        super().__init__()
        self.scale, self.rotation_factor = scale, rotation_factor
        self.interleaved = getattr(model, "rope_interleave", True)
        self.latent, heads = model.kv_lora_rank, model.num_attention_heads
        self.plain, self.rotated, self.value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        layers = part("tensor_parallel.layers")
        made = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": pg_collection.tp}
        width, query = model.hidden_size, model.q_lora_rank

        def whole(inputs: int, outputs: int) -> torch.nn.Linear:
            return torch.nn.Linear(inputs, outputs, bias=False, dtype=config.params_dtype)

        if query is not None:
            self.query_down, self.query_norm = whole(width, query), torch.nn.RMSNorm(query, EPSILON)
        self.compressed_queries = query is not None
        self.query_up = layers.ColumnParallelLinear(query or width, heads * (self.plain + self.rotated), **made)
        self.latent_down = whole(width, self.latent + self.rotated)
        self.latent_norm = torch.nn.RMSNorm(self.latent, EPSILON)
        self.latent_up = layers.ColumnParallelLinear(self.latent, heads * (self.plain + self.value), **made)
        self.linear_proj = layers.RowParallelLinear(
            heads * self.value, width, input_is_parallel=True, skip_bias_add=True, **made
        )
        region, self.group = part("tensor_parallel.mappings"), pg_collection.tp
        # From what all tensor ranks have, or from their stretches of it, to what their own heads read.
        self.for_heads = (
            region.gather_from_sequence_parallel_region
            if config.sequence_parallel
            else region.copy_to_tensor_model_parallel_region
        )

    def forward(self, hidden: torch.Tensor, attention_mask: Any = None, *, rotary_pos_emb: Any, **_: Any) -> Any:
        """((T, 1, E), no bias) from (T, 1, E): one sequence that holds all rows, or this rank's stretch of it."""
        layout = active_layout()
        assert layout is not None, "rows of this engine are packed"
        compressed = self.query_norm(self.query_down(hidden)) if self.compressed_queries else hidden
        query = self.query_up(compressed)[0][:, 0].unflatten(-1, (-1, self.plain + self.rotated))
        latent, key_rotated = self.latent_down(hidden).split([self.latent, self.rotated], -1)
        # All heads read this part of the key: the gradients of all tensor ranks' heads are added up.
        key_rotated = self.for_heads(key_rotated, group=self.group)
        both = self.latent_up(self.latent_norm(latent))[0][:, 0].unflatten(-1, (-1, self.plain + self.value))
        key_plain, value_THV = both.split([self.plain, self.value], -1)
        query_plain, query_rotated = query.split([self.plain, self.rotated], -1)
        angles = rotary_pos_emb[:, 0]  # (T, 1, R)
        query_THD = torch.cat([query_plain, self._rotate(query_rotated, angles)], -1)
        shared = self._rotate(key_rotated, angles).expand(-1, query.shape[1], -1)
        key_THD = torch.cat([key_plain, shared], -1)
        # The kernels have one size for all three.
        filled = torch.nn.functional.pad(value_THV, (0, query_THD.shape[-1] - self.value))
        out_THD = stretch_attention(query_THD, key_THD, filled, layout, scale=self.scale)
        return self.linear_proj(out_THD[..., : self.value].flatten(1)[:, None])

    def _rotate(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        if self.interleaved:  # pairs lie side by side in the weights
            x = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
        first, second = x.chunk(2, -1)
        cosines, sines = ((f(angles) * self.rotation_factor).to(x.dtype) for f in (torch.cos, torch.sin))
        return x * cosines + torch.cat([-second, first], -1) * sines

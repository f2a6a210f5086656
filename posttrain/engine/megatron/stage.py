"""A pass through this rank's layers: from token ids, or from what the stage before gave, to hidden states or outputs.

Megatron-Core's own attention over packed rows needs TransformerEngine, so `PackedAttention` takes its place.

Shapes: T packed tokens, H heads, D head size, E hidden size, U places whose hidden state is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from posttrain.engine.heads import Head
from posttrain.engine.megatron.groups import RankGroups
from posttrain.engine.megatron.log_probs import vocabulary_parallel_log_probs
from posttrain.engine.megatron.package import buffers_on
from posttrain.engine.packing import Rows
from posttrain.engine.pipeline import Pipeline
from posttrain.engine.runner import Stage
from posttrain.kernels.packed_attention import active_layout, packed_attention, packed_rows


class PackedAttention(torch.nn.Module):
    """Megatron-Core's `core_attention` by posttrain's kernels; every pass opens `packed_rows` around it."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """(T, 1, H x D) from (T, 1, H, D): one sequence that holds all rows."""
        layout = active_layout()
        assert layout is not None, "rows of this engine are packed"
        out_THD = packed_attention(query[:, 0], key[:, 0], value[:, 0], layout, scale=self.scale)
        return out_THD.flatten(1)[:, None]


class MegatronStage(Stage):
    """Megatron-Core's modules of one stage, called one after another on packed rows."""

    module: Any  # a `GPTModel` of megatron.core, which has no types

    def __init__(
        self,
        module: Any,
        config: Any,
        groups: RankGroups,
        pipeline: Pipeline,
        head: Head,
        angles_D: torch.Tensor,
        *,
        device: torch.device,
        padding: int | None,
        recompute: bool,
    ) -> None:
        """`angles_D` is what each position turns the pairs of a head by; `padding` is the token whose embedding learns
        nothing where it is read, as in Hugging Face's models."""
        self.module, self.config, self.groups, self.pipeline, self.head = module, config, groups, pipeline, head
        self.angles_D, self.device = angles_D.to(device, torch.float32), device
        self.padding, self.recompute = padding, recompute

    @contextmanager
    def computing(self, rows: Rows) -> Iterator[None]:
        with packed_rows(rows.layout), buffers_on(self.device):
            yield

    def forward(self, rows: Rows, arrived: torch.Tensor | None, temperature: float) -> Any:
        """Hidden states (T, 1, E) for the next stage; from the last one, numbers (U,) by name."""
        hidden = self._embedded(rows) if self.groups.first else arrived
        half = rows.position_ids[0, :, None].float() * self.angles_D
        rotation = torch.cat([half, half], -1)[:, None, None]
        for layer in self.module.decoder.layers:
            if self.recompute and torch.is_grad_enabled():
                # Nothing random happens in a layer, so that its recomputation needs no random state of before.
                hidden = checkpoint(_through, layer, hidden, rotation, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = _through(layer, hidden, rotation)
        if not self.groups.last:
            return hidden
        assert isinstance(hidden, torch.Tensor)
        hidden = self.module.decoder.final_layernorm(hidden)[:, 0].index_select(0, self.head.places(rows))
        if self.head.projection is not None:
            (name,), values_U = self.head.outputs, getattr(self.module, self.head.projection)(hidden)[:, 0]
            return {name: values_U.to(torch.promote_types(values_U.dtype, torch.float32))}
        log_probs_U, entropy_U = vocabulary_parallel_log_probs(
            hidden,
            self.module.output_layer.weight,
            rows.label_U,
            temperature=temperature,
            vocabulary=self.config.vocab_size,
            group=self.groups.tensor,
        )
        return {"log_probs": log_probs_U, "entropy": entropy_U}

    def _embedded(self, rows: Rows) -> torch.Tensor:
        hidden = self.module.embedding(input_ids=rows.input_ids, position_ids=rows.position_ids)
        if self.padding is None:
            return hidden
        return torch.where((rows.input_ids[0] == self.padding)[:, None, None], hidden.detach(), hidden)


def _through(layer: Any, hidden: Any, rotation: torch.Tensor) -> torch.Tensor:
    return layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotation)[0]

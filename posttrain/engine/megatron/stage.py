"""A pass through this rank's layers: from token ids, or from what the stage before gave, to hidden states or outputs.

Shapes: T packed tokens, E hidden size, U places whose hidden state is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from posttrain.engine.heads import Head
from posttrain.engine.megatron.head import parted_log_probs
from posttrain.engine.megatron.places import Places
from posttrain.engine.packing import Rows


class StagePass(torch.nn.Module):
    """Megatron-Core's modules of one stage, called one after another on packed rows."""

    def __init__(
        self,
        model: Any,
        config: Any,
        places: Places,
        angles_D: torch.Tensor,
        head: Head,
        *,
        padding: int | None,
        recompute: bool,
    ) -> None:
        """`angles_D` is what each position turns the pairs of a head by; `padding` is the token whose embedding learns
        nothing where it is read, as in Hugging Face's models."""
        super().__init__()
        self.head, self.padding = head, padding
        self.model, self.config, self.places, self.recompute = model, config, places, recompute
        self.angles_D: torch.Tensor
        self.register_buffer("angles_D", angles_D.float(), persistent=False)

    def forward(self, rows: Rows, arrived_TE: torch.Tensor | None, temperature: float) -> Any:
        """Hidden states (T, 1, E) for the next stage; from the last one, numbers (U,) by name."""
        if self.places.first:
            hidden = self.model.embedding(input_ids=rows.input_ids, position_ids=rows.position_ids)
            if self.padding is not None:
                hidden = torch.where((rows.input_ids[0] == self.padding)[:, None, None], hidden.detach(), hidden)
        else:
            hidden = arrived_TE
        half = rows.position_ids[0, :, None].float() * self.angles_D
        turns = torch.cat([half, half], -1)[:, None, None]
        for layer in self.model.decoder.layers:
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(_through, layer, hidden, turns, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = _through(layer, hidden, turns)
        if not self.places.last:
            return hidden
        assert isinstance(hidden, torch.Tensor)
        hidden = self.model.decoder.final_layernorm(hidden)[:, 0].index_select(0, self.head.places(rows))
        if self.head.projection is not None:
            (name,), values_U = self.head.outputs, getattr(self.model, self.head.projection)(hidden)[:, 0]
            return {name: values_U.to(torch.promote_types(values_U.dtype, torch.float32))}
        log_probs_U, entropy_U = parted_log_probs(
            hidden,
            self.model.output_layer.weight,
            rows.label_U,
            temperature=temperature,
            vocabulary=self.config.vocab_size,
            group=self.places.tensor,
        )
        return {"log_probs": log_probs_U, "entropy": entropy_U}


def _through(layer: Any, hidden: Any, turns: torch.Tensor) -> torch.Tensor:
    return layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=turns)[0]

"""A value model: any causal LM's decoder with one number per token on top, for the critic."""

from __future__ import annotations

import torch

from posttrain.models.ways import way_of


class ValueModel(torch.nn.Module):
    """The decoder of a causal LM and a linear value head that starts at zero: values begin at 0 everywhere."""

    def __init__(self, language_model: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = language_model.base_model
        self.config, self.way = language_model.config, way_of(language_model)
        weight = next(self.base_model.parameters())  # pyright: ignore
        self.value_head = torch.nn.Linear(self.config.hidden_size, 1, device=weight.device, dtype=weight.dtype)  # pyright: ignore
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)

    def token_values(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """(N,) values in float32 or better."""
        values = self.value_head(hidden_NE)[:, 0].clone()  # a tensor of its own: what wraps the pass hooks into it
        return values.to(torch.promote_types(values.dtype, torch.float32))

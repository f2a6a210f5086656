"""AdamW over the weights of one rank of a cut model: gradients added up over copies, their norm over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from posttrain.config.optim import OptimConfig
from posttrain.engine.megatron.places import Places
from posttrain.engine.optim import Optimizer

EXPERT, QUERY_NORMS = ".local_experts.", (".q_layernorm.", ".k_layernorm.")
TIED_COPY = "output_layer.weight"


class CutOptimizer(Optimizer):
    """`named` are this rank's weights, `cut` names those that tensor ranks hold parts of, and `saved` says how a
    checkpoint calls them."""

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        config: OptimConfig,
        places: Places,
        *,
        cut: set[str],
        saved: Mapping[str, str],
        tied: bool,
    ) -> None:
        super().__init__([(saved[name], weight) for name, weight in named.items()], config)
        self.own_names, self.places, self.cut = list(named), places, cut
        self.tied = tied and places.sizes.pipeline > 1

    def reduce_gradients(self) -> None:
        """After the last pass: what every holder of a weight must know of its gradient."""
        places = self.places
        for name, master in zip(self.own_names, self.masters, strict=True):
            if master.grad is None:
                master.grad = torch.zeros_like(master)  # an expert that no token came to
            if any(kind in name for kind in QUERY_NORMS):  # a tensor rank saw its own heads only
                dist.all_reduce(master.grad, group=places.tensor)
            if self.tied and places.ends is not None and name in (TIED_COPY, "embedding.word_embeddings.weight"):
                dist.all_reduce(master.grad, group=places.ends)
            if EXPERT in name:  # tensor ranks send the same tokens
                dist.all_reduce(master.grad, group=places.expert_data)
                master.grad /= places.sizes.tensor
            else:
                dist.all_reduce(master.grad, group=places.data)

    def _holders(self, name: str) -> float:
        """How many ranks hold this very part of a weight."""
        places = self.places
        if EXPERT in name:
            return places.expert_data.size()
        return places.data.size() * (1 if name in self.cut else places.tensor.size())

    def _clip(self, largest: float) -> torch.Tensor:
        squares = torch.zeros((), dtype=torch.float64, device=self.masters[0].device)
        for name, master in zip(self.own_names, self.masters, strict=True):
            if master.grad is not None and not (self.tied and name == TIED_COPY):
                squares += master.grad.double().square().sum() / self._holders(name)
        dist.all_reduce(squares)
        norm = squares.sqrt()
        factor = float((largest / (norm + 1e-6)).clamp(max=1.0))
        for master in self.masters if factor < 1.0 else ():
            if master.grad is not None:
                master.grad *= factor
        return norm

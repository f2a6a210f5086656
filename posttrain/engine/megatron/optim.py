"""AdamW over the weights that one Megatron rank holds: gradients summed over copies, their norm over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from posttrain.config.optim import OptimConfig
from posttrain.engine.megatron.groups import RankGroups
from posttrain.engine.optim import Optimizer

EXPERT, QUERY_NORMS = ".local_experts.", (".q_layernorm.", ".k_layernorm.")
TIED_COPY = "output_layer.weight"


class MegatronOptimizer(Optimizer):
    """`named` are this rank's weights; `cut` are the names of those that tensor ranks hold parts of, `saved` the names
    in a checkpoint. `tied`: the first and the last stage of a pipeline both hold the embedding."""

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        config: OptimConfig,
        groups: RankGroups,
        *,
        cut: set[str],
        saved: Mapping[str, str],
        tied: bool,
    ) -> None:
        super().__init__([(saved[name], weight) for name, weight in named.items()], config)
        self.own_names, self.groups, self.cut = list(named), groups, cut
        self.tied = tied and groups.sizes.pipeline > 1

    def reduce_gradients(self) -> None:
        """Sum each weight's gradient over the ranks that hold it and saw other tokens or other heads."""
        groups = self.groups
        for name, master in zip(self.own_names, self.masters, strict=True):
            if master.grad is None:
                master.grad = torch.zeros_like(master)  # no token was routed to this expert; others wait for its sum
            if any(kind in name for kind in QUERY_NORMS):  # a tensor rank saw its own heads only
                dist.all_reduce(master.grad, group=groups.tensor)
            if self.tied and groups.ends is not None and name in (TIED_COPY, "embedding.word_embeddings.weight"):
                dist.all_reduce(master.grad, group=groups.ends)
            if EXPERT in name:  # all tensor ranks send the same tokens to it, so that each counts that often
                dist.all_reduce(master.grad, group=groups.expert_data)
                master.grad /= groups.sizes.tensor
            else:
                dist.all_reduce(master.grad, group=groups.data)

    def _holders(self, name: str) -> float:
        """How many ranks hold this same part of a weight."""
        groups = self.groups
        if EXPERT in name:
            return groups.expert_data.size()
        return groups.data.size() * (1 if name in self.cut else groups.tensor.size())

    def clip_gradients(self, largest: float) -> torch.Tensor:
        # A weight with several holders must count once in the norm: each adds its share of the squares.
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

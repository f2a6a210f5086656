"""The optimizer of Megatron-Core's engine: gradients summed over the ranks that hold a weight, and one norm of all.

With `use_distributed_optimizer` every weight has one owner among the ranks with copies of it: the owner alone has its
moments and its float32 master, takes the sum of its gradients, and sends the stepped weight to the others. Whole
weights are dealt out, not stretches, so that checkpoints hold the same entries for any number of copies.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from posttrain.config.root import OptimConfig
from posttrain.engine.megatron.groups import RankGroups
from posttrain.engine.optim import Optimizer

EXPERT = ".local_experts."
EMBEDDING, TIED_COPY = "embedding.word_embeddings.weight", "output_layer.weight"


class MegatronOptimizer(Optimizer):
    """`named` are this rank's weights; `cut` are the names of those that tensor ranks hold parts of, `shares` of those
    whose gradient every tensor rank has a share of; `saved` are the names in a checkpoint. `tied`: the first and the
    last stage of a pipeline both hold the embedding."""

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        config: OptimConfig,
        groups: RankGroups,
        *,
        cut: set[str],
        shares: set[str],
        saved: Mapping[str, str],
        tied: bool,
    ) -> None:
        self.own_names, self.groups, self.cut, self.shares = list(named), groups, cut, shares
        self.tied = tied and groups.sizes.pipeline > 1
        self.owners = _owners(named, groups) if groups.sizes.shared_moments else {}
        held = [self.owners.get(name, self._copies(name).rank()) == self._copies(name).rank() for name in named]
        super().__init__([(saved[name], weight) for name, weight in named.items()], config, held)

    def _copies(self, name: str) -> dist.ProcessGroup:
        """The ranks with this same part of a weight, which computed other rows."""
        return self.groups.expert_data if EXPERT in name else self.groups.data

    def reduce_gradients(self) -> None:
        """Sum each weight's gradient over the ranks that hold it and saw other tokens or other heads."""
        groups = self.groups
        for name, master in zip(self.own_names, self.masters, strict=True):
            if master.grad is None:
                master.grad = torch.zeros_like(master)  # no token was routed to this expert; others wait for its sum
            if name in self.shares:
                dist.all_reduce(master.grad, group=groups.tensor)
            if self.tied and groups.ends is not None and name in (TIED_COPY, EMBEDDING):
                dist.all_reduce(master.grad, group=groups.ends)
            if (owner := self.owners.get(name)) is None:
                dist.all_reduce(master.grad, group=self._copies(name))
            else:
                dist.reduce(master.grad, group=self._copies(name), group_dst=owner)
                if owner != self._copies(name).rank():
                    master.grad = None  # its room is free for the step
                    continue
            if (
                EXPERT in name and not groups.sizes.sequence
            ):  # all tensor ranks send the same tokens to it, so that each counts that often
                master.grad /= groups.sizes.tensor

    @torch.no_grad()
    def _write_back(self) -> None:
        super()._write_back()
        for name, weight in zip(self.own_names, self.weights, strict=True):
            if name in self.owners:
                dist.broadcast(weight.data, group=self._copies(name), group_src=self.owners[name])

    def _holders(self, name: str) -> float:
        """How many ranks have the gradient of this same part of a weight."""
        copies = 1 if name in self.owners else self._copies(name).size()
        return copies * (1 if name in self.cut or EXPERT in name else self.groups.tensor.size())

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


def _owners(named: Mapping[str, torch.nn.Parameter], groups: RankGroups) -> dict[str, int]:
    """The rank, among those with copies of it, that steps each weight; every rank gets about as many numbers."""
    owners, loads = {}, {False: [0] * groups.data.size(), True: [0] * groups.expert_data.size()}

    def order(name: str) -> tuple[bool, int]:
        # Both copies of a tied embedding first: with owners of the same rank their sums are bitwise identical.
        return name not in (EMBEDDING, TIED_COPY), -named[name].numel()

    for name in sorted(named, key=order):
        load = loads[EXPERT in name]
        owners[name] = load.index(min(load))
        load[owners[name]] += named[name].numel()
    return owners

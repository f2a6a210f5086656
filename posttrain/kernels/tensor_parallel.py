"""Tensor parallelism: ranks that hold one model together, each some of its heads and of its feed-forward columns.

Every rank multiplies with its part of a layer, and the results are summed twice in a layer. All ranks then have bitwise
identical numbers, since each sum is made once and sent to all. So ranks that get the same calls make the same
decisions, and scheduling needs no messages of its own.

Shapes: N tokens, C columns of one rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from posttrain.errors import UserError


class LockStepError(UserError):
    """Ranks that hold one model diverged."""


class Team:
    """This rank among those that hold one model with it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = group.rank(), group.size()

    def span(self, count: int) -> slice:
        """This rank's share of so many."""
        # Shares differ by at most one, for any count.
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, in place."""
        dist.all_reduce(part, group=self.group)
        return part

    def joined(self, part_NC: torch.Tensor, columns: int) -> torch.Tensor:
        """All ranks' shares of `columns` columns, side by side."""
        widest = -(-columns // self.size)  # all_gather wants equal shapes: shares are padded to the widest
        own = part_NC.new_zeros(len(part_NC), widest)
        own[:, : part_NC.shape[1]] = part_NC
        parts = own.new_empty(self.size, *own.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), own, group=self.group)
        edges = [columns * rank // self.size for rank in range(self.size + 1)]
        return torch.cat([parts[rank, :, : edges[rank + 1] - edges[rank]] for rank in range(self.size)], 1)

    def first(self, number: int) -> int:
        """The number that the first rank gives."""
        return self._all(number)[0]

    def smallest(self, number: int) -> int:
        """Of the numbers that all ranks give."""
        return min(self._all(number))

    def check_same(self, digest: int, what: str) -> None:
        """Raise if ranks give different digests of what they have computed."""
        found = self._all(digest)
        other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
        if other is not None:
            ranks = dist.get_process_group_ranks(self.group)
            raise LockStepError(
                f"ranks {ranks[0]} and {ranks[other]} hold one rollout engine, but {what} is not the same on both "
                f"({found[0]:x} and {found[other]:x}): a device computes wrongly, or they do not run the same program. "
                "The run continues from its newest checkpoint"
            )

    def _all(self, number: int) -> list[int]:
        own = torch.tensor([number], device=self.device)
        found = own.new_empty(self.size)
        dist.all_gather_into_tensor(found, own, group=self.group)
        return found.tolist()

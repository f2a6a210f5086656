"""Passes through the stages of a pipeline, each on ranks of its own: one forward, one backward in turn (1F1B).

A stage holds the hidden states of as many passes as there are stages behind it, and no more. All stages know the same
passes, and with them the sizes of what travels. With one stage nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Forward = Callable[[int, torch.Tensor | None], Any]
"""(number of the pass, what arrived from the stage before) -> what goes to the next."""
Backward = Callable[[int, torch.Tensor | None], torch.Tensor | None]
"""(number of the pass, gradient from the next stage) -> gradient for the stage before."""


@dataclass(frozen=True)
class Line:
    """The stages, and this rank's place among them; `width` of hidden states of type `dtype`."""

    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    width: int

    @property
    def stage(self) -> int:
        return self.group.rank()

    @property
    def stages(self) -> int:
        return self.group.size()

    def exchange(
        self,
        *,
        ahead: torch.Tensor | None = None,
        back: torch.Tensor | None = None,
        tokens_from_before: int | None = None,
        tokens_from_after: int | None = None,
    ) -> torch.Tensor | None:
        """Sends and receives at once, so that no two stages wait for each other; gives what was received."""
        before, after = self.stage > 0, self.stage < self.stages - 1
        sent = [(ahead, self.stage + 1)] * (ahead is not None and after)
        sent += [(back, self.stage - 1)] * (back is not None and before)
        wanted = [(tokens_from_before, self.stage - 1)] * (tokens_from_before is not None and before)
        wanted += [(tokens_from_after, self.stage + 1)] * (tokens_from_after is not None and after)
        found = [
            (torch.empty(tokens or 0, 1, self.width, dtype=self.dtype, device=self.device), peer)
            for tokens, peer in wanted
        ]
        operations = [
            dist.P2POp(dist.isend, tensor.detach().contiguous(), group=self.group, group_peer=peer)
            for tensor, peer in sent
            if tensor is not None
        ]
        operations += [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for tensor, peer in found]
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        return found[0][0] if found else None


def forward_only(line: Line, tokens: Sequence[int], forward: Forward) -> None:
    """All passes, without gradient."""
    for number, count in enumerate(tokens):
        line.exchange(ahead=forward(number, line.exchange(tokens_from_before=count)))


def forward_and_backward(line: Line, tokens: Sequence[int], forward: Forward, backward: Backward) -> None:
    """All passes there and back; `tokens` are those of each."""
    count = len(tokens)
    lead = min(line.stages - 1 - line.stage, count)
    for number in range(lead):
        line.exchange(ahead=forward(number, line.exchange(tokens_from_before=tokens[number])))
    arrived = line.exchange(tokens_from_before=tokens[lead]) if lead < count else None
    for number in range(lead, count):
        out, done = forward(number, arrived), number - lead
        gradient = backward(done, line.exchange(ahead=out, tokens_from_after=tokens[done]))
        following = tokens[number + 1] if number + 1 < count else None
        arrived = line.exchange(back=gradient, tokens_from_before=following)
    for number in range(count - lead, count):
        line.exchange(back=backward(number, line.exchange(tokens_from_after=tokens[number])))

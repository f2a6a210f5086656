"""The order of the passes of a call, for a model in one piece and for one that is cut into stages of a pipeline.

With several stages, each on ranks of its own, passes go one forward, one backward in turn (1F1B): a stage holds the
activations of as many passes as there are stages behind it, and no more. All stages know the same passes, and with
them the sizes of what travels. With one stage nothing travels, and every pass goes forward and backward before the
next begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# (number of the pass, what arrived from the stage before) -> what goes to the next.
Forward = Callable[[int, torch.Tensor | None], Any]
# (number of the pass, gradient from the next stage) -> gradient for the stage before.
Backward = Callable[[int, torch.Tensor | None], torch.Tensor | None]
# Number of the pass -> its tokens. Called only where hidden states travel: to count tokens is to pack them.
Tokens = Callable[[int], int]


@dataclass(frozen=True)
class Pipeline:
    """The stages, and this rank's place among them; hidden states are `width` wide and of type `dtype`."""

    # The ranks that hold the stages of one copy of the model; None for one stage.
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32
    width: int = 0

    @property
    def stage(self) -> int:
        return self.group.rank() if self.group else 0

    @property
    def stages(self) -> int:
        return self.group.size() if self.group else 1

    @property
    def is_last(self) -> bool:
        """Whether this rank computes outputs and losses."""
        return self.stage == self.stages - 1

    def exchange(
        self,
        *,
        ahead: torch.Tensor | None = None,
        back: torch.Tensor | None = None,
        tokens_from_before: Callable[[], int] | None = None,
        tokens_from_after: Callable[[], int] | None = None,
    ) -> torch.Tensor | None:
        """Sends and receives at once, so that no two stages wait for each other; gives what was received."""
        before, after = self.stage > 0, not self.is_last
        sent = [(ahead, self.stage + 1)] * (ahead is not None and after)
        sent += [(back, self.stage - 1)] * (back is not None and before)
        wanted = [(tokens_from_before, self.stage - 1)] * (tokens_from_before is not None and before)
        wanted += [(tokens_from_after, self.stage + 1)] * (tokens_from_after is not None and after)
        found = [
            (torch.empty(tokens() if tokens else 0, 1, self.width, dtype=self.dtype, device=self.device), peer)
            for tokens, peer in wanted
        ]
        # All sends and receives of a moment in one batch: two stages that each send first would wait for each other.
        operations = [
            dist.P2POp(dist.isend, tensor.detach().contiguous(), group=self.group, group_peer=peer)
            for tensor, peer in sent
            if tensor is not None
        ]
        operations += [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for tensor, peer in found]
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        return found[0][0] if found else None

    def share_from_last(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` on all stages with that of the last."""
        if self.stages > 1:
            dist.broadcast(tensor, group=self.group, group_src=self.stages - 1)

    def forward_only(self, count: int, tokens: Tokens, forward: Forward) -> None:
        """All passes, without gradient."""
        for number in range(count):
            arrived = self.exchange(tokens_from_before=partial(tokens, number))
            self.exchange(ahead=forward(number, arrived))

    def forward_and_backward(self, count: int, tokens: Tokens, forward: Forward, backward: Backward) -> None:
        """All passes there and back."""
        # The first stages run ahead by the number of stages behind them, so that these have work at once.
        lead = min(self.stages - 1 - self.stage, count)
        for number in range(lead):
            arrived = self.exchange(tokens_from_before=partial(tokens, number))
            self.exchange(ahead=forward(number, arrived))
        arrived = self.exchange(tokens_from_before=partial(tokens, lead)) if lead < count else None
        for number in range(lead, count):
            out, done = forward(number, arrived), number - lead
            # Sent forward and received back in one exchange: in the steady state neighbours do the opposite at once.
            gradient = backward(done, self.exchange(ahead=out, tokens_from_after=partial(tokens, done)))
            following = partial(tokens, number + 1) if number + 1 < count else None
            arrived = self.exchange(back=gradient, tokens_from_before=following)
        for number in range(count - lead, count):
            gradient = self.exchange(tokens_from_after=partial(tokens, number))
            self.exchange(back=backward(number, gradient))

"""The order of the passes of a call, for a model in one piece and for one that is cut into stages of a pipeline.

With several stages, each on ranks of its own, a stage alternates forward and backward passes (1F1B), so that it holds
the activations of no more passes than there are stages behind it. A stage may hold several chunks of layers
that do not follow each other (virtual stages): a pass then visits all stages once for each chunk. Stages wait less at
the beginning and end of a step, but hold the activations of more passes.

Every rank computes the same timetable of all stages, so that it knows which hidden states arrive when, and how large
they are. With one stage nothing is sent, and every pass runs forward and backward before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Step(NamedTuple):
    """A pass, by its number, forward or backward through one chunk of a stage's layers."""

    number: int
    chunk: int
    backward: bool


# (step, what arrived from the chunk before it) -> what goes to the next: hidden states, or their gradient.
Compute = Callable[[Step, torch.Tensor | None], Any]
# Number of the pass -> its tokens. Called only where hidden states are sent: counting tokens requires packing them.
Tokens = Callable[[int], int]


def lead_of(stage: int, stages: int, chunks: int) -> int:
    """Forward steps that a stage makes before its first backward step: the first stages start passes early,
    one for each stage behind them, so that these have work."""
    behind = stages - stage - 1
    return 2 * behind + (chunks - 1) * stages if chunks > 1 else behind


def timetable(stages: int, chunks: int, passes: int, *, backward: bool) -> Iterator[list[Step | None]]:
    """The steps of all stages at each moment; None where a stage waits."""
    there = _order(stages, chunks, passes, backward=False)
    back = _order(stages, chunks, passes, backward=True) if backward else []
    done: dict[tuple[int, Step], int] = {}  # (stage, step) -> its moment
    forwards, backwards = [0] * stages, [0] * stages

    def was_done(place: int, step: Step, moment: int) -> bool:
        """Whether this was computed before for the chunk at this place in the model."""
        chunk, stage = divmod(place, stages)
        return done.get((stage, step._replace(chunk=chunk)), moment) < moment

    def next_step(stage: int, moment: int) -> Step | None:
        first, second = forwards[stage], backwards[stage]
        if first < len(there) and not (backward and first - second > lead_of(stage, stages, chunks)):
            step, place = there[first], there[first].chunk * stages + stage
            if place == 0 or was_done(place - 1, step, moment):
                return step
        if second < len(back):
            step, place = back[second], back[second].chunk * stages + stage
            ready = was_done(place, step._replace(backward=False), moment)
            if ready and (place == stages * chunks - 1 or was_done(place + 1, step, moment)):
                return step
        return None

    for moment in count():
        if forwards == [len(there)] * stages and backwards == [len(back)] * stages:
            return
        tick = [next_step(stage, moment) for stage in range(stages)]
        for stage, step in enumerate(tick):
            if step is not None:
                done[stage, step] = moment
                (backwards if step.backward else forwards)[stage] += 1
        yield tick


def _order(stages: int, chunks: int, passes: int, *, backward: bool) -> list[Step]:
    """The steps of one stage in one direction: as many passes as there are stages through a chunk, then through the
    next, so that the first of them is back from the other stages when this one is free."""
    found = []
    for first in range(0, passes, stages):
        for chunk in reversed(range(chunks)) if backward else range(chunks):
            found += [Step(number, chunk, backward) for number in range(first, min(first + stages, passes))]
    return found


@dataclass(frozen=True)
class Pipeline:
    """The stages, and this rank's place among them; hidden states are `width` wide and of type `dtype`."""

    # The ranks that hold the stages of one copy of the model; None for one stage.
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32
    width: int = 0
    chunks: int = 1  # of every stage

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

    def gives_outputs(self, chunk: int) -> bool:
        """Whether this chunk of this rank is the last of the model."""
        return self.is_last and chunk == self.chunks - 1

    def share_from_last(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` on all stages with that of the last."""
        if self.stages > 1:
            dist.broadcast(tensor, group=self.group, group_src=self.stages - 1)

    def run(self, passes: int, tokens: Tokens, compute: Compute, *, backward: bool) -> None:
        """All passes there, and back if `backward`."""
        arrived: dict[Step, torch.Tensor] = {}
        requests: list[Any] = []  # of the moment before
        for tick in timetable(self.stages, self.chunks, passes, backward=backward):
            step, out = tick[self.stage], None
            if step in arrived:
                self._finish(requests)
            if step is not None:
                out = compute(step, arrived.pop(step, None))
            # Transfers for later steps overlap with the computation of this one.
            self._finish(requests)
            requests = self._exchange(tick, out, arrived, tokens)
        self._finish(requests)

    def _exchange(
        self, tick: list[Step | None], out: Any, arrived: dict[Step, torch.Tensor], tokens: Tokens
    ) -> list[Any]:
        """Start sending the results of this stage, and receiving its next inputs into `arrived`."""
        operations = []
        for stage, step in enumerate(tick):
            target, following = self._following(stage, step)
            if following is not None and stage == self.stage:
                operations.append(
                    dist.P2POp(dist.isend, out.detach().contiguous(), group=self.group, group_peer=target)
                )
            elif following is not None and target == self.stage:
                shape = tokens(following.number), 1, self.width
                arrived[following] = torch.empty(shape, dtype=self.dtype, device=self.device)
                operations.append(dist.P2POp(dist.irecv, arrived[following], group=self.group, group_peer=stage))
        # All sends and receives of a moment in one batch: two stages that each send first would wait for each other.
        return [(request, operations) for request in dist.batch_isend_irecv(operations)] if operations else []

    def _following(self, stage: int, step: Step | None) -> tuple[int, Step | None]:
        """The stage and the step that need the result of a step; no step after the last chunk and before the first."""
        if step is None:
            return stage, None
        place = step.chunk * self.stages + stage + (-1 if step.backward else 1)
        chunk, target = divmod(place, self.stages)
        return target, step._replace(chunk=chunk) if 0 <= chunk < self.chunks else None

    def _finish(self, requests: list[Any]) -> None:
        for request, _ in requests:  # kept with their tensors, which must live until they were sent
            request.wait()
        requests.clear()

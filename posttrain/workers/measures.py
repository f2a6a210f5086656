"""Metrics that say how they are reduced: over the passes and ranks of an optimizer step, and over a batch's steps.

A mean over tokens is a sum here: every rank adds its tokens with the weights that they have in the whole mini-batch.
`TokenStats` keeps each token's log-prob and entropy for the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from posttrain.controller.group import Calls

Ranks = Literal["sum", "max", "first"]
Steps = Literal["mean", "sum", "first"]


@dataclass
class Measure:
    """A number, how it is joined with those of other passes and ranks, and with those of other optimizer steps."""

    value: Any  # a number; while it is being gathered on a CUDA device, a tensor
    ranks: Ranks
    steps: Steps = "mean"


class Measures(dict[str, Measure]):
    """The metrics of one optimizer step on one rank, as they are gathered pass by pass.

    Tensors of a CUDA device stay there until `read_values`: reading one waits for everything queued on the device.
    """

    def add(self, name: str, share: float | torch.Tensor, steps: Steps = "mean") -> None:
        """A share of a sum or of a mean over the whole mini-batch."""
        self._join(name, Measure(_without_waiting(share), "sum", steps))

    def most(self, name: str, value: float | torch.Tensor, steps: Steps = "mean") -> None:
        """The largest of all passes and ranks."""
        self._join(name, Measure(_without_waiting(value), "max", steps))

    def tell(self, name: str, value: float, steps: Steps = "mean") -> None:
        """What every rank knows alike."""
        self._join(name, Measure(value, "first", steps))

    def tell_update(self, role: str, made: dict[str, float]) -> None:
        """What an engine's `update` returned, each entry as a metric of the role."""
        for name, value in made.items():
            if name == "skipped":
                self.tell(f"{role}/bad_steps", value, steps="sum")
            else:
                self.tell(f"{role}/{name}", value)
        self.tell(f"{role}/optimizer_steps", 1.0, steps="sum")

    def _join(self, name: str, new: Measure) -> None:
        own = self.get(name)
        self[name] = new if own is None else _join_measures(own, new)

    def read_values(self) -> Measures:
        """All values are numbers from now on."""
        waiting = {name: measure.value for name, measure in self.items() if isinstance(measure.value, torch.Tensor)}
        if waiting:
            # One copy off the device for all of them: each single one would wait for its queue.
            for name, value in zip(waiting, torch.stack(list(waiting.values())).tolist(), strict=True):
                self[name] = replace(self[name], value=value)
        return self

    def numbers(self) -> dict[str, float]:
        self.read_values()
        return {name: measure.value for name, measure in self.items()}


def _join_measures(one: Measure, other: Measure) -> Measure:
    if one.ranks == "first":
        return one
    value = one.value + other.value if one.ranks == "sum" else _larger(one.value, other.value)
    return Measure(value, one.ranks, one.steps)


def _larger(one: float | torch.Tensor, other: float | torch.Tensor) -> Any:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.maximum(one, other)
    return max(one, other)


def _without_waiting(value: float | torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # On a CUDA device the sum stays there: a float would wait for the device at every metric of every micro-batch.
    return value.detach().double() if value.is_cuda else float(value.detach())


def reduce_over_ranks(parts: Sequence[Measures]) -> Measures:
    """One optimizer step's metrics from those of its ranks."""
    whole = Measures(parts[0])
    for part in parts[1:]:
        for name, measure in part.items():
            whole._join(name, measure)
    return whole


def reduce_over_steps(steps: Sequence[Measures]) -> dict[str, float]:
    """The metrics of a batch from those of its optimizer steps."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        found = [step[name] for step in steps if name in step]
        values = [measure.value for measure in found]
        kind = found[0].steps
        out[name] = values[0] if kind == "first" else sum(values) / (len(values) if kind == "mean" else 1)
    return out


ROW = "sample_row"
# (rows, their log-probs, their entropies), in the order in which they were trained on.
Kept = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class TokenStats:
    """Log-prob and entropy of each token when it was first trained on: a by-product of the update, without a pass.

    Rows are known by the tensor ROW, which the trainer adds to a batch whose samples will be written; without it
    nothing is kept. Tensors stay on their device until they are taken.
    """

    def __init__(self) -> None:
        self._kept: Kept = []

    def add(self, batch: Any, outputs: dict[str, torch.Tensor]) -> None:
        if ROW in batch:
            self._kept.append((batch[ROW], outputs["log_probs"].detach(), outputs["entropy"].detach()))

    def take(self) -> Kept:
        """What was gathered, on the host; the next batch begins anew."""
        kept, self._kept = self._kept, []
        return [(rows.cpu(), log_probs.float().cpu(), entropy.float().cpu()) for rows, log_probs, entropy in kept]


def join_token_stats(results: list[Kept], calls: Calls) -> dict[str, torch.Tensor]:
    """`new_log_probs` and `entropy` of a batch's rows, each as of the first time that it was trained on."""
    # Several passes train a row several times; only the first saw the weights that the samples are shown beside.
    kept = [part for result in results for part in reversed(result)]
    if not kept:
        return {}
    count = 1 + max(int(rows.max()) for rows, _, _ in kept if len(rows))
    found = {name: torch.zeros(count, kept[0][1].shape[1]) for name in ("new_log_probs", "entropy")}
    for rows, log_probs, entropy in kept:  # what came earlier overwrites what came later
        found["new_log_probs"][rows], found["entropy"][rows] = log_probs, entropy
    return found

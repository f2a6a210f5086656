"""Metrics that say how they are reduced: over the passes and ranks of an optimizer step, and over a batch's steps.

A mean over tokens is a sum here: every rank adds its tokens with the weights that they have in the whole mini-batch.
`TokenStats` keeps each token's log-prob and entropy for the samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch

from posttrain.batch.columns import Column, Holder, RowPlaces, StoredColumn, keep
from posttrain.controller.group import Calls
from posttrain.engine.base import TrainEngine
from posttrain.errors import UserError

Ranks = Literal["sum", "max", "first"]
Steps = Literal["mean", "sum", "first"]
ALWAYS_RETURNED = ("grad_norm", "lr", "skipped")
"""What `update` of each train engine returns."""
SAVE_WAIT = "waited_for_save"
"""Seconds that the slowest rank waited for the copy of a save; the loop counts them as `timing_s/save_checkpoint`."""


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

    def tell_update(self, role: str, engine: TrainEngine, made: Mapping[str, float]) -> None:
        """What an engine's `update` returned, each entry as a metric of the role."""
        taken = {"bad_steps", "optimizer_steps", SAVE_WAIT, *(name.removeprefix(f"{role}/") for name in self)}
        for name, value in check_update(engine, made, taken).items():
            if name == "skipped":
                self.tell(f"{role}/bad_steps", value, steps="sum")
            else:
                self.tell(f"{role}/{name}", value)
        self.tell(f"{role}/optimizer_steps", 1.0, steps="sum")
        if waited := engine.take_save_wait():
            self._join(f"{role}/{SAVE_WAIT}", Measure(waited, "max", "sum"))

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


def check_update(engine: TrainEngine, made: Mapping[str, float], taken: Collection[str]) -> Mapping[str, float]:
    """What an engine's `update` returned; UserError if it may not. `taken`: names of posttrain's own metrics."""
    problem = ""
    if not isinstance(made, Mapping):
        problem = f"returns {type(made).__name__}, and no dict"
    elif missing := [name for name in ALWAYS_RETURNED if name not in made]:
        problem = f"returns no {' and no '.join(missing)}"
    elif wrong := [name for name, value in made.items() if not isinstance(value, Real)]:
        problem = f"returns {made[wrong[0]]!r} as `{wrong[0]}`, which is no number"
    elif doubled := [name for name in made if name in taken]:
        problem = f"returns `{doubled[0]}`, which is a metric of posttrain already; choose another name"
    if problem:
        raise UserError(
            f"The train engine {type(engine).__name__}: its `update` {problem}.\n"
            f"  to do:  return a dict of numbers with {', '.join(ALWAYS_RETURNED)}, and metrics of the engine's own"
        )
    return made


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
STATS = ("new_log_probs", "entropy")
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


@dataclass(frozen=True)
class StoredStats:
    """What a rank has kept, in its store: `rows`, in which of its passes each was first, and the tokens that it has
    there, of `width` at most."""

    rows: np.ndarray
    pass_B: np.ndarray
    length_B: np.ndarray
    width: int
    holder: Holder

    @classmethod
    def of(cls, kept: Kept) -> StoredStats | None:
        """None of a rank that was given no rows."""
        first: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}
        for number, (rows, log_probs, entropy) in enumerate(kept):
            for row, own, spread in zip(rows.tolist(), log_probs.numpy(), entropy.numpy(), strict=True):
                # Both are 0 behind a response, which a column puts there again.
                end = int(np.flatnonzero((own != 0) | (spread != 0)).max(initial=-1)) + 1
                first.setdefault(row, (number, own[:end], spread[:end]))
        if not first:
            return None
        passes, *values = (list(column) for column in zip(*first.values(), strict=True))
        holder = keep(dict(zip(STATS, values, strict=True)))
        lengths = np.array([len(own) for own in values[0]])
        return cls(np.array(list(first)), np.array(passes), lengths, kept[0][1].shape[1], holder)


def join_token_stats(results: list[Any], calls: Calls) -> dict[str, torch.Tensor | Column]:
    """`new_log_probs` and `entropy` of a batch's rows, each as of the first time that it was trained on."""
    stored = [result for result in results if isinstance(result, StoredStats)]
    if stored:
        return _join_stored(stored)
    # Several passes train a row several times; only the first saw the weights that the samples are shown beside.
    kept = [part for result in results for part in reversed(result or [])]
    if not kept:
        return {}
    count = 1 + max(int(rows.max()) for rows, _, _ in kept if len(rows))
    found = {name: torch.zeros(count, kept[0][1].shape[1]) for name in STATS}
    for rows, log_probs, entropy in kept:  # what came earlier overwrites what came later
        found["new_log_probs"][rows], found["entropy"][rows] = log_probs, entropy
    return dict(found)


def _join_stored(parts: list[StoredStats]) -> dict[str, torch.Tensor | Column]:
    places = RowPlaces.join([RowPlaces.of_block(part.holder, len(part.rows)) for part in parts])
    names = ("rows", "pass_B", "length_B")
    rows, pass_B, length_B = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    order = np.lexsort((pass_B, rows))  # by row, and of several ranks that had it the one that had it earlier
    order = order[np.unique(rows[order], return_index=True)[1]]
    width, places = max(part.width for part in parts), places.take(order)
    found = {name: StoredColumn(places, name, length_B[order], width, torch.float32) for name in STATS}
    if len(order) == rows.max() + 1:
        return dict(found)
    whole = {name: torch.zeros(int(rows.max()) + 1, width) for name in STATS}  # some were in no pass
    for name, column in found.items():
        whole[name][torch.from_numpy(rows[order])] = column.value()
    return dict(whole)

"""Weights on their way from workers that train to workers that generate, and the proof that they arrived.

A worker never holds more of the model for it than a bucket. The checksums are taken before the tensors travel and again
where they arrive, so that what was loaded is known to be what was sent. After a sync the rollout engine must score
fixed tokens as the trainer does (`WeightProbe`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.engine.base import TrainEngine
from posttrain.errors import UserError
from posttrain.models.completeness import few, not_finite
from posttrain.models.proof import beyond_rounding
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output, RolloutEngine
from posttrain.rollout.generate import to_batch

BUCKET_BYTES = 256 * 2**20  # a bucket is sent when it is this large; a larger tensor is one by itself
WORDS = 4096  # of a block of a checksum


class SyncError(UserError):
    """The rollout engine does not compute with the trainer's weights."""


@dataclass
class Bucket:
    """Some of the weights by name, in host memory, and the checksum of each."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    first: bool = False
    last: bool = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def add(self, name: str, tensor: torch.Tensor) -> None:
        # The checksum is taken of the copy that is sent, so that it also covers the copy off the device.
        held = tensor.detach().cpu().contiguous()
        self.tensors[name], self.checksums[name] = held, checksum(held)

    def check(self) -> None:
        """Refuses tensors that are not what was sent; the first of them is named."""
        for name, tensor in self.tensors.items():
            if checksum(tensor) != self.checksums[name]:
                raise SyncError(
                    f"the weight {name} reached a rollout worker with another checksum than it was sent with: memory "
                    "or a connection is at fault. The run continues from its newest checkpoint"
                )


def split_into_buckets(weights: Iterable[tuple[str, torch.Tensor]], *, keep: bool = True) -> Iterator[Bucket]:
    """All weights, cut the same way on every rank. With `keep` off the buckets are empty: ranks that only help to
    gather the weights have nothing to send."""
    bucket, size = Bucket(first=True), 0
    for name, tensor in weights:
        # Cut by sizes alone, never by contents: all ranks gather together and must stop at the same tensor.
        if size and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = Bucket(), 0
        size += tensor.nbytes
        if keep:
            bucket.add(name, tensor)
    bucket.last = True
    yield bucket


def without_tied_copies(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Without the second name of tied weights, which are tied where they arrive, too. All of them must live as long as
    the walk: one that is gone may leave its place to another."""
    seen: set[tuple[int, int]] = set()
    for name, tensor in weights:
        place = (tensor.data_ptr(), tensor.nbytes)
        if place not in seen or not tensor.nbytes:
            seen.add(place)
            yield name, tensor


def checksum(tensor: torch.Tensor) -> int:
    """Of its bytes: words of 64 bits are summed up by block, and the blocks' sums with odd weights, so that no change
    of one word and no exchange of blocks is lost. That is as fast as memory is read, which CRC is not."""
    bytes_ = tensor.reshape(-1).view(torch.uint8).numpy()
    whole = len(bytes_) - len(bytes_) % (8 * WORDS)
    sums = np.add.reduce(bytes_[:whole].view(np.uint64).reshape(-1, WORDS), axis=1)
    weights = np.arange(1, 2 * len(sums), 2, dtype=np.uint64)
    return int((sums * weights).sum()) << 32 | zlib.crc32(bytes_[whole:].tobytes())


def checksum_of_all(before: int, bucket: Bucket) -> int:
    """Of all weights up to and with this bucket, names included."""
    return zlib.crc32(repr(list(bucket.checksums.items())).encode(), before)


ROWS, LENGTH = 4, 12  # enough to see a wrong tensor, too little to be felt


def compare_scores(
    ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, lost: Callable[[], list[str]]
) -> dict[str, float]:
    """`sync/probe_max` of the trainer's scores and an engine's; past the tolerance of the type it is an error. `lost`
    names weights of the trainer that are not finite."""
    if differ := beyond_rounding(ours, theirs, dtype):
        # NaN differs from everything: tell an update that broke the weights from a sync that lost some.
        if not bool(torch.isfinite(ours).all()):
            names = lost()
            where = f" (NaN or infinite: {few(names)})" if names else ""
            raise SyncError(
                f"the update left weights with which the trainer itself computes no numbers{where}: it was too "
                "large. Lower actor_rollout_ref.actor.optim.lr, and continue from a checkpoint before it"
            )
        raise SyncError(
            f"after the weight sync the rollout engine's log-probs differ from the trainer's {differ}: the engine "
            "does not compute with the weights it was given"
        )
    # Below the tolerance it is a metric, so that a slow drift shows before it stops a run.
    return {"sync/probe_max": float((ours - theirs).abs().max())}


class WeightProbe:
    """Fixed token rows that trainer and rollout engine score after each sync."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        # A generator of its own: drawing from the global one would change the run.
        generator = torch.Generator().manual_seed(20240203)
        self.rows = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=generator).tolist()
        self.pad = tokenizer.pad_token_id
        self.batch = _rows_batch([row[:1] for row in self.rows], [row[1:] for row in self.rows], self.pad)

    def compare(self, trainer: TrainEngine, rollout: RolloutEngine | None) -> dict[str, float]:
        """`sync/probe_max`: the largest difference in log-probs; past the tolerance of the type the run must stop. A
        rank without a rollout engine only looks for weights that are not finite."""
        theirs = self.score_with_rollout(rollout) if rollout is not None else None
        ours = self.score_with_trainer(trainer)
        dtype = (rollout and rollout.rounding) or trainer.facts().dtype
        theirs = ours if theirs is None else theirs
        return compare_scores(ours, theirs, dtype, lambda: not_finite(trainer.export_weights()))

    def score_with_trainer(self, engine: TrainEngine) -> torch.Tensor:
        """Log-probs of the fixed rows; all ranks compute them."""
        return engine.log_probs(self.batch)["log_probs"]

    def score_with_rollout(self, engine: RolloutEngine) -> torch.Tensor:
        return torch.stack(engine.score(self.rows))

    def dry_run(self, engine: TrainEngine, actor: Any, lengths: Sequence[int], prompt_length: int) -> None:
        prompts = [[0] * min(prompt_length, length - 1) for length in lengths]
        responses = [[0] * (length - len(prompt)) for length, prompt in zip(lengths, prompts, strict=True)]
        batch = _rows_batch(prompts, responses, self.pad)
        zeros = torch.zeros_like(batch.batch["rollout_log_probs"])
        batch.union(DataProto.from_dict(tensors={"advantages": zeros}))
        prepared = actor.objective.prepare(batch)
        engine.trial_pass(prepared, actor.objective)


def _rows_batch(prompts: list[list[int]], responses: list[list[int]], pad: int) -> DataProto:
    outputs = [Output(row, ids, [0.0] * len(ids), "stop") for row, ids in enumerate(responses)]
    return to_batch(prompts, outputs, pad)

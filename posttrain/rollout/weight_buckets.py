"""Weights in buckets, on their way from a trainer to rollout engines in other processes.

A worker never holds more of the model for it than a bucket. The checksums are taken before the tensors travel and again
where they arrive, so that what was loaded is known to be what was sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from posttrain.errors import UserError

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

"""Weights in buckets, on their way from a trainer to rollout engines in other processes.

A bucket is one stretch of memory with the weights one after the other, so that it is sent, shared and compared at once.
A worker never holds more of the model for a sync than two of them. Checksums are taken of what is sent and again where
it arrives, so that what was loaded is known to be what was sent.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from posttrain.errors import UserError

BUCKET_BYTES = 256 * 2**20  # a bucket is sent when it is this large; a larger tensor is one by itself
WORDS = 4096  # of a block of a checksum
ALIGNED = 64  # bytes; a weight begins at a multiple, where any type can be read and copies are fastest

Weights = Iterable[tuple[str, torch.Tensor]]
Buffers = Callable[[int], torch.Tensor]
"""Gives memory of so many bytes for the next bucket."""


class SyncError(UserError):
    """The rollout engine does not compute with the trainer's weights."""


@dataclass(frozen=True)
class Entry:
    """One weight of a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass
class Bucket:
    """Some of the weights: their names, types and checksums, and the memory that they lie in. `place` says where that
    memory is, if it does not travel with the bucket (`workers/weight_transport.py`)."""

    entries: list[Entry] = field(default_factory=list)
    data: torch.Tensor | None = None
    first: bool = False
    last: bool = False
    place: Any = None

    @property
    def nbytes(self) -> int:
        """Of the memory, with the gaps between weights."""
        return sum(_rounded(entry.nbytes) for entry in self.entries)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by name, as views into the bucket's memory."""
        return {entry.name: _view(part, entry) for entry, part in self._parts()}

    def check(self) -> None:
        """Refuses tensors that are not what was sent; the first of them is named."""
        for entry, found in zip(self.entries, _checksums(part for _, part in self._parts()), strict=True):
            if found != entry.checksum:
                raise SyncError(
                    f"the weight {entry.name} reached a rollout worker with another checksum than it was sent with: "
                    "memory or a connection is at fault. The run continues from its newest checkpoint"
                )

    def _parts(self) -> Iterator[tuple[Entry, torch.Tensor]]:
        start = 0
        for entry in self.entries:
            end = start + _rounded(entry.nbytes)
            assert self.data is not None
            yield entry, self.data[start:end]
            start = end


def pack(weights: Weights, buffer: Buffers) -> Bucket:
    """A bucket of copies of these weights, in memory that `buffer` gives."""
    held = [(name, tensor.detach()) for name, tensor in weights]
    bucket = Bucket([Entry(name, str(one.dtype).removeprefix("torch."), tuple(one.shape), 0) for name, one in held])
    bucket.data = buffer(bucket.nbytes)
    for (entry, part), (_, tensor) in zip(bucket._parts(), held, strict=True):
        part[entry.nbytes :].zero_()  # gaps are part of the checksum: memory that is used again holds something there
        _view(part, entry).copy_(tensor)
    # Taken of the copy that is sent, so that they cover the copying as well.
    sums = _checksums(part for _, part in bucket._parts())
    bucket.entries = [Entry(one.name, one.dtype, one.shape, found) for one, found in zip(bucket.entries, sums)]  # noqa: B905
    return bucket


def host_memory(nbytes: int) -> torch.Tensor:
    """Memory of this process alone."""
    return torch.empty(nbytes, dtype=torch.uint8)


def split_into_buckets(
    weights: Weights, *, keep: bool = True, limit: int | None = None, buffer: Buffers = host_memory
) -> Iterator[Bucket]:
    """All weights, cut the same way on every rank into buckets of `limit` bytes (BUCKET_BYTES). With `keep` off the
    buckets are empty: ranks that only help to gather the weights have nothing to send."""
    limit = BUCKET_BYTES if limit is None else limit
    held, size, first = [], 0, True
    for name, tensor in weights:
        # Cut by sizes alone, never by contents: all ranks gather together and must stop at the same tensor.
        if size and size + tensor.nbytes > limit:
            bucket = pack(held, buffer)
            bucket.first, first = first, False
            yield bucket
            held, size = [], 0
        size += tensor.nbytes
        if keep:
            held.append((name, tensor))
    bucket = pack(held, buffer)
    bucket.first, bucket.last = first, True
    yield bucket


def without_tied_copies(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
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
    of one word and no exchange of blocks is lost. That is as fast as memory is read, on a GPU too, which CRC is not."""
    bucket = pack([("", tensor)], lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=tensor.device))
    return bucket.entries[0].checksum


def _checksums(parts: Iterable[torch.Tensor]) -> list[int]:
    sums = [_word_sum(part.view(torch.int64)) for part in parts]
    return torch.stack(sums).tolist() if sums else []  # all at once: each read from a GPU waits for it


def _word_sum(words: torch.Tensor) -> torch.Tensor:
    whole = len(words) - len(words) % WORDS
    blocks, rest = words[:whole].view(-1, WORDS).sum(1), words[whole:].sum()
    odd = torch.arange(1, 2 * len(blocks) + 1, 2, device=words.device)
    return (blocks * odd).sum() + rest * (2 * len(blocks) + 1)  # all modulo 2^64


def checksum_of_all(before: int, bucket: Bucket) -> int:
    """Of all weights up to and with this bucket, names included."""
    return zlib.crc32(repr([(entry.name, entry.checksum) for entry in bucket.entries]).encode(), before)


def _view(part: torch.Tensor, entry: Entry) -> torch.Tensor:
    return part[: entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED

"""Which model a folder holds: a short fingerprint, read from a few bytes of every tensor in its weight files.

Adapters mean something beside one base only, and a checkpoint of adapters does not hold it. The fingerprint does not
depend on where the folder lies or how the weights are split into files, and costs milliseconds whatever the size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.models.loading import local_or_hub

PIECES, PIECE = 4, 256  # of each tensor: this many pieces of this many bytes, evenly spread


def weights_folder(path: str) -> Path:
    """The local folder of a model: itself, or the place in the hub's cache."""
    source = local_or_hub(path)
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils.hub import cached_file

    return Path(str(cached_file(source, "config.json"))).parent


def fingerprint(path: str) -> str:
    """16 characters that tell bases apart; equal for copies of the same weights."""
    folder = weights_folder(path)
    files = sorted(folder.glob("*.safetensors"))
    pieces = sorted(piece for file in files for piece in _tensors(file))
    if not files:
        pieces = sorted((file.name, _samples_of(file)) for file in folder.glob("*.bin"))
    digest = hashlib.sha256()
    for name, sampled in pieces:
        digest.update(name.encode() + b"\0" + sampled)
    return digest.hexdigest()[:16]


def _tensors(file: Path) -> Iterator[tuple[str, bytes]]:
    """(name with type and shape, sampled bytes) of every tensor of a safetensors file."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield f"{name} {entry['dtype']} {entry['shape']}", _samples(stream, 8 + size + start, end - start)


def _samples_of(file: Path) -> bytes:
    with file.open("rb") as stream:
        length = file.stat().st_size
        return length.to_bytes(8, "little") + _samples(stream, 0, length)


def _samples(stream: BinaryIO, start: int, length: int) -> bytes:
    if length <= PIECES * PIECE:
        stream.seek(start)
        return stream.read(length)
    found = b""
    for number in range(PIECES):
        stream.seek(start + number * (length - PIECE) // (PIECES - 1))
        found += stream.read(PIECE)
    return found

"""Tensors from a folder in the format of torch.distributed.checkpoint, without trusting a pickle.

The format's `.metadata` file is a pickle. Here it is read by an unpickler that knows only the few classes which
describe tensors, so that a prepared file can call nothing. Entries that are not tensors (which the library would load
with a full unpickler) are among the classes that are not known. `parts.py` writes such folders.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from posttrain.checkpoint.folders import CheckpointError, read_manifest

_METADATA = "torch.distributed.checkpoint.metadata"
# What torch's own metadata names. A class that a newer torch adds is refused until it is listed here: loading fails
# loudly, which is better than an unpickler that calls what a file asks for.
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


def _member_of(*given: Any) -> Enum:
    """In place of `getattr`, with which Python 3.11.3 and older write the members of an enumeration."""
    match given:
        case (type() as kind, str(name)) if issubclass(kind, Enum) and name in kind.__members__:
            return kind[name]
    raise pickle.UnpicklingError("builtins.getattr does not belong into a checkpoint")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member_of
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_dtype or (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong into a checkpoint")


class _Reader(FileSystemReader):
    """Reads with metadata that was read and checked before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any) -> Metadata:
        return self._metadata


class _TensorsOnly(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor")


def read_metadata(folder: Path, listed: Collection[str]) -> Metadata:
    """What `folder` holds, if it refers to no file but those named in `listed`."""
    try:
        metadata = _MetadataUnpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    except (pickle.UnpicklingError, AttributeError, EOFError, TypeError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{folder / '.metadata'} is refused: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{folder / '.metadata'} is refused: it does not describe tensors")
    if not all(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()):
        raise CheckpointError(f"{folder / '.metadata'} is refused: it holds entries that are not tensors")
    foreign = {info.relative_path for info in metadata.storage_data.values()} - set(listed)
    if foreign:
        raise CheckpointError(
            f"{folder / '.metadata'} refers to files that the manifest does not list: {sorted(foreign)}"
        )
    return metadata


def describe(metadata: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name -> (shape, dtype) of every tensor."""
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(folder: Path, metadata: Metadata, into: dict[str, torch.Tensor]) -> None:
    """Fill the tensors of `into` in place, each from the entry of its name."""
    try:
        # Each rank reads its own part: `no_dist`, so that none waits for another. The library warns on every call that
        # there is no process group; here that is meant.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            load(dict(into), storage_reader=_Reader(folder, metadata), planner=_TensorsOnly(), no_dist=True)
    except CheckpointException as error:  # a BaseException, which would pass every `except Exception`
        raise CheckpointError(f"Reading {folder} failed: {error}") from error


def listed_metadata(folder: Path) -> Metadata:
    """What a folder of a checkpoint holds, if it refers to no file but those that the checkpoint's manifest lists."""
    try:
        names = (PurePosixPath(name) for name in read_manifest(folder.parent)["files"])
    except ValueError as error:
        raise CheckpointError(f"The checkpoint {folder.parent} is not loaded: {error}.") from error
    role = folder.name
    return read_metadata(folder, {str(name.relative_to(role)) for name in names if name.is_relative_to(role)})


def read_checked(folder: Path, into: dict[str, torch.Tensor], *, partial: bool = False) -> None:
    """Fill the tensors of `into` in place from a folder of a checkpoint; of those that are cut over ranks, this rank's
    part.

    Every one must be there with its shape and dtype, and with `partial=False` no others; otherwise nothing is changed
    and the error names them. Files that the checkpoint's manifest does not list are not read.
    """
    metadata = listed_metadata(folder)
    if differences := _differences(describe(metadata), into, partial):
        raise CheckpointError(
            f"The checkpoint {folder} does not fit this run: {few(differences)}. "
            "Resume with the model and optimizer settings that it was saved with, or start a new run."
        )
    read_tensors(folder, metadata, into)


def _differences(
    stored: dict[str, tuple[torch.Size, torch.dtype]], wanted: Mapping[str, torch.Tensor], partial: bool
) -> list[str]:
    found = [f"{name} is not in it" for name in wanted if name not in stored]
    for name, tensor in wanted.items():
        if name in stored and stored[name] != (tensor.shape, tensor.dtype):
            shape, dtype = stored[name]
            found.append(f"{name} is {dtype} {tuple(shape)} there and {tensor.dtype} {tuple(tensor.shape)} here")
    if not partial:
        found += [f"{name} is in it and not in this run" for name in stored if name not in wanted]
    return found


def few(items: list[str], most: int = 8) -> str:
    """The first of these in a sentence."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more

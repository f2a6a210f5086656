"""A prepared `.metadata` pickle calls nothing: only the classes that describe tensors are known."""

from __future__ import annotations

import enum
import hashlib
import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from posttrain.checkpoint import CheckpointError, CheckpointManager, verify
from posttrain.checkpoint.dcp import describe, read_metadata


def prepared(tmp_path: Path, metadata: bytes) -> Path:
    """A checkpoint whose metadata was replaced, with a manifest that agrees: the hashes do not protect here."""
    path = CheckpointManager(tmp_path).save(1, tensors={"actor": {"w": torch.ones(2)}}, state={}, rng={})
    (path / "actor" / ".metadata").write_bytes(metadata)
    manifest = json.loads((path / "manifest.json").read_text())
    entry = {"size": len(metadata), "sha256": hashlib.sha256(metadata).hexdigest()}
    manifest["files"]["actor/.metadata"] = entry
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))  # which has no hash of itself
    assert verify(path) == []
    return path


class Call:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.system, eval, getattr, torch.load, torch.hub.load], ids=lambda f: f.__name__)
def test_metadata_that_calls_a_function_is_refused(tmp_path, function):
    witness = tmp_path / "witness"
    data = pickle.dumps(Call(function, f"touch {witness}"))
    path = prepared(tmp_path, data)
    with pytest.raises(CheckpointError, match=rf"is refused: \S*{function.__name__} does not belong into a checkpoint"):
        CheckpointManager(tmp_path).load_tensors(path, "actor", {"w": torch.zeros(2)})
    assert not witness.exists()


@pytest.mark.parametrize("given", [(Metadata, "__init__"), (Metadata, "__dict__"), (torch.Size, "numel")])
def test_attributes_of_allowed_classes_are_refused(tmp_path, given):
    path = prepared(tmp_path, pickle.dumps(Call(getattr, *given)))
    with pytest.raises(CheckpointError, match=r"is refused: \S*getattr does not belong"):
        CheckpointManager(tmp_path).load_tensors(path, "actor", {"w": torch.zeros(2)})


class OlderPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.3 and older do."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_a_checkpoint_of_an_older_python_is_loaded(tmp_path):
    path = CheckpointManager(tmp_path).save(1, tensors={"actor": {"w": torch.arange(2.0)}}, state={}, rng={})
    data = io.BytesIO()
    OlderPickler(data).dump(pickle.loads((path / "actor" / ".metadata").read_bytes()))
    assert b"getattr" in data.getvalue()
    (path / "actor" / ".metadata").write_bytes(data.getvalue())
    metadata = read_metadata(path / "actor", os.listdir(path / "actor"))
    assert describe(metadata) == {"w": (torch.Size([2]), torch.float32)}


def test_dotted_name_below_an_allowed_module_is_refused(tmp_path):
    data = b"\x80\x04\x8c\x05torch\x8c\x0bhub.os.path\x93."
    path = prepared(tmp_path, data)
    with pytest.raises(CheckpointError, match="does not belong"):
        CheckpointManager(tmp_path).load_tensors(path, "actor", {"w": torch.zeros(2)})


def test_entries_that_are_not_tensors_are_refused(tmp_path):
    path = prepared(tmp_path, pickle.dumps(Metadata({"w": BytesStorageMetadata()}, storage_data={})))
    with pytest.raises(CheckpointError, match="BytesStorageMetadata does not belong"):
        CheckpointManager(tmp_path).load_tensors(path, "actor", {"w": torch.zeros(2)})


def test_metadata_that_points_to_an_unlisted_file_is_refused(tmp_path):
    path = CheckpointManager(tmp_path).save(1, tensors={"actor": {"w": torch.ones(2)}}, state={}, rng={})
    metadata = pickle.loads((path / "actor" / ".metadata").read_bytes())
    metadata.storage_data[MetadataIndex("w", (0,))].relative_path = "../../elsewhere.distcp"
    path = prepared(tmp_path, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"manifest does not list: \['../../elsewhere.distcp'\]"):
        CheckpointManager(tmp_path).load_tensors(path, "actor", {"w": torch.zeros(2)})


@pytest.mark.parametrize("data", [b"", b"junk", pickle.dumps({"w": 1})], ids=["empty", "junk", "other type"])
def test_metadata_that_is_no_metadata_is_refused(tmp_path, data):
    path = prepared(tmp_path, data)
    with pytest.raises(CheckpointError, match="is refused"):
        CheckpointManager(tmp_path).load_tensors(path, "actor", {"w": torch.zeros(2)})


def test_the_format_is_that_of_torch(tmp_path):
    path = CheckpointManager(tmp_path).save(1, tensors={"actor": {"w": torch.arange(3.0)}}, state={}, rng={})
    into = {"w": torch.zeros(3)}
    with pytest.warns(UserWarning, match="single process"):
        torch_dcp.load(into, checkpoint_id=path / "actor", no_dist=True)
    assert into["w"].tolist() == [0.0, 1.0, 2.0]


def test_state_and_rng_are_no_pickles(tmp_path):
    path = CheckpointManager(tmp_path).save(1, tensors={}, state={"a": 1}, rng={"r": torch.ones(1)})
    for name in ("state.json", "rng.safetensors", "manifest.json"):
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, AttributeError)):
            pickle.load(io.BytesIO((path / name).read_bytes()))

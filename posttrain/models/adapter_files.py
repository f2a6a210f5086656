"""Reads and writes peft adapters: `adapter_config.json` and `adapter_model.safetensors`, never a pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from posttrain.config.model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config
from posttrain.models.adapter_targets import AdapterError
from posttrain.models.expert_adapters import base_name
from posttrain.models.model_files import local_or_hub

Weights = dict[str, torch.Tensor]
# peft's task type for the adapter of a sequence classifier.
SCORER = "SEQ_CLS"
_NAME = ".default"  # peft's name for a model's only adapter; its files omit it


def stored_name(parameter: str) -> str:
    """Return a parameter's name in an adapter file."""
    return parameter.replace(_NAME, "")


def adapter_parameters(model: torch.nn.Module) -> Weights:
    """Return the adapters' live tensors under their names in an adapter file."""
    return {stored_name(name): weight for name, weight in model.named_parameters() if ".lora_" in name}


def whole_modules(model: Any) -> dict[str, torch.nn.Module]:
    """Return top modules that are fully trained besides the adapters: the head of a reward model."""
    tops = model.get_base_model().named_children()
    return {
        name: part
        for name, part in tops
        if any(weight.requires_grad and "lora_" not in inner for inner, weight in part.named_parameters())
    }


def trained_parameters(model: Any) -> Weights:
    """Return the live tensors of adapters and fully trained modules, under their names in an adapter file."""
    heads = tuple(f"base_model.model.{name}." for name in whole_modules(model))
    kept = {
        name: weight for name, weight in model.named_parameters() if name.startswith(heads) and ".lora_" not in name
    }
    return adapter_parameters(model) | kept


def adapter_settings(model: Any, base: str) -> dict[str, Any]:
    """Build the content of `adapter_config.json`: plain JSON, in a fixed order."""
    settings = model.peft_config["default"].to_dict() | {"inference_mode": True, "base_model_name_or_path": base}
    if heads := sorted(whole_modules(model)):
        settings |= {"modules_to_save": heads, "task_type": SCORER}
    ordered = {name: settings[name] for name in sorted(settings)}
    return json.loads(
        json.dumps(ordered, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    )


def write_adapter(folder: Path, weights: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
    """Write a folder that `PeftModel.from_pretrained` and `model.lora_adapter_path` accept."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(kept, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(dict(settings), indent=2) + "\n")


def read_adapter(folder: Path, heads: Sequence[str] = ()) -> tuple[dict[str, Any], Weights]:
    """Return (settings, weights) of an adapter folder, which may also hold the modules `heads`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    settings = read_adapter_config(folder, heads)
    if isinstance(settings, str):
        raise AdapterError(f"model.lora_adapter_path: {settings}")
    try:
        return settings, load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{folder / ADAPTER_WEIGHTS} cannot be read: {error}") from error


@torch.no_grad()
def fill_adapters(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy stored adapters into the model's; names and shapes must match exactly.

    A fully trained module (the head of a reward model) is filled if it is stored.
    """
    adapters = adapter_parameters(model)
    own = {name: weight for name, weight in trained_parameters(model).items() if name in adapters or name in weights}
    problems = [f"{name} is missing" for name in own if name not in weights]
    problems += [f"{name} belongs to no adapter of this model" for name in weights if name not in own]
    problems += [
        f"{name} is {tuple(weights[name].shape)} there and {tuple(own[name].shape)} here"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise AdapterError(
            f"The adapter {source} does not fit this model: {'; '.join(problems[:4])}{more}. "
            "It was made for another base: set model.path to that one."
        )
    for name, weight in own.items():
        weight.copy_(weights[name])


Named = Iterable[tuple[str, torch.Tensor]]


@torch.no_grad()
def take_adapters(model: torch.nn.Module, weights: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy those of these weights that are the model's adapters into it, unless they are there already; yield the
    others."""
    own = adapter_parameters(model)
    for name, weight in weights:
        if name not in own:
            yield name, weight
        elif own[name].data_ptr() != weight.data_ptr():
            own[name].copy_(weight)


@torch.no_grad()
def load_module(model: torch.nn.Module, weights: Named) -> None:
    """Copy weights under their Hugging Face names, and adapters, into a model, unless they are there already."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    own = {base_name(name): weight for name, weight in base.state_dict().items()}
    for name, tensor in take_adapters(model, weights):
        if name in own and own[name].data_ptr() != tensor.data_ptr():
            own[name].copy_(tensor)


PIECES, PIECE = 4, 256  # per tensor: this many pieces of this many bytes, evenly spread


def weights_folder(path: str) -> Path:
    """Return the local folder of a model: the folder itself, or its place in the hub's cache."""
    source = local_or_hub(path)
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils.hub import cached_file

    return Path(str(cached_file(source, "config.json"))).parent


def fingerprint(path: str) -> str:
    """Return 16 characters that identify a base model; equal for copies of the same weights."""
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
    # Yields (name with type and shape, sampled bytes) of every tensor of a safetensors file.
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

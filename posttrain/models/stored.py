"""Weights that stay in their files until a part of the model is wanted, for models that no process holds whole.

The model is built without memory (on torch's meta device); `StoredWeights.fill` then reads the weights of one part of
it, a layer say, from the safetensors files of its folder. Only models whose files name every weight as the model does
are built so; others are loaded whole, and so are those that get adapters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredWeights:
    """Where the weights of a model without memory lie."""

    def __init__(self, folder: Path, files: dict[str, str], model: torch.nn.Module) -> None:
        self.folder, self.files = folder, files
        self.names: dict[int, str] = {}  # of a weight without memory; tied ones have one name that is stored
        for name, weight in model.named_parameters(remove_duplicate=False):
            if name in files or id(weight) not in self.names:
                self.names[id(weight)] = name
        self.filled: dict[int, torch.nn.Parameter] = {}
        self.empty = list(model.parameters())  # kept, so that no identity is given twice

    def complete(self) -> bool:
        """Whether the files hold every weight."""
        return all(name in self.files for name in self.names.values())

    @torch.no_grad()
    def fill(self, part: torch.nn.Module) -> None:
        """Give every weight of `part` that has none its memory (on the CPU) and its numbers."""
        for module in part.modules():
            for own, weight in list(module.named_parameters(recurse=False)):
                if weight.is_meta and id(weight) in self.names:
                    if id(weight) not in self.filled:
                        self.filled[id(weight)] = self._read(weight)
                    setattr(module, own, self.filled[id(weight)])

    def forget(self) -> None:
        """The weights read so far are held by their parts, or have been cut; not tied to what is still to come."""
        self.filled.clear()

    def _read(self, weight: torch.Tensor) -> torch.nn.Parameter:
        from safetensors import safe_open

        name = self.names[id(weight)]
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            stored = file.get_tensor(name)
        assert stored.shape == weight.shape, f"{name} is {tuple(stored.shape)} in its file"
        return torch.nn.Parameter(stored.to(weight.dtype), requires_grad=weight.requires_grad)


def without_memory(kind: Any, folder: Path, settings: Any, dtype: torch.dtype, **options: Any) -> Any:
    """A model of the auto class `kind` whose weights lie in `folder`, with `stored_weights`; None where it must be
    loaded whole."""
    files = stored_files(folder)
    if files is None:
        return None
    with torch.device("meta"):
        model = kind.from_config(settings, dtype=dtype, **options)
    model.tie_weights()
    stored = StoredWeights(folder, files, model)
    if not stored.complete() or not _with_buffers(model):
        return None
    if (folder / "generation_config.json").exists():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.stored_weights = stored
    return model


def stored_files(folder: Path) -> dict[str, str] | None:
    """Weight -> file of a folder; None where it has no safetensors files."""
    from safetensors import safe_open

    if (folder / INDEX).exists():
        return json.loads((folder / INDEX).read_bytes())["weight_map"]
    if not (folder / SINGLE).exists():
        return None
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _with_buffers(model: torch.nn.Module) -> bool:
    """Make the tables of rotary embeddings again, in memory; False where there are buffers that nobody could make."""
    for name, module in list(model.named_modules()):
        if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        if not hasattr(module, "inv_freq"):
            return False
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, type(module)(config=module.config))  # pyright: ignore
    return True

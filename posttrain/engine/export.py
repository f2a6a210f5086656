"""A Hugging Face folder of a model that several ranks hold: gathered and written a file at a time.

All ranks gather a layer at a time, rank 0 keeps copies until they fill a file, writes it, and frees them. So no process
holds more of the model than one file and one layer, however large it is.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from posttrain.engine.ranks import this_rank

FILE_BYTES = 2**30
Named = tuple[str, torch.Tensor]
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LAYER = re.compile(r"\.(\d+)\.")


def host_copies(weights: Iterable[Named]) -> dict[str, torch.Tensor]:
    """Copies in host memory on rank 0, empty on the others, which only take part in gathering.

    A tied weight arrives as one tensor under several names and stays one tensor. The tensors are freed as the walk
    moves on, and the `id` of a freed one is reused for the next, so copies are looked up by weak references. Weights
    that are in host memory already are copied too: the same code then runs on a CPU as on a GPU.
    """
    copies = WeakTensorKeyDictionary()
    state = {}
    for name, weight in weights:
        if this_rank() == 0:
            if weight not in copies:
                copies[weight] = weight.to("cpu", copy=True)
            state[name] = copies[weight]
    return state


def export_by_files(
    weights: Iterable[Named], folder: Path, save: Callable[[Path, dict[str, torch.Tensor]], None]
) -> None:
    """Write `weights`, which all ranks iterate together, into `folder`. `save` writes a Hugging Face folder of some of
    them on rank 0; the files of all become one."""
    parts: list[Path] = []
    failed: Exception | None = None
    for group in _groups(weights):
        state = host_copies(group)
        if this_rank() == 0 and failed is None:
            parts.append(folder / f"part_{len(parts)}")
            try:
                save(parts[-1], state)
            except Exception as error:  # raised at the end: the other ranks wait for this one to gather with them
                failed = error
    if failed is not None:
        raise failed
    if this_rank() == 0:
        _join(parts, folder)


def _groups(weights: Iterable[Named]) -> Iterator[Iterator[Named]]:
    """The weights in groups of about a file's size. What a model converts together, such as the experts of a layer,
    or ties, such as embedding and head, stays together: groups end between layers."""
    pending = iter(weights)
    held = next(pending, None)

    def group() -> Iterator[Named]:
        nonlocal held
        size = 0
        while held is not None:
            current, size = held, size + held[1].nbytes
            # Requested only after the last one was used: the generator frees a layer when the next is requested.
            yield current
            layer = _layer(current[0])
            del current
            held = next(pending, None)
            if held is not None and size >= FILE_BYTES and _layer(held[0]) != layer:
                return

    while held is not None:
        yield group()


def _layer(name: str) -> str:
    found = _LAYER.search(name)
    return found[1] if found else ""


def _join(parts: list[Path], folder: Path) -> None:
    """Make one folder of those that were written: the weights of each are a file of it."""
    from safetensors import safe_open

    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, 1):
        name = _WEIGHTS if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        if len(parts) > 1:
            with safe_open(part / _WEIGHTS, framework="pt") as file:
                weight_map |= dict.fromkeys(file.keys(), name)
            total += (part / _WEIGHTS).stat().st_size
        for path in list(part.iterdir()):
            if path.name == _WEIGHTS:
                path.rename(folder / name)
            elif number == 1:  # settings of the model and code of its own, which every part has
                path.rename(folder / path.name)
        shutil.rmtree(part)
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

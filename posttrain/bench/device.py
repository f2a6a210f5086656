"""The device of a bench (`--device`) with the rates of its chip's data sheet, and the JSON file of a measurement with
machine, versions, command and date.

The floors of the tables follow from a chip's rates: of dense bfloat16 products, and of the memory.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.tracking import origin
from posttrain.tracking.safe_files import replace_file
from posttrain.version import __version__

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Chip:
    """Dense bfloat16 FLOP/s and bytes/s."""

    name: str
    flops: float
    bandwidth: float


CHIPS = (  # the first whose words are all in the device's name counts
    Chip("H200", 989e12, 4.8e12),
    Chip("H100 PCIe", 756e12, 2.0e12),
    Chip("H100 NVL", 835e12, 3.9e12),
    Chip("H100", 989e12, 3.35e12),
    Chip("A100 80GB", 312e12, 2.0e12),
    Chip("A100", 312e12, 1.555e12),
)


def find_chip(name: str) -> Chip | None:
    """The chip of a device of this name; None if it is not in the table."""
    # Whole words: `H100` must not match the name of another chip that begins so.
    words = name.replace("-", " ").upper().split()
    return next((chip for chip in CHIPS if all(word.upper() in words for word in chip.name.split())), None)


@dataclass(frozen=True)
class Device:
    """The device of a bench: `kind` is cpu or cuda."""

    kind: str
    name: str = ""
    memory: int = 0

    @property
    def chip(self) -> Chip | None:
        return find_chip(self.name) if self.kind == "cuda" else None

    def as_json(self) -> dict[str, Any]:
        if self.kind == "cpu":
            return {"device": "cpu"}
        chip = self.chip
        return {"device": "cuda", "gpu": self.name, "gpu_gib": self.memory / 2**30, "chip": chip and asdict(chip)}

    def words(self, cpu: str, threads: int) -> str:
        return f"{cpu}; {threads} threads" if self.kind == "cpu" else f"{self.name}, {self.memory / 2**30:.0f} GiB"


def find_device(device: str) -> Device:
    """The device that `--device` names; `auto` is CUDA if there is one."""
    if device == "cpu":
        return Device("cpu")
    import torch

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return Device("cuda", found.name, found.total_memory)
    if device == "cuda":
        raise UserError("--device cuda: torch sees no CUDA device here; give --device cpu")
    return Device("cpu")


def describe_machine(threads: int, place: Device | None = None) -> dict[str, Any]:
    """Everything about machine and moment that a reader of the figures needs."""
    return {
        "command": " ".join(["posttrain", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "posttrain": __version__,
        "python": platform.python_version(),
        **origin.describe_machine(),
        "threads": threads,
        # With the date and the load, a figure that does not repeat can be explained.
        "load_before": [round(value, 2) for value in os.getloadavg()],
        **(place or Device("cpu")).as_json(),
    }


def check_writable(path: Path | None) -> Path | None:
    """Reject a path that cannot be written before anything is measured."""
    if path is None:
        return None
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{path}: not a file that can be written; its folder must exist, and be yours to write in")
    return path


def write_json(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())


def read_json(path: Path, job: str, parts: Sequence[str]) -> dict[str, Any]:
    """A file that the `write_json` of this job wrote; it must have these parts."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or any(part not in found for part in parts):
            raise ValueError("it holds something else")
    except (OSError, ValueError) as error:
        raise UserError(f"--from {path}: {error}; give a file that `posttrain bench {job} --json` wrote") from None
    return found

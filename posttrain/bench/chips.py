"""Where a bench runs (`--device`), and what that chip can do at its best by its maker's data sheet.

The rates are the ends of the scale in the tables: dense bfloat16 matrix units, and the memory's bandwidth.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from posttrain.errors import UserError

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Chip:
    """Dense bfloat16 FLOP/s and bytes/s."""

    name: str
    flops: float
    bandwidth: float


CHIPS = (  # the first whose words all stand in the device's name
    Chip("H200", 989e12, 4.8e12),
    Chip("H100 PCIe", 756e12, 2.0e12),
    Chip("H100 NVL", 835e12, 3.9e12),
    Chip("H100", 989e12, 3.35e12),
    Chip("A100 80GB", 312e12, 2.0e12),
    Chip("A100", 312e12, 1.555e12),
)


def chip_called(name: str) -> Chip | None:
    """The chip of a device of this name; None for one that is not in the table."""
    words = name.replace("-", " ").upper().split()
    return next((chip for chip in CHIPS if all(word.upper() in words for word in chip.name.split())), None)


@dataclass(frozen=True)
class Place:
    """The device of a bench: `kind` is cpu or cuda."""

    kind: str
    name: str = ""
    memory: int = 0

    @property
    def chip(self) -> Chip | None:
        return chip_called(self.name) if self.kind == "cuda" else None

    def as_json(self) -> dict[str, Any]:
        if self.kind == "cpu":
            return {"device": "cpu"}
        chip = self.chip
        return {"device": "cuda", "gpu": self.name, "gpu_gib": self.memory / 2**30, "chip": chip and asdict(chip)}

    def words(self, cpu: str, threads: int) -> str:
        return f"{cpu}; {threads} threads" if self.kind == "cpu" else f"{self.name}, {self.memory / 2**30:.0f} GiB"


def find_place(device: str) -> Place:
    """What `--device` names; `auto` is CUDA where there is one."""
    if device == "cpu":
        return Place("cpu")
    import torch

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return Place("cuda", found.name, found.total_memory)
    if device == "cuda":
        raise UserError("--device cuda: torch sees no CUDA device here; give --device cpu")
    return Place("cpu")

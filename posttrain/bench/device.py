"""The device of a bench (`--device`), the floors that follow from its rates, and the JSON file of a measurement.

The rates of dense bfloat16 products and of the memory are those of the chip's data sheet, or measured here. A step that
decodes one token of each of B rows, which have c tokens before it, needs at least
    FLOPs = B (2 W + 4 L H D c)        W weights in matrices (the head included), L layers, H query heads of width D
    bytes = s (W + B c 2 L G D)        G key-value heads, s bytes per number: weights once, the cache of each row
and takes at least max(FLOPs / peak, bytes / bandwidth). The prompt's prefill is left out, which only lowers the floor.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.tracking import status
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
        **status.describe_machine(),
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


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class Shape:
    """The sizes that decide the cost of a token; `size` is bytes of a number."""

    weights: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    size: int

    def flops(self, rows: int, context: float) -> float:
        return rows * (2 * self.weights + 4 * self.layers * self.heads * self.width * context)

    def bytes(self, rows: int, context: float) -> float:
        cache = rows * context * 2 * self.layers * self.kv_heads * self.width
        return self.size * (self.weights + cache)


def shape_of(config: dict[str, Any], dtype: str) -> Shape:
    """From a `config.json` of the Llama family (gated MLP)."""
    text = config.get("text_config", config)
    hidden, heads, layers = text["hidden_size"], text["num_attention_heads"], text["num_hidden_layers"]
    kv_heads, width = text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden // heads
    layer = 2 * hidden * heads * width + 2 * hidden * kv_heads * width + 3 * hidden * text["intermediate_size"]
    return Shape(layers * layer + hidden * text["vocab_size"], layers, heads, kv_heads, width, BYTES[dtype])


def floor_seconds(
    shape: Shape, *, rows: int, prompt: int, tokens: int, peak: float, bandwidth: dict[int, float]
) -> float:
    """The least time in which `rows` responses of `tokens` tokens can be decoded."""
    total = 0.0
    for context in range(prompt, prompt + tokens):
        needed = shape.bytes(rows, context)
        total += max(shape.flops(rows, context) / peak, needed / bandwidth_for(needed, bandwidth))
    return total


def decoding_floor(
    shape: Shape, prompts: list[list[int]], lengths: list[int], *, slots: int | None, peak: float, bandwidth: float
) -> float:
    """Seconds below which these rows cannot be decoded, `slots` at a time, if arithmetic and reading overlap fully.

    Distinct prompts are computed once, and the weights are read once per step.
    """
    # At least as many steps as the longest row has tokens, or as all tokens take with every slot busy.
    rows = len(lengths)
    steps = max(max(lengths), -(-sum(lengths) // min(rows, slots or rows)))
    contexts = [len(prompt) * n + n * (n + 1) / 2 for prompt, n in zip(prompts, lengths, strict=True)]
    seen, tokens = sum(contexts), sum(lengths) + sum(map(len, set(map(tuple, prompts))))
    flops = 2 * shape.weights * tokens + 4 * shape.layers * shape.heads * shape.width * seen
    read = shape.size * (shape.weights * steps + seen * 2 * shape.layers * shape.kv_heads * shape.width)
    return max(flops / peak, read / bandwidth)


def update_flops(shape: Shape, lengths: list[int], *, frozen: bool = False) -> float:
    """Of an update over rows of these lengths: (6 N + 6 L H T) a token, N the weights in matrices with the head, H the
    width of all query heads, T the mean length seen by a token; look-up and recomputation are not counted. `frozen`
    weights under adapters have no gradient: 4 N; the adapters themselves are not counted."""
    tokens = sum(lengths)
    mean = sum(n * n for n in lengths) / max(1, tokens)
    return tokens * ((4 if frozen else 6) * shape.weights + 6 * shape.layers * shape.heads * shape.width * mean)


def higher_rates(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The higher of two measurements of each rate: other processes can only lower them."""
    rates = {int(size): max(rate, other["bandwidth"][size]) for size, rate in one["bandwidth"].items()}
    return {"peak_flops": max(one["peak_flops"], other["peak_flops"]), "bandwidth": rates}


def floor_us(shape: Shape, machine: dict[str, Any], point: dict[str, Any], prompt: int) -> float:
    """Microseconds per token below which this machine cannot go."""
    timed = round(point["timed"])
    begin = point["prefix"] + point["made"] - timed if "prefix" in point else prompt
    least = floor_seconds(
        shape,
        rows=point["rows"],
        prompt=begin,
        tokens=timed,
        peak=machine["peak_flops"],
        bandwidth=machine["bandwidth"],
    )
    return least * 1e6 / (point["rows"] * timed)


# -- what the machine can do ----------------------------------------------------------------------------------------
MIB = 2**20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
EDGE = 2048  # of the square matrices: large enough for the peak rate, small enough to take under a second


def peak_flops(dtype: Any, *, device: str = "cpu") -> float:
    """FLOP/s of a large square matmul in `dtype`."""
    import torch

    edge = EDGE if device == "cpu" else 4 * EDGE
    left, right = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    return 2 * edge**3 / _best(lambda: torch.mm(left, right), 1.0, device)


def bandwidths(*, device: str = "cpu") -> dict[int, float]:
    """Bytes read per second for data of each size; small data is read from the caches, as small models are."""
    import torch

    found = {}
    for size in SIZES:
        data = torch.ones(size // 4, device=device)
        found[size] = size / _best(lambda data=data: data.sum(), 0.2, device)
    return found


def bandwidth_for(size: float, measured: dict[int, float]) -> float:
    """The rate of the smallest measured size that holds `size` bytes, or of the largest."""
    return measured[min((s for s in measured if s >= size), default=max(measured))]


def _best(work: Callable[[], object], seconds: float, device: str) -> float:
    # The shortest call counts: others are slowed by whatever else runs.
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - started)
    return min(times)

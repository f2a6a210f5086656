"""Rates that a fleet's plan is computed from, each with its origin; `--assume name=value` replaces one.

A measured constant was measured on one H200 by the command that its page names. Nothing between GPUs was measured:
rates of links are those of data sheets.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from posttrain.errors import UserError
from posttrain.spelling import closest

SHEET = "assumed: data sheet"


@dataclass(frozen=True)
class Constant:
    """A rate in `unit`; `origin` says where it comes from."""

    value: float
    unit: str
    meaning: str
    origin: str


def _measured(where: str) -> str:
    return f"measured, one H200: {where}"


DEFAULTS: dict[str, Constant] = {
    "peak_tflops": Constant(989, "TFLOP/s", "dense bfloat16 products of a GPU", f"{SHEET} of an H200"),
    "hbm_tb_s": Constant(4.8, "TB/s", "memory of a GPU", f"{SHEET} of an H200"),
    "nvlink_gb_s": Constant(450, "GB/s", "between GPUs of a machine, each way", f"{SHEET} of NVLink 4"),
    "network_gb_s": Constant(50, "GB/s", "between machines, of each GPU, each way", "assumed: 400 Gbit/s a GPU"),
    "link_share": Constant(0.8, "", "of a link's rate that a collective reaches", "assumed"),
    "link_us": Constant(20, "us", "latency of a collective", "assumed"),
    "driver_gb_s": Constant(1.25, "GB/s", "network of the driver's machine", "assumed: 10 Gbit/s"),
    "text_bytes": Constant(4, "B", "text of a token, which a reward function reads", "assumed"),
    "update_share_896": Constant(0.462, "", "of peak in an update, width 896", _measured("docs/gpu.md, 0.5B")),
    "update_share_1536": Constant(0.542, "", "the same, width 1536", _measured("docs/gpu.md, 1.5B")),
    "update_share_3584": Constant(0.59, "", "the same, width 3584 and above", _measured("docs/gpu.md, 7B with LoRA")),
    "decode_share_896": Constant(
        0.55, "", "of peak in products of decoding, width 896", _measured("docs/gpu.md, 0.5B")
    ),
    "decode_share_3584": Constant(0.70, "", "the same, width 3584 and above", _measured("docs/gpu.md, 7B")),
    "cache_share": Constant(0.9, "", "of hbm_tb_s in decode attention", _measured("docs/gpu.md, 0.5B and 7B")),
    "weight_share": Constant(0.7, "", "of hbm_tb_s where few rows read weights", _measured("docs/gpu.md, 7B x 16k")),
    "layer_us": Constant(25, "us", "least time of a layer besides, captured", _measured("docs/gpu.md, 0.5B x 32k")),
    "row_passes": Constant(
        33, "", "times that a decode step reads a hidden state in a layer", _measured("docs/gpu.md")
    ),
    "launch_us": Constant(100, "us", "of a layer whose kernels the host launches (split native)", "assumed"),
    "serving_us": Constant(
        40.6, "us", "of vLLM's host for a sequence and step", _measured("docs/gpu.md, 24,641 tok/s")
    ),
    "serving_ratio": Constant(
        1.36, "", "vLLM's decode step to ours", _measured("docs/gpu.md, a mixture, 512 sequences")
    ),
    "bucket_gb_s": Constant(142, "GB/s", "buckets of 256 MiB", _measured("docs/weight_sync.md, CUDA IPC")),
    "gloo_gb_s": Constant(1.9, "GB/s", "with weight_sync=gloo", _measured("docs/weight_sync.md")),
    "driver_us": Constant(220, "us", "of the driver's core for a response", "measured: docs/workers_in_operation.md"),
    "driver_bytes": Constant(850, "B", "through the driver for a response", "measured: docs/workers_in_operation.md"),
}


@dataclass
class Constants:
    """The constants of one plan; `used` are those that it has read."""

    table: dict[str, Constant]
    used: set[str] = field(default_factory=set)

    @classmethod
    def given(cls, assumed: Mapping[str, float] | None = None) -> Constants:
        table = dict(DEFAULTS)
        for name, value in (assumed or {}).items():
            if name not in table:
                near = closest(name, table)
                hint = f"; did you mean {near}?" if near else ""
                raise UserError(f"--assume {name}: no constant of this name{hint}\n  There are {', '.join(table)}")
            if not 0 < value < math.inf:
                raise UserError(f"--assume {name}={value:g}: give a number above 0")
            table[name] = replace(table[name], value=value, origin="given by --assume")
        return cls(table)

    def __getitem__(self, name: str) -> float:
        """In SI units: FLOP/s, bytes/s, seconds."""
        self.used.add(name)
        found = self.table[name]
        scale = {"TFLOP/s": 1e12, "TB/s": 1e12, "GB/s": 1e9, "us": 1e-6}.get(found.unit, 1.0)
        return found.value * scale

    def by_width(self, name: str, width: int) -> float:
        """A share that was measured at several widths: between them by the logarithm, outside the nearest."""
        widths = sorted(int(key.rpartition("_")[2]) for key in self.table if key.startswith(name))
        shares = [self[f"{name}_{one}"] for one in widths]
        above = bisect_left(widths, width)
        if above in (0, len(widths)):
            return shares[min(above, len(widths) - 1)]
        low, high = widths[above - 1], widths[above]
        part = math.log(width / low) / math.log(high / low)
        return shares[above - 1] + part * (shares[above] - shares[above - 1])

    def lines(self) -> list[str]:
        """Those that were used, with their origin."""
        rows = [
            (name, f"{c.value:g} {c.unit}".strip(), c.meaning, c.origin)
            for name, c in self.table.items()
            if name in self.used
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return [
            "  " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
        ]


def parse_assumed(texts: Sequence[str]) -> dict[str, float]:
    """`name=value` of `--assume`."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise UserError(f"--assume {text}: give name=number, for example network_gb_s=25") from None
    return found

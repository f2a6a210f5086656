"""The embedded data: sums of two small numbers, generated on the spot, with held-out sums for validation.

A row is {"prompt": "15 + 27 = ?", "ground_truth": "42", "data_source": "math_reasoning"}. A sum and its mirror image
(27 + 15) are on the same side of the split, so validation never asks what training has shown. Command: `python -m
posttrain.data.recipes.arithmetic --out data/arithmetic`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

DATA_SOURCE = "math_reasoning"
Rows = list[dict[str, Any]]


def arithmetic_rows(
    *,
    max_operand: int = 100,
    val_fraction: float = 0.1,
    train_size: int | None = None,
    val_size: int | None = None,
    seed: int = 1,
) -> dict[str, Rows]:
    """Return `{"train": rows, "test": rows}` of sums with operands below `max_operand`; a size of None means all."""
    train, test = _split(max_operand, val_fraction, seed)
    return {
        "train": [_row(a, b) for a, b in _first(train, train_size, "train_size")],
        "test": [_row(a, b) for a, b in _first(test, val_size, "val_size")],
    }


def pair_rows(rows: Rows) -> Rows:
    """Return pairs for reward models: the right sum (`chosen`), and another row's sum that is off by 10 or more."""
    sums = sorted({int(row["ground_truth"]) for row in rows})
    pairs = []
    for row in rows:
        right = int(row["ground_truth"])
        wrong = [value for value in sums if abs(value - right) >= 10]
        drawn = wrong[int.from_bytes(_draw("wrong", row["prompt"])) % len(wrong)]
        pairs.append({"prompt": row["prompt"], "chosen": str(right), "rejected": str(drawn)})
    return pairs


def write_files(folder: str | os.PathLike[str], data: dict[str, Rows], *, suffix: str = "json") -> dict[str, Path]:
    """Write `train.SUFFIX` and `test.SUFFIX` (json or parquet) into the folder and return their paths."""
    writers = {"json": _write_json, "parquet": _write_parquet}
    if suffix not in writers:
        raise ValueError(f"suffix '{suffix}' is not known; use json or parquet")
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, rows in data.items():
        paths[name] = Path(folder) / f"{name}.{suffix}"
        # Written to another name and renamed, so that a run that starts now never reads half a file.
        partial = paths[name].with_name(f".{name}.{os.getpid()}.{suffix}")
        writers[suffix](partial, rows)
        os.replace(partial, paths[name])
    return paths


def _split(max_operand: int, val_fraction: float, seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    if max_operand < 2:
        raise ValueError(f"max_operand is {max_operand}; it must be at least 2")
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}; it must lie between 0 and 1")
    sums = sorted(((a, b) for a in range(max_operand) for b in range(a, max_operand)), key=lambda s: _draw(seed, *s))
    held_out = set(sums[: max(1, round(val_fraction * len(sums)))])
    pairs = sorted(
        ((a, b) for a in range(max_operand) for b in range(max_operand)), key=lambda pair: _draw(seed, "order", *pair)
    )
    sides: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for a, b in pairs:
        sides[(min(a, b), max(a, b)) in held_out].append((a, b))
    return sides


def _draw(*values: Any) -> bytes:
    # A random-looking key that depends only on the values, on every machine and version.
    return hashlib.blake2b(":".join(map(str, values)).encode(), digest_size=8).digest()


def _first(pairs: list[tuple[int, int]], size: int | None, name: str) -> list[tuple[int, int]]:
    if size is not None and not 1 <= size <= len(pairs):
        raise ValueError(f"{name} is {size}; with this max_operand there are 1 to {len(pairs)} different sums")
    return pairs[:size]


def _row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a} + {b} = ?", "ground_truth": str(a + b), "data_source": DATA_SOURCE}


def _write_json(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _write_parquet(path: Path, rows: Rows) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the arithmetic data set: train and test files of sums.")
    parser.add_argument("--out", default="data/arithmetic", help="folder to write to")
    parser.add_argument("--suffix", default="json", choices=["json", "parquet"], help="file format")
    parser.add_argument("--max-operand", type=int, default=100, help="operands lie below this number")
    parser.add_argument("--val-fraction", type=float, default=0.1, help="share of sums that is held out")
    parser.add_argument("--seed", type=int, default=1, help="seed of split and order")
    options = parser.parse_args()
    data = arithmetic_rows(max_operand=options.max_operand, val_fraction=options.val_fraction, seed=options.seed)
    for name, path in write_files(options.out, data, suffix=options.suffix).items():
        print(f"{path}: {len(data[name])} rows")


if __name__ == "__main__":
    main()

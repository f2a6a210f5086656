#!/usr/bin/env python3
"""Measures how long training stands still for a checkpoint: written at once, and in the background.

    python scripts/measure_checkpoints.py --device cuda --shape 3b --folder /tmp/checkpoints

Random bfloat16 weights of a real shape with their AdamW state (float32 masters and two moments), saved by the code that
saves a run. `stall`: seconds until training may go on. `published`: seconds until the checkpoint is complete and in its
place. The step beside the writer is a loop of matrix products. The last row is what reading all files again for their
hashes would add; they are taken while writing. Needs room on the disk for one checkpoint at a time.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from posttrain.checkpoint import CheckpointManager, capture_rng, verify
from posttrain.config.root import OptimConfig
from posttrain.controller.pool import resident_peak
from posttrain.engine.base import EngineSettings
from posttrain.engine.optim import EngineState, Optimizer

SHAPES = {  # hidden, MLP, layers, heads, KV heads, vocabulary
    "tiny": (256, 1024, 4, 4, 2, 8192),
    "0.1b": (512, 2048, 12, 8, 2, 65536),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "3b": (2048, 11008, 36, 16, 2, 151936),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--folder", type=Path, help="an existing folder on the disk to measure (default: a temporary)")
    parser.add_argument("--saves", type=int, default=2, help="saves in the background; the last one is not written out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="measure-checkpoints-", dir=options.folder) as folder:
        measure(options.device, options.shape, Path(folder), options.saves)


def measure(device: str, shape: str, folder: Path, saves: int) -> None:
    state = make_state(device, shape)
    held = sum(tensor.nbytes for tensor in state.tensors().values())
    free = shutil.disk_usage(folder).free
    print(f"{shape} on {device}: a checkpoint has {held / 1e9:.2f} GB; {free / 1e9:.0f} GB of the disk are free")
    step = make_step(device)
    print(f"a step alone: {average(step, 2.0):.4f} s")
    print("| save | stall s | published s | step beside it s | host memory peak GB | device memory peak GB |")
    print("|---|---|---|---|---|---|")
    blocking(state, folder / "blocking", device)
    manager = CheckpointManager(folder / "background", on_note=print)
    for number in range(1, saves + 1):
        background(manager, state, number, step, device, is_last=number == saves > 1)


def make_state(device: str, shape: str) -> EngineState:
    """Weights and optimizer of a decoder, as a train engine holds them."""
    hidden, mlp, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    kv = hidden // heads * kv_heads
    sizes = {"embed": (vocabulary, hidden), "norm": (hidden,)}
    for layer in range(layers):
        own = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden), "norm": (hidden,)}
        own |= {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp), "mlp_norm": (hidden,)}
        sizes |= {f"layers_{layer}_{name}": size for name, size in own.items()}
    module = torch.nn.ParameterDict()
    for name, size in sizes.items():
        module[name] = torch.nn.Parameter(torch.randn(size, device=device, dtype=torch.bfloat16))
    optimizer = Optimizer(list(module.named_parameters()), OptimConfig())
    settings = EngineSettings(device=torch.device(device), optim=OptimConfig())
    for moment in optimizer.state().values():  # zeros of a new page take no memory until they are written
        if moment.is_floating_point() and moment.ndim:
            moment.normal_()
    return EngineState(settings, optimizer, lambda: list(module.named_parameters()), module, together=False)


def make_step(device: str) -> Callable[[], None]:
    size = 4096 if device == "cuda" else 256
    left = torch.randn(size, size, device=device)

    def step() -> None:
        total = left
        for _ in range(10):
            total = torch.tanh(total @ left)
        total.sum().item()

    return step


def average(step: Callable[[], None], seconds: float = 0.0, while_true: Callable[[], bool] | None = None) -> float:
    """Seconds of one step, over so many seconds or while something holds."""
    started, count = time.perf_counter(), 0
    while (while_true() if while_true else time.perf_counter() - started < seconds) or not count:
        step()
        count += 1
    return (time.perf_counter() - started) / count


def row(name: str, *seconds: float | None, device: str, peak: bool = True) -> None:
    shown = [f"{value:.3f}" if value is not None else "" for value in seconds]
    host = f"{resident_peak() or 0:.1f}" if peak else ""
    on_device = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if peak and device == "cuda" else ""
    print(f"| {name} | {' | '.join(shown)} | {host} | {on_device} |", flush=True)


def blocking(state: EngineState, folder: Path, device: str) -> None:
    started = time.perf_counter()
    CheckpointManager(folder).save(1, tensors={"actor": state.save}, state={}, rng=capture_rng())
    spent = time.perf_counter() - started
    row("written at once", spent, spent, None, device=device)
    shutil.rmtree(folder)


def background(
    manager: CheckpointManager, state: EngineState, number: int, step: Callable[[], None], device: str, *, is_last: bool
) -> None:
    started = time.perf_counter()
    tensors = {"actor": state.begin_save}
    path = manager.save(number, tensors=tensors, state={}, rng=capture_rng(), background=True)
    stall = time.perf_counter() - started
    if is_last:
        manager.abandon()
        row(f"in the background, save {number}", stall, None, None, device=device)
        return
    beside = average(step, while_true=lambda: manager._writing.is_busy)
    manager.wait()
    row(f"in the background, save {number}", stall, time.perf_counter() - started, beside, device=device)
    started = time.perf_counter()
    if problems := verify(path):
        raise SystemExit(f"! {path}: {problems}")
    again = time.perf_counter() - started
    row("reading all files again for their hashes", again, again, None, device=device, peak=False)
    shutil.rmtree(path)


if __name__ == "__main__":
    main()

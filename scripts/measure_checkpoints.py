#!/usr/bin/env python3
"""Measures how long training stands still for a checkpoint, and shows that the file holds the state of that moment.

    python scripts/measure_checkpoints.py --device cuda --shape 0.5b 3b --written 0.5b --folder /tmp/checkpoints

Random bfloat16 weights of a real shape with their AdamW state (float32 masters and two moments), saved by the code that
saves a run. Each save is followed by one AdamW step, which changes all of it. `stall`: seconds until training goes on.
`wait`: seconds that the optimizer step waits for the copy. `1 % of a step of`: the length of a step of which both
together are 1 %.

- `copied before training goes on`: as if nothing overlapped. The first copy touches new memory, later ones do not.
- `a rollout, then the optimizer step`: the rollout is a loop of matrix products, as long as two copies.
- `the optimizer step at once`: the worst case. What was copied, and for the shapes in `--written` also the complete
  checkpoint on the disk, is compared with the state at the time of the save: bitwise equal, although the live state
  has changed.

`--synchronous` adds a save that is written while training waits (trainer.async_save=false). `published`: seconds until
the checkpoint is complete and in its place. Other saves are given up when they are copied. Needs room on the device for
twice the state, in host memory for one copy, and on the disk for one checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from posttrain.checkpoint import CheckpointManager, capture_rng, verify
from posttrain.checkpoint.parts import HostCopies
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
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["tiny"])
    parser.add_argument("--written", choices=SHAPES, nargs="*", help="shapes that are written out (default: all)")
    parser.add_argument("--synchronous", action="store_true", help="add a save that is written while training waits")
    parser.add_argument("--folder", type=Path, help="an existing folder on the disk to measure (default: a temporary)")
    options = parser.parse_args()
    started = time.perf_counter()
    for shape in options.shape:
        written = options.written is None or shape in options.written
        with tempfile.TemporaryDirectory(prefix="measure-checkpoints-", dir=options.folder) as folder:
            Measurement(options.device, shape, Path(folder)).run(written=written, synchronous=options.synchronous)
    print(f"\nall of it took {time.perf_counter() - started:.0f} s")


class Measurement:
    """Of one shape."""

    def __init__(self, device: str, shape: str, folder: Path) -> None:
        self.device, self.folder, self.number = device, folder, 0
        self.state, self.optimizer = make_state(device, shape)
        held = sum(tensor.nbytes for tensor in self.state.tensors().values())
        free = shutil.disk_usage(folder).free
        print(f"\n{shape} on {device}: a checkpoint has {held / 1e9:.2f} GB; {free / 1e9:.0f} GB of the disk are free")
        self.rollout = make_rollout(device)
        self.train()  # the first step of a process loads kernels, the first product, too
        self.manager = CheckpointManager(folder / "background", on_note=self.complain)

    def run(self, *, written: bool, synchronous: bool) -> None:
        alone = average(self.rollout, 1.0)
        print(f"a step of the rollout alone: {alone:.4f} s; an optimizer step alone: {self.train():.3f} s\n")
        print("| save | stall s | wait s | 1 % of a step of s | rollout step beside it s | published s | host GB |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        if synchronous:
            started = time.perf_counter()
            blocking = CheckpointManager(self.folder / "blocking")
            blocking.save(1, tensors={"actor": self.state.save}, state={}, rng=capture_rng())
            spent = time.perf_counter() - started
            self.row("written before training goes on", spent, 0.0, None, spent)
            shutil.rmtree(blocking.folder)
        copying = 0.0
        for turn in ("first", "later"):
            copying = self.copied_first(turn)
        # A run's first save has no memory yet.
        self.state.copies = self.optimizer_waits_for(HostCopies())
        for turn in ("first", "later"):
            self.after_a_rollout(turn, 2 * copying)
        self.at_once(written=written)

    # -- kinds of saves -------------------------------------------------------------------------------------------
    def copied_first(self, turn: str) -> float:
        started = time.perf_counter()
        self.save()
        self.state.copies.wait()
        stall = time.perf_counter() - started
        self.give_up()
        self.train()
        self.state.copies.take_waited()  # it is part of the stall here
        self.row(f"copied before training goes on, {turn}", stall, 0.0, None)
        return stall

    def after_a_rollout(self, turn: str, seconds: float) -> None:
        stall = self.save()
        beside = average(self.rollout, seconds)
        self.train()
        self.row(f"a rollout, then the optimizer step, {turn}", stall, self.state.copies.take_waited(), beside)
        self.give_up()

    def at_once(self, *, written: bool) -> None:
        before = {name: tensor.clone() for name, tensor in self.state.tensors().items()}
        synchronize(self.device)
        started = time.perf_counter()
        stall = self.save()
        self.train()
        wait = self.state.copies.take_waited()
        same = [name for name, live in self.state.tensors().items() if torch.equal(live, before[name])]
        if same:
            raise SystemExit(f"! the optimizer step changed nothing of {same[:5]}")
        if self.device == "cuda":  # on a CPU they are freed while they are written
            copied = {index.fqn: tensor for index, tensor in self.state.copies._kept.items()}  # pyright: ignore
            self.compare(copied, {name: tensor for name, tensor in before.items() if tensor.is_cuda})
        if not written:
            self.row("the optimizer step at once", stall, wait, None)
            self.give_up()
            return
        self.manager.wait()
        published = time.perf_counter() - started
        self.row("the optimizer step at once", stall, wait, None, published)
        path = self.manager.path_of(self.number)
        if problems := verify(path):
            raise SystemExit(f"! {path}: {problems}")
        into = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
        self.manager.load_tensors(path, "actor", into)
        self.compare(into, before)
        print("\nthe file equals the state at the time of the save, bitwise; the live state has changed since")

    # -- parts ----------------------------------------------------------------------------------------------------
    def save(self) -> float:
        """Seconds until training may go on."""
        self.number += 1
        started = time.perf_counter()
        tensors = {"actor": self.state.begin_save}
        self.manager.save(self.number, tensors=tensors, state={}, rng=capture_rng(), background=True)
        return time.perf_counter() - started

    def train(self) -> float:
        """One optimizer step that changes everything."""
        for master in self.optimizer.masters:
            master.grad = torch.full_like(master, 1e-3)
        synchronize(self.device)
        started = time.perf_counter()
        self.optimizer.step(grad_clip=0.0, total_steps=1000)
        synchronize(self.device)
        return time.perf_counter() - started

    def give_up(self) -> None:
        self.state.copies.is_idle.wait()
        self.manager.abandon()
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()

    def compare(self, found: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
        wrong = [
            name
            for name, tensor in before.items()
            if name not in found or not torch.equal(as_bits(found[name].to(tensor.device)), as_bits(tensor))
        ]
        if wrong or found.keys() != before.keys():
            raise SystemExit(f"! {len(wrong)} of {len(before)} tensors are not those of the save: {wrong[:5]}")

    def optimizer_waits_for(self, copies: HostCopies) -> HostCopies:
        self.optimizer.before_change = copies.wait
        return copies

    def complain(self, note: str) -> None:
        raise SystemExit(f"! {note}")

    def row(self, name: str, stall: float, wait: float, beside: float | None, published: float | None = None) -> None:
        optional = ["" if value is None else f"{value:.3f}" for value in (beside, published)]
        figures = [f"{stall:.3f}", f"{wait:.3f}", f"{100 * (stall + wait):.1f}", *optional]
        print(f"| {name} | {' | '.join(figures)} | {resident_peak() or 0:.1f} |", flush=True)


def make_state(device: str, shape: str) -> tuple[EngineState, Optimizer]:
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
    optimizer = Optimizer(list(module.named_parameters()), OptimConfig(lr=1e-3))
    settings = EngineSettings(device=torch.device(device), optim=OptimConfig())
    for moment in optimizer.state().values():  # zeros of a new page take no memory until they are written
        if moment.is_floating_point() and moment.ndim:
            moment.normal_()
    for name, moment in optimizer.state().items():
        if name.startswith("optim.exp_avg_sq."):
            moment.abs_()  # AdamW takes its root
    state = EngineState(settings, optimizer, lambda: list(module.named_parameters()), module, together=False)
    return state, optimizer


def make_rollout(device: str) -> Callable[[], None]:
    size = 4096 if device == "cuda" else 256
    left = torch.randn(size, size, device=device)

    def step() -> None:
        total = left
        for _ in range(10):
            total = torch.tanh(total @ left)
        total.sum().item()

    return step


def average(step: Callable[[], None], seconds: float) -> float:
    """Seconds of one step, over so many seconds."""
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds or not count:
        step()
        count += 1
    return (time.perf_counter() - started) / count


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

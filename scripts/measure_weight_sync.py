#!/usr/bin/env python3
"""GB per second of a weight sync between two processes, by every transport of `rollout.weight_sync` that is there.

    python scripts/measure_weight_sync.py                                  # CPU: ipc (shared memory), gloo, ray
    python scripts/measure_weight_sync.py --device cuda --gb 15 --bucket 1024  # one GPU: ipc (CUDA IPC), gloo
    python scripts/measure_weight_sync.py --device cuda --by nccl          # two GPUs

One process holds weights of the shapes of a Qwen2 (bfloat16), the other one its own of the same shapes. A sync is what
a run does: weights are copied into buckets, sent, compared with their checksums and loaded, while the next bucket is
made. After the last one all weights are compared bit for bit. It needs torch alone; without Ray `ray` is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.multiprocessing
from needs import need

from posttrain.rollout.weight_buckets import Bucket, Weights, split_into_buckets
from posttrain.workers.weight_transport import Endpoint, Route

HIDDEN, MIDDLE, VOCABULARY, KEYS = 3584, 18944, 152064, 512  # of Qwen2.5-7B
LAYER = {"q": (HIDDEN, HIDDEN), "k": (KEYS, HIDDEN), "v": (KEYS, HIDDEN), "o": (HIDDEN, HIDDEN), "norm": (HIDDEN,)}
LAYER |= {"gate": (MIDDLE, HIDDEN), "up": (MIDDLE, HIDDEN), "down": (HIDDEN, MIDDLE), "norm2": (HIDDEN,)}


def shapes(gb: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of so many gigabytes of weights: layers of a 7B model, and the rest of the size as one further matrix."""
    left, number = int(gb * 1e9) // 2, 0
    while True:
        for name, shape in LAYER.items():
            size = torch.Size(shape).numel()
            if size > left:
                if left >= HIDDEN:
                    yield "rest", (left // HIDDEN, HIDDEN)
                return
            left -= size
            yield f"layers.{number}.{name}", shape
        number += 1


def weights_of(gb: float, device: torch.device, *, filled: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    made = {}
    for name, shape in shapes(gb):
        weight = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        made[name] = weight.normal_(generator=generator) if filled else weight
    return made


class Sender:
    """The trainer's end."""

    def __init__(self, device: torch.device, gb: float, bucket_mb: int) -> None:
        self.weights, self.limit = weights_of(gb, device, filled=True), bucket_mb * 2**20
        self.end, self.spent = Endpoint(device), 0.0
        self.outgoing: Iterator[Bucket] = iter(())

    def next(self, first: bool) -> Bucket:
        begun = time.perf_counter()
        if first:
            self.spent = 0.0
            weights: Weights = self.weights.items()
            self.outgoing = split_into_buckets(weights, limit=self.limit, buffer=self.end.transport.buffer)
        sent = self.end.transport.send(next(self.outgoing))
        self.spent += time.perf_counter() - begun
        return sent

    def finish(self) -> float:
        """Seconds that were spent with making buckets and waiting for free buffers."""
        self.end.transport.finish()
        return self.spent


class Receiver:
    """The rollout engine's end."""

    def __init__(self, device: torch.device, gb: float) -> None:
        self.weights, self.end = weights_of(gb, device, filled=False), Endpoint(device)
        self.spent = [0.0, 0.0, 0.0]

    def take(self, bucket: Bucket) -> list[float]:
        """Seconds of this sync so far, for receiving, comparing and loading."""
        if bucket.first:
            self.spent = [0.0, 0.0, 0.0]
        times = [time.perf_counter()]
        bucket = self.end.transport.receive(bucket)
        times.append(time.perf_counter())
        bucket.check()
        times.append(time.perf_counter())
        for name, tensor in bucket.tensors.items():
            self.weights[name].copy_(tensor)
        self.end.transport.loaded(last=bucket.last)
        times.append(time.perf_counter())
        self.spent = [old + new - before for old, before, new in zip(self.spent, times, times[1:], strict=False)]
        return self.spent

    def differing(self, gb: float, device: torch.device) -> list[str]:
        sent = weights_of(gb, device, filled=True)
        return [name for name, weight in self.weights.items() if not torch.equal(weight, sent[name])]


def serve(pipe: Any, device: str, gb: float, threads: int) -> None:
    """The receiver's process."""
    torch.set_num_threads(threads)
    place = torch.device(device)
    receiver = Receiver(place, gb)
    while (call := pipe.recv()) is not None:
        name, *given = call
        method = {"join": receiver.end.join, "take": receiver.take, "differing": lambda: receiver.differing(gb, place)}
        pipe.send(method[name](*given))


class OtherProcess:
    """A receiver in a process that this one talks to by a pipe."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        given = (theirs, str(device), options.gb, options.threads)
        self.process = context.Process(target=serve, args=given, daemon=True)
        self.process.start()

    def call(self, *call: Any) -> None:
        self.pipe.send(call)

    def answer(self) -> Any:
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()


def measure(transport: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of each sync."""
    here = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    there = torch.device("cuda:1") if transport == "nccl" else here
    sender, receiver = Sender(here, options.gb, options.bucket), OtherProcess(options, there)
    route = sender.end.host(Route(transport))
    receiver.call("join", route, 1)
    sender.end.join(route, 0)
    receiver.answer()
    found = []
    for _ in range(1 + options.repeat):
        begun, waiting, parts = time.perf_counter(), False, []
        while True:
            bucket = sender.next(not waiting)
            if waiting:
                parts = receiver.answer()  # the sender has two buffers
            receiver.call("take", bucket)
            waiting = True
            if bucket.last:
                break
        parts = receiver.answer()
        making = sender.finish()
        names = ("receive", "compare", "load")
        found.append({"all": time.perf_counter() - begun, "make": making, **dict(zip(names, parts, strict=True))})
    receiver.call("differing")
    assert not (wrong := receiver.answer()), f"{transport}: {wrong[0]} is not what was sent"
    receiver.close()
    sender.end.transport.close()
    return found[1:]  # the first one allocates


def measure_ray(options: argparse.Namespace) -> list[dict[str, float]]:
    """The same through Ray's object store, with the two ends in actors, as a run packs values."""
    need("ray", get=f"{sys.executable} -m pip install 'posttrain[ray]'")
    import ray

    from posttrain.controller.rank_host import pack, unpack

    class Packed:
        def __init__(self, end: type, *given: Any) -> None:
            torch.set_num_threads(options.threads)
            self.end = end(*given)

        def call(self, name: str, *given: Any) -> Any:
            return pack(getattr(self.end, name)(*given))

        def take(self, parcel: Any) -> Any:
            return pack(self.end.take(unpack(parcel)))

    store = int(2**30 + 4 * options.bucket * 2**20)
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=store, log_to_driver=False)
    try:
        actor, cpu = ray.remote(num_cpus=0)(Packed), torch.device("cpu")
        sender, receiver = (
            actor.remote(Sender, cpu, options.gb, options.bucket),
            actor.remote(Receiver, cpu, options.gb),
        )
        buckets = sum(1 for _ in cut(options))
        found = []
        for _ in range(1 + options.repeat):
            begun, taking = time.perf_counter(), list[Any]()
            for number in range(buckets):
                part = sender.call.remote("next", number == 0)
                ray.wait([part], fetch_local=False)
                ray.get(taking)
                taking = [receiver.take.remote(part)]
            receive, compare, load = unpack(ray.get(taking)[0])
            seconds = time.perf_counter() - begun
            making = unpack(ray.get(sender.call.remote("finish")))
            # Reading the store and unpacking come before `take`, so that they show in the sum only.
            found.append({"all": seconds, "make": making, "receive": receive, "compare": compare, "load": load})
        wrong = unpack(ray.get(receiver.call.remote("differing", options.gb, cpu)))
        assert not wrong, f"ray: {wrong[0]} is not what was sent"
        return found[1:]
    finally:
        ray.shutdown()


def cut(options: argparse.Namespace) -> Iterator[int]:
    """Where buckets end, by the rule of `split_into_buckets`."""
    size = 0
    for _, shape in shapes(options.gb):
        nbytes = 2 * torch.Size(shape).numel()
        if size and size + nbytes > options.bucket * 2**20:
            yield size
            size = 0
        size += nbytes
    yield size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--by", help="transports, A,B (all that are there)")
    parser.add_argument("--gb", type=float, default=2.0, help="weights in 10^9 bytes (2)")
    parser.add_argument("--bucket", type=int, default=256, help="MiB of a bucket (256)")
    parser.add_argument("--repeat", type=int, default=5, help="timed syncs (5)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process (1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    known = ["ipc", "gloo", *(["ray"] if options.device == "cpu" and importlib.util.find_spec("ray") else [])]
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {options.threads} thread(s) each"
    print(f"torch {torch.__version__}, {where}; {options.gb:g} GB in buckets of {options.bucket} MiB")
    print("| by | best GB/s | median GB/s | seconds | making buckets | receiving | comparing | loading |")
    print("|---|---|---|---|---|---|---|---|")
    for transport in options.by.split(",") if options.by else known:
        runs = measure_ray(options) if transport == "ray" else measure(transport, options)
        best = min(runs, key=lambda run: run["all"])
        middle = statistics.median(run["all"] for run in runs)
        parts = " | ".join(f"{best[name]:.3f}" for name in ("all", "make", "receive", "compare", "load"))
        print(f"| {transport} | {options.gb / best['all']:.2f} | {options.gb / middle:.2f} | {parts} |", flush=True)


if __name__ == "__main__":
    main()

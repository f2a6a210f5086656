"""How a bucket of weights gets from the training worker that sends it to the rollout workers.

Names, shapes and checksums of a bucket always go the way of every call, through the driver. Its memory does not, where
`actor_rollout_ref.rollout.weight_sync` is one of these:

    ipc    the receiver maps the sender's memory: CUDA IPC on one GPU, on CPUs of one machine a memory file
    nccl   broadcast from GPU to GPU
    gloo   broadcast through host memory, over TCP
    auto   the first of these that serves all rollout workers

With `ray` it travels in the call, which is Ray's object store. Each is a class that declares whom it serves; one of a
user's own is registered in the same way (docs/weight_sync.md).

A sender has two buffers: while one is sent, the next bucket is gathered into the other.
"""

from __future__ import annotations

import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from posttrain.config.root import PPOConfig
from posttrain.config.trainer import rollout_workers_of, runs_on_cpu
from posttrain.engine.ranks import GLOO, address_facing, meeting_store, name_interface
from posttrain.errors import UserError
from posttrain.external import KEY as EXTERNAL
from posttrain.registry import Registry, unknown_name
from posttrain.rollout.weight_buckets import Bucket, host_memory

KEY = "actor_rollout_ref.rollout.weight_sync"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where a worker's process is, as far as transports care."""

    process: int
    machine: str  # the same for processes that can open each other's files under /proc; empty where there is none
    network: str  # the same for processes that can talk over loopback; empty where that is not known
    address: str  # of its machine, for the others
    device: str  # "cpu", or the GPU's own id


def place_of(device: torch.device, address: str = LOOPBACK) -> Place:
    """Of this process; `address` is that of its machine."""
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
    try:
        # Containers of one machine have the same boot, and other namespaces.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine, network = (f"{boot} {os.readlink(f'/proc/self/ns/{kind}')}" for kind in ("pid", "net"))
    except OSError:  # not Linux
        machine = network = ""
    return Place(os.getpid(), machine, network, address, own)


def machine_address() -> str:
    """Of this machine, as the other machines of the run know it."""
    import ray

    if not ray.is_initialized():
        return LOOPBACK
    own = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)


@dataclass(frozen=True)
class Route:
    """What all workers of a sync agree on: the transport, where they meet (for broadcasts), how many they are, and how
    long one bucket may take."""

    transport: str
    size: int = 2
    host: str = LOOPBACK
    port: int = 0
    timeout_s: float = 300.0


def route_for(
    wanted: str, sender: Place, receivers: Sequence[Place], timeout_s: float, engine: str = "native"
) -> Route:
    """The route from a sender to its receivers."""
    near = all(place.network == sender.network != "" for place in receivers) or sender.address == LOOPBACK
    return Route(
        choose(wanted, sender, receivers, engine),
        1 + len(receivers),
        LOOPBACK if near else sender.address,
        timeout_s=timeout_s,
    )


# Where the workers of a sync must be -> what is said where they are not.
PLACEMENTS = {
    "anywhere": "",
    "one machine": "needs all workers on one machine",
    "one device": "needs all workers on one GPU or on the CPU of one machine, and here are different machines or GPUs",
    "own GPUs": "needs a GPU of its own for every worker, and here some share one",
}
DEVICES = ("cpu", "cuda")


class Transport(ABC):
    """One end of it; the sender's and the receivers' are of the same class, which declares whom it serves."""

    devices: ClassVar[tuple[str, ...]] = DEVICES
    """Kinds of devices that the workers may have."""
    placement: ClassVar[str] = "anywhere"
    """Where the workers must be: one of `PLACEMENTS`."""
    engines: ClassVar[tuple[str, ...]] = ()
    """Rollout engines (`rollout.name`) that it serves; empty: all."""
    auto: ClassVar[float | None] = None
    """`auto` takes the lowest number of those that serve all workers; None: `auto` never takes this one."""
    meets: ClassVar[bool] = False
    """Whether the ends are given a store of torch.distributed in which they meet, and wait for each other when they
    send and receive."""

    def __init__(self, device: torch.device, route: Route | None = None, rank: int = 0, store: Any = None) -> None:
        """One end of a route, for which all are made at once: rank 0 sends. `store` is None unless `meets`."""
        self.device, self.route, self.rank = device, route or Route("ray"), rank
        self.store: Any = store

    def __init_subclass__(cls) -> None:
        for name in (cls.placement, *cls.devices):
            if name not in (*PLACEMENTS, *DEVICES):
                raise UserError(unknown_name(f"placement or device of {cls.__name__}", name, (*PLACEMENTS, *DEVICES)))

    @abstractmethod
    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory for the next bucket that is sent, once what was sent before no longer needs it."""

    @abstractmethod
    def send(self, bucket: Bucket) -> Bucket:
        """Begin to send a bucket; gives what the receivers are handed over. They must be done with the bucket before
        it when the next but one is sent."""

    @abstractmethod
    def receive(self, bucket: Bucket) -> Bucket:
        """The bucket with its memory, which is valid until the next is received."""

    def loaded(self, *, last: bool) -> None:
        """For a receiver: the bucket that was received last is no longer needed; after the `last` no memory is."""
        return

    def finish(self) -> None:
        """For the sender, when all receivers have loaded the last bucket."""
        return

    def close(self) -> None:
        """Give everything back; another one may follow."""
        return


TRANSPORTS: Registry[type[Transport]] = Registry(
    "weight transport",
    hint=f'Set {KEY} to one of these or to auto. One of your own needs @register_transport("NAME") in the module that '
    f"{EXTERNAL} names.",
)
register_transport = TRANSPORTS.register


def _misfit(name: str, devices: Sequence[str], engine: str, places: Sequence[Place] = ()) -> str:
    """Why a transport does not serve these devices and places and this rollout engine; empty if it does."""
    kind = TRANSPORTS.find(name)
    if strange := sorted({"cpu" if device == "cpu" else "cuda" for device in devices} - set(kind.devices)):
        return f"serves workers on {' and '.join(kind.devices)}, and here some are on {strange[0]}"
    if kind.engines and engine not in kind.engines:
        return f"serves the rollout engines {', '.join(kind.engines)}, and rollout.name is {engine}"
    if not places:
        return ""  # not known yet
    near, count = places[0].machine != "" and len({place.machine for place in places}) == 1, len({*devices})
    placed = {"one machine": near, "one device": near and count == 1, "own GPUs": count == len(places)}
    return "" if placed.get(kind.placement, True) else PLACEMENTS[kind.placement]


def _check(wanted: str, *given: Any) -> None:
    if problem := _misfit(wanted, *given):
        others = [name for name in TRANSPORTS if not _misfit(name, *given)]
        raise UserError(f"{KEY}={wanted} {problem}; set {', '.join(others)} or auto")


def check_transport(config: PPOConfig) -> None:
    """Rejects a name that is not registered, and a transport that does not serve this run's device or rollout engine;
    a user's module, which may register it, has been imported."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.weight_sync != "auto":
        TRANSPORTS.find(rollout.weight_sync)
        if rollout_workers_of(config):
            _check(rollout.weight_sync, ["cpu" if runs_on_cpu(config) else "cuda"], rollout.name)


def choose(wanted: str, sender: Place, receivers: Sequence[Place], engine: str = "native") -> str:
    """The transport for these workers: what `weight_sync` says, or with `auto` the first one that serves them all."""
    places = [sender, *receivers]
    given = [place.device for place in places], engine, places
    if all(replace(place, address=sender.address) == sender for place in receivers):
        return "ray"  # one process: there is nothing to cross
    if wanted == "auto":
        order = sorted((kind.auto, name) for name, kind in TRANSPORTS.items() if kind.auto is not None)
        return next(name for _, name in order if not _misfit(name, *given))
    _check(wanted, *given)
    return wanted


@register_transport("ray")
class InCall(Transport):
    """The memory travels in the call: through Ray's object store, or within a process not at all."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        return host_memory(nbytes)

    def send(self, bucket: Bucket) -> Bucket:
        return bucket

    def receive(self, bucket: Bucket) -> Bucket:
        return bucket


@register_transport("ipc")
class MappedMemory(Transport):
    """Memory of the sender that the receiver maps."""

    placement, auto = "one device", 10

    def __new__(cls, device: torch.device, *given: Any) -> Transport:
        return object.__new__(CudaMemory if device.type == "cuda" else SharedMemory)


class SharedMemory(MappedMemory):
    """Two memory files without names (`memfd`): nothing is left behind however a process ends, and only processes of
    the same user can open them. They are kept: new pages cost more than copying into old ones."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.files: list[tuple[int, int, torch.Tensor]] = [(-1, 0, host_memory(0))] * 2  # file, serial number, memory
        self.opened: dict[int, torch.Tensor] = {}  # by serial number
        self.made = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        file, serial, memory = self.files.pop(0)
        if len(memory) < nbytes:
            if file >= 0:
                os.close(file)
            self.made += 1
            file, serial = os.memfd_create("posttrain-weights"), self.made
            os.ftruncate(file, nbytes)
            memory = torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
        self.files.append((file, serial, memory))
        return memory[:nbytes]

    def send(self, bucket: Bucket) -> Bucket:
        if not bucket.nbytes:
            return bucket
        file, serial, memory = self.files[-1]
        return replace(bucket, data=None, place=(os.getpid(), file, serial, len(memory)))

    def receive(self, bucket: Bucket) -> Bucket:
        if not bucket.nbytes:
            return bucket
        process, number, serial, size = bucket.place
        if serial not in self.opened:
            self.opened = {one: memory for one, memory in self.opened.items() if one == serial - 1}  # it has two
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY)
            try:
                # Writable, as torch requires, but private: a write would not reach the sender's memory.
                mapped = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            finally:
                os.close(file)
            self.opened[serial] = torch.frombuffer(mapped, dtype=torch.uint8)
        return replace(bucket, data=self.opened[serial][: bucket.nbytes])

    def close(self) -> None:
        for file, _, _ in self.files:
            if file >= 0:
                os.close(file)
        self.__init__(self.device)


class CudaMemory(MappedMemory):
    """Memory of a GPU that the receiver maps (CUDA IPC). Buffers live for one sync: a GPU has no memory to spare."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.buffers: list[tuple[torch.Tensor, tuple[Any, ...]]] = []  # and how another process finds them
        self.opened: dict[Any, torch.Tensor] = {}

    def buffer(self, nbytes: int) -> torch.Tensor:
        from torch.multiprocessing.reductions import reduce_tensor

        free = self.buffers.pop(0) if len(self.buffers) == 2 else None
        if free is None or len(free[0]) < nbytes:
            memory = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)
            # Plain numbers and bytes, from which the receiver makes the tensor: it calls no function that was sent.
            # Made once per buffer: torch frees the memory when every handle that it gave has been opened and dropped.
            free = memory, reduce_tensor(memory)[1][1:]
        self.buffers.append(free)
        return free[0][:nbytes]

    def send(self, bucket: Bucket) -> Bucket:
        torch.cuda.current_stream(self.device).synchronize()  # the receiver's stream does not wait for this one
        return replace(bucket, data=None, place=self.buffers[-1][1])

    def receive(self, bucket: Bucket) -> Bucket:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        # (size, stride, offset, storage, dtype, device, handle, bytes, offset, ...)
        key = bucket.place[6:9]
        if key not in self.opened:
            here = self.device.index or 0  # the GPU may have another number in the sender's process
            place: Any = (*bucket.place[:5], here, *bucket.place[6:])
            self.opened[key] = rebuild_cuda_tensor(torch.Tensor, *place)
        return replace(bucket, data=self.opened[key][: bucket.nbytes])

    def loaded(self, *, last: bool) -> None:
        torch.cuda.current_stream(self.device).synchronize()  # the sender will write there next
        if last:
            self.opened = {}

    def finish(self) -> None:
        self.buffers = []
        torch.cuda.ipc_collect()

    def close(self) -> None:
        self.buffers, self.opened = [], {}


def _gloo_device(host: str) -> Any:
    """The interface that faces `host`, unless the user named one. Given to the group alone: a later one, with a worker
    on another machine, may need another interface."""
    named = os.environ.get(GLOO)
    made = dist.ProcessGroupGloo.create_device
    return made(interface=named) if named else made(hostname=address_facing(host) or host)


class Broadcast(Transport):
    """A process group of the sender (rank 0) and its receivers, beside those that they train or generate in."""

    meets = True
    on_device: ClassVar[bool]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.timeout = timedelta(seconds=self.route.timeout_s)
        self.memory = [self._memory(0), self._memory(0)]
        self.sending: list[Any] = []
        self.group: Any = self._group()  # the host's store must live as long as it

    @abstractmethod
    def _group(self) -> Any:
        """The process group."""

    def _memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device if self.on_device else "cpu")

    def _next(self, nbytes: int) -> torch.Tensor:
        memory = self.memory.pop(0)
        self.memory.append(memory if len(memory) >= nbytes else self._memory(nbytes))
        return self.memory[-1][:nbytes]

    def buffer(self, nbytes: int) -> torch.Tensor:
        while len(self.sending) > 1:
            self._wait(self.sending.pop(0))
        return self._next(nbytes)

    def send(self, bucket: Bucket) -> Bucket:
        if bucket.nbytes:
            self.sending.append(self._begin(bucket.data))
        return replace(bucket, data=None)

    def receive(self, bucket: Bucket) -> Bucket:
        data = self._next(bucket.nbytes)
        if bucket.nbytes:
            self._wait(self._begin(data))
        return replace(bucket, data=data)

    def loaded(self, *, last: bool) -> None:
        if last and self.on_device:
            self.memory = [self._memory(0), self._memory(0)]

    def _begin(self, data: torch.Tensor | None) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.timeout
        try:
            return self.group.broadcast([data], options)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, work: Any) -> None:
        try:
            done = work.wait(self.timeout)
        except RuntimeError as error:
            raise self._lost(error) from error
        if not done:
            raise self._lost(None)

    def _lost(self, error: Exception | None) -> ConnectionError:
        others = "a rollout worker" if self.rank == 0 else "the worker that trains, or another rollout worker,"
        said = re.sub(r"^\[\S+\] ", "", str(error or "")).partition(". ")[0]  # gloo's own file and advice
        return ConnectionError(
            f"Weight sync by {self.route.transport}: {others} was lost during a broadcast, or took longer than "
            f"{self.route.timeout_s:g} s (trainer.stopped_worker_timeout_s) for a bucket{f': {said}' if said else ''}"
        )

    def finish(self) -> None:
        while self.sending:
            self._wait(self.sending.pop(0))
        if self.on_device:  # a GPU has no memory to spare; on the host new pages cost more than copying into old ones
            self.memory = [self._memory(0), self._memory(0)]

    def close(self) -> None:
        self.sending, self.memory = [], []
        self.group.abort()
        self.group = self.store = None


@register_transport("nccl")
class DeviceBroadcast(Broadcast):
    """From GPU to GPU."""

    devices, placement, auto, on_device = ("cuda",), "own GPUs", 20, True

    def _group(self) -> Any:
        name_interface(self.route.host)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        return dist.ProcessGroupNCCL(self.store, self.rank, self.route.size, options)


@register_transport("gloo")
class HostBroadcast(Broadcast):
    """Through host memory, over TCP."""

    auto, on_device = 30, False

    def _group(self) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # its options have other names for type checkers
        options = gloo._Options()
        options._timeout, options._devices = self.timeout, [_gloo_device(self.route.host)]
        return gloo(self.store, self.rank, self.route.size, options)


class Endpoint:
    """A worker's end of weight syncs, over whatever transport its route says."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.transport: Transport = InCall(device)
        self._store: Any = None

    def host(self, route: Route) -> Route:
        """For the sender: open the place where the receivers meet it; the route, with its port."""
        if not TRANSPORTS.find(route.transport).meets:
            return route
        limit = timedelta(seconds=route.timeout_s)
        self._store = meeting_store(route.host, 0, route.size, limit, hosts=True, wait=False)
        return replace(route, port=self._store.port)

    def join(self, route: Route, rank: int) -> None:
        """Take this route from now on; all workers of the sync must do so at once. Rank 0 sends."""
        self.transport.close()
        self.transport = InCall(self.device)
        kind, store = TRANSPORTS.find(route.transport), None
        if kind.meets:
            limit = timedelta(seconds=route.timeout_s)
            store = self._store or meeting_store(route.host, route.port, route.size, limit, hosts=False, wait=False)
            self._store = None
        self.transport = kind(self.device, route, rank, store)

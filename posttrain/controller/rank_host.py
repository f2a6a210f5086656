"""The process of one rank: holds its roles' workers and makes the calls that come for them, one at a time.

Values travel between processes as a pickle beside the numbers of its tensors and arrays, which are not copied into it:
Ray moves arrays without pickling them, and tensors only through their pickle, several times slower; so tensors travel
as arrays. A received value is private: it can be changed without changing what the sender, the store or another
receiver holds.

Rows of a batch lie in Ray's object store: a rank puts its results there, and other processes read them from there. Ray
holds an object once per machine, for all its ranks, and frees it when the last reference is gone. An object is lost
with its owner, the process that has put it there; but the results of a call belong to the caller. A rollout worker that
may be replaced therefore gives the blocks that it makes in a call as a second result of it (`put_beside`).
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import cloudpickle
import numpy as np
import torch

from posttrain.batch.columns import Block, Held, Holder, use_store
from posttrain.controller.incidents import CONTINUES, STACK_SIGNAL, PeerLost, Process, this_process
from posttrain.errors import UserError, first_line

INLINE_BYTES = 4096
"""Smaller blocks travel with what refers to them: an object costs a rank about a millisecond."""


class Refs(list[Any]):
    """The references of a message, filled when it has arrived."""

    # What the receiver does until an object can be read. A rank may wait without end: the driver watches it. The driver
    # itself must notice when the owner stands still.
    wait_for: Callable[[Any], object] | None = None


class RayHolder(Holder):
    """A block in the store. Where an object is a list of blocks, `part` is the number of this one."""

    def __init__(self, refs: Refs, number: int, part: int | None = None) -> None:
        self._refs, self._number, self.part = refs, number, part
        self._block: Block | None = None

    @property
    def ref(self) -> Any:
        return self._refs[self._number]

    def get(self) -> Block:
        if self._block is not None:
            return self._block
        import ray
        from ray.exceptions import ObjectLostError

        if self._refs.wait_for is not None:
            self._refs.wait_for(self.ref)
        try:
            found: Any = ray.get(self.ref)
        except ObjectLostError as error:
            raise PeerLost(
                f"Rows of a batch are lost with the worker, or the machine, that had made them: {first_line(error)} "
                f"{CONTINUES}"
            ) from error
        block: Block = found if self.part is None else found[self.part]
        self._block = block
        return block


class HolderBeside(Holder):
    """A block that travels beside the answer to a call, as the block `part` of its second result."""

    def __init__(self, block: Block, part: int) -> None:
        self._block, self.part = block, part

    def get(self) -> Block:
        return self._block


def put_block(block: Block) -> Holder:
    """The block in the store, unless it is small. It is there as long as this process lives."""
    if _is_small(block):
        return Held(block)
    import ray

    return RayHolder(Refs([ray.put(block)]), 0)


def put_beside(blocks: list[Block], block: Block) -> Holder:
    """The block among those that are the second result of this call, unless it is small."""
    if _is_small(block):
        return Held(block)
    blocks.append(block)
    return HolderBeside(block, len(blocks) - 1)


def _is_small(block: Block) -> bool:
    return sum(array.nbytes for pair in block.values() for array in pair) < INLINE_BYTES


def in_ray() -> bool:
    """Whether this process belongs to a Ray cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


Parcel = tuple[bytes, list[np.ndarray], list[Any]]
"""(a pickle, the arrays that it leaves out, the references to objects of Ray's store that it leaves out; None is
for the object that travels beside it)"""
_AS_INTEGERS = {torch.bfloat16: torch.int16}  # what numpy has no name for


def pack(value: Any) -> Parcel:
    """The value as a parcel; its arrays share memory with `value`."""
    buffers: list[np.ndarray] = []
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=5, buffer_callback=lambda buffer: buffers.append(_bytes_of(buffer)))
    pickler.refs, pickler.slot = [], Refs()
    # References travel beside the pickle, where Ray sees them: it keeps an object as long as one of them is held.
    pickler.dump((pickler.slot, value))
    return stream.getvalue(), buffers, pickler.refs


def unpack(parcel: Parcel, beside: Any = None, wait_for: Callable[[Any], object] | None = None) -> Any:
    """The value again, with arrays and tensors of its own; `beside` is the reference to what travelled beside it.
    `wait_for` is called before one of its blocks is read from the store."""
    pickled, buffers, refs = parcel
    # Copied: Ray's store hands out read-only memory, and torch must not write into what another rank reads.
    slot, value = pickle.loads(pickled, buffers=[bytearray(buffer.data) for buffer in buffers])
    slot.extend(beside if ref is None else ref for ref in refs)
    slot.wait_for = wait_for
    return value


def size_of(parcel: Parcel) -> int:
    """Bytes of a parcel, without what its references stand for."""
    return len(parcel[0]) + sum(buffer.nbytes for buffer in parcel[1])


def _bytes_of(buffer: pickle.PickleBuffer) -> np.ndarray:
    return np.frombuffer(buffer.raw(), np.uint8)


class _Pickler(cloudpickle.Pickler):
    """Knows functions and classes of scripts and notebooks, tensors as arrays, and blocks of Ray's store."""

    refs: list[Any]
    slot: Refs  # empty while it is pickled; filled with `refs` where it is unpacked

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, RayHolder):
            self.refs.append(obj.ref)
            return RayHolder, (self.slot, len(self.refs) - 1, obj.part)
        if isinstance(obj, HolderBeside):
            self.refs.append(None)
            return RayHolder, (self.slot, len(self.refs) - 1, obj.part)
        if type(obj) is torch.Tensor:  # parameters and other subclasses keep their own way of pickling
            return _tensor, (_array(obj.detach()), obj.dtype)
        return super().reducer_override(obj)


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.cpu().contiguous()
    return tensor.view(_AS_INTEGERS.get(tensor.dtype, tensor.dtype)).numpy()


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype)


NEIGHBOURS_S = 0.05  # calls of one method with less than this between them are one span of work
SHORTEST_S = 0.001


@dataclass
class Failure:
    """An error of a worker, to be raised where the call came from."""

    error: Exception
    rank: int
    trace: str

    def as_raised(self) -> Exception:
        self.error.add_note(f"(on rank {self.rank})\n{self.trace}")
        return self.error


@dataclass(frozen=True)
class Identity:
    """A rank's process: the name of its computer, its number, and the files that what it prints goes to."""

    computer: str
    process: Process
    files: list[str]


P = ParamSpec("P")


def packed(method: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Any, P], Parcel]:
    """The method with its result packed for the driver. An error is a result, too: raised through Ray it would lose its
    class and carry Ray's own traceback."""

    @wraps(method)
    def call(host: Any, *arguments: P.args, **named: P.kwargs) -> Parcel:
        try:
            return pack(method(host, *arguments, **named))
        except Exception as error:
            return pack(Failure(_portable(error), host.rank, traceback.format_exc()))

    return call


class RankHost:
    """Becomes a Ray actor. Threads and import paths are set before the workers are loaded."""

    def __init__(self, rank: int, ranks: int, device: str, threads: int, folder: str, paths: list[str]) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.folder = folder
        # In C, at once: also for a rank that waits in a collective, or holds the interpreter's lock.
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        torch.set_num_threads(threads)
        use_store(put_block if in_ray() else None)
        self.workers: dict[str, Any] = {}
        self.profiler: Any = None
        self.peaks: Any = None
        self.spans: list[list[Any]] = []  # [method, when it began, its seconds] of the calls since they were last taken

    @packed
    def programs(self) -> dict[str, str]:
        """What this process runs."""
        from posttrain.controller.ray_cluster import programs

        return programs()

    @packed
    def identity(self) -> Identity:
        """Which process this is."""
        files = []
        for stream in (1, 2):
            with suppress(OSError):
                files.append(os.readlink(f"/proc/self/fd/{stream}"))
        printed = [file for file in dict.fromkeys(files) if os.path.isfile(file)]
        return Identity(socket.gethostname(), this_process(), printed)

    @packed
    def free_address(self, machine: str = "127.0.0.1") -> str:
        """host:port at which this process can be found by the others, where `machine` is the address of its own."""
        with socket.socket() as probe:
            probe.bind((machine, 0))
            return f"{machine}:{probe.getsockname()[1]}"

    @packed
    def connect(self, address: str, parcel: Parcel) -> None:
        """Join the other ranks, and do what is to be done before workers are made."""
        from posttrain.engine.ranks import join_ranks

        if not os.path.isdir(self.folder):
            raise UserError(
                f"{socket.gethostname()} has no folder {self.folder}, where the command was given: all machines of a "
                "run need the same code, model, data and run directory at the same paths, on a disk that they share"
            )
        join_ranks(self.rank, self.ranks, address, torch.device(self.device))
        prepare = unpack(parcel)
        if prepare is not None:
            prepare()

    @packed
    def build(self, role: str, parcel: Parcel) -> None:
        """Make the worker of a role."""
        worker, arguments, named = unpack(parcel)
        self.workers[role] = worker(*arguments, **named)

    @packed
    def call(self, role: str, name: str, parcel: Parcel) -> Any:
        """Call a worker's method."""
        with self._span(role, name):
            return getattr(self.workers[role], name)(*unpack(parcel))

    def call_and_give(self, role: str, name: str, parcel: Parcel) -> tuple[Parcel, list[Block]]:
        """As `call`, with the blocks that it makes as a second result. They belong to the caller, and are not lost with
        this process."""
        blocks: list[Block] = []
        use_store(partial(put_beside, blocks))
        try:
            return self.call(role, name, parcel), blocks
        finally:
            use_store(put_block)

    @packed
    def take(self, role: str, name: str, answer: Parcel, parcel: Parcel) -> Any:
        """Call a worker's method with what another process answered; where that was an error, it is the answer."""
        first = unpack(answer)
        if isinstance(first, Failure):
            return first
        with self._span(role, name):
            return getattr(self.workers[role], name)(first, *unpack(parcel))

    @contextmanager
    def _span(self, role: str, name: str) -> Iterator[None]:
        """Notes when a call began and ended, and is a range of that name in the trace, if one is made."""
        begun = time.time()
        try:
            if self.profiler is None:
                yield
            else:
                with torch.profiler.record_function(f"{role}.{name}"):
                    yield
        finally:
            self._note_span(name, begun, time.time())

    @packed
    def place(self) -> tuple[str, list[int], int, int]:
        """(the machine's name, its GPUs that are this process's own, the process, its threads)."""
        import ray

        gpus = ray.get_gpu_ids() if self.device.startswith("cuda") else []
        return socket.gethostname(), [int(gpu) for gpu in gpus], os.getpid(), torch.get_num_threads()

    @packed
    def gpu(self) -> tuple[str, int, bool]:
        """(name, bytes, whether it is a Hopper) of this process's GPU."""
        found = torch.cuda.get_device_properties(0)
        return found.name, found.total_memory, found.major == 9

    def begin_stage(self) -> None:
        """Memory is measured from now on."""
        self._measure().begin()

    def end_stage(self, stage: str) -> None:
        self._measure().end(stage)

    @packed
    def take_peaks(self) -> Any:
        """By stage, the most memory that this process took."""
        return self._measure().by_stage()

    def _measure(self) -> Any:
        if self.peaks is None:
            from posttrain.controller.pool import StagePeaks

            self.peaks = StagePeaks()
        return self.peaks

    def begin_trace(self) -> None:
        """Record what this rank does from now on."""
        from posttrain.controller.pool import begin_trace

        self.profiler = begin_trace()

    @packed
    def end_trace(self, path: str | None) -> None:
        """Write it, or forget it without a path."""
        from posttrain.controller.pool import end_trace

        profiler, self.profiler = self.profiler, None
        if profiler is not None:  # a process that took the place of a lost one began none
            end_trace(profiler, None if path is None else Path(path))

    def _note_span(self, name: str, begun: float, ended: float) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and last[0] == name and begun - last[1] - last[2] < NEIGHBOURS_S:
            last[2] = ended - last[1]  # responses are asked for by many short calls
        else:
            self.spans.append([name, begun, ended - begun])

    def take_spans(self) -> list[list[Any]]:
        """When this rank was at work since the last time, and at what."""
        taken, self.spans = self.spans, []
        return [[name, round(begun, 4), round(spent, 4)] for name, begun, spent in taken if spent >= SHORTEST_S]


def _portable(error: Exception) -> Exception:
    """The error itself where it can travel, otherwise its words."""
    try:
        return error if type(pickle.loads(pickle.dumps(error))) is type(error) else RuntimeError(str(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")

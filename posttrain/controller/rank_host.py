"""The process of one rank: holds its roles' workers and makes the calls that come for them, one at a time."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.controller.stalls import Process, this_process
from posttrain.controller.wire import Parcel, pack, unpack
from posttrain.errors import UserError

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


class RankHost:
    """Becomes a Ray actor. Threads and import paths are set before torch and the workers are loaded."""

    def __init__(self, rank: int, ranks: int, device: str, threads: int, folder: str, paths: list[str]) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.folder = folder
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        import torch  # after the import paths: the command's own packages, not those of Ray's process

        torch.set_num_threads(threads)
        self.workers: dict[str, Any] = {}
        self.profiler: Any = None
        self.peaks: Any = None
        self.spans: list[list[Any]] = []  # [method, when it began, its seconds] of the calls since they were last taken

    def programs(self) -> Parcel:
        """What this process runs."""
        from posttrain.controller.ray_machines import programs

        return self._answer(programs)

    def identity(self) -> Parcel:
        """Which process this is."""
        return self._answer(self._identity)

    def _identity(self) -> Identity:
        files = []
        for stream in (1, 2):
            with suppress(OSError):
                files.append(os.readlink(f"/proc/self/fd/{stream}"))
        printed = [file for file in dict.fromkeys(files) if os.path.isfile(file)]
        return Identity(socket.gethostname(), this_process(), printed)

    def free_address(self, machine: str = "127.0.0.1") -> Parcel:
        """host:port at which this process can be found by the others, where `machine` is the address of its own."""
        return self._answer(self._free_address, machine)

    def _free_address(self, machine: str) -> str:
        with socket.socket() as probe:
            probe.bind((machine, 0))
            return f"{machine}:{probe.getsockname()[1]}"

    def connect(self, address: str, pickled: bytes, buffers: list[np.ndarray]) -> Parcel:
        """Join the other ranks, and do what is to be done before workers are made."""
        return self._answer(self._connect, address, (pickled, buffers))

    def _connect(self, address: str, parcel: Parcel) -> None:
        import torch

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

    def build(self, role: str, pickled: bytes, buffers: list[np.ndarray]) -> Parcel:
        """Make the worker of a role."""
        return self._answer(self._build, role, (pickled, buffers))

    def _build(self, role: str, parcel: Parcel) -> None:
        worker, arguments, named = unpack(parcel)
        self.workers[role] = worker(*arguments, **named)

    def call(self, role: str, name: str, pickled: bytes, buffers: list[np.ndarray]) -> Parcel:
        """Call a worker's method."""
        return self._timed(role, name, lambda method: method(*unpack((pickled, buffers))))

    def _timed(self, role: str, name: str, call: Any) -> Parcel:
        begun = time.time()
        with self._range(f"{role}.{name}"):
            answer = self._answer(lambda: call(getattr(self.workers[role], name)))
        self._note_span(name, begun, time.time())
        return answer

    def take(self, role: str, name: str, answer: Parcel, pickled: bytes, buffers: list[np.ndarray]) -> Parcel:
        """Call a worker's method with what another process answered; where that was an error, it is the answer."""
        first = unpack(answer)
        if isinstance(first, Failure):
            return pack(first)
        return self._timed(role, name, lambda method: method(first, *unpack((pickled, buffers))))

    def place(self) -> Parcel:
        """(the machine's name, its GPUs that are this process's own, the process, its threads)."""
        return self._answer(self._place)

    def _place(self) -> tuple[str, list[int], int, int]:
        import ray
        import torch

        gpus = ray.get_gpu_ids() if self.device.startswith("cuda") else []
        return socket.gethostname(), [int(gpu) for gpu in gpus], os.getpid(), torch.get_num_threads()

    def begin_stage(self) -> None:
        """Memory is measured from now on."""
        self._measure().begin()

    def end_stage(self, stage: str) -> None:
        self._measure().end(stage)

    def take_peaks(self) -> Parcel:
        """By stage, the most memory that this process took."""
        return self._answer(self._measure().by_stage)

    def _measure(self) -> Any:
        if self.peaks is None:
            from posttrain.controller.profiling import StagePeaks

            self.peaks = StagePeaks()
        return self.peaks

    def begin_trace(self) -> None:
        """Record what this rank does from now on."""
        from posttrain.controller.profiling import begin_trace

        self.profiler = begin_trace()

    def end_trace(self, path: str | None) -> Parcel:
        """Write it, or forget it without a path."""
        from posttrain.controller.profiling import end_trace

        profiler, self.profiler = self.profiler, None
        return self._answer(end_trace, profiler, None if path is None else Path(path))

    def _range(self, name: str) -> AbstractContextManager[Any]:
        """A range of this name in the trace, if one is made."""
        if self.profiler is None:
            return nullcontext()
        import torch

        return torch.profiler.record_function(name)

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

    def _answer(self, function: Any, *arguments: Any) -> Parcel:
        try:
            return pack(function(*arguments))
        except Exception as error:
            # An error is an answer: raised through Ray it would lose its class and carry Ray's own traceback.
            return pack(Failure(_portable(error), self.rank, traceback.format_exc()))


def _portable(error: Exception) -> Exception:
    """The error itself where it can travel, otherwise its words."""
    try:
        return error if type(pickle.loads(pickle.dumps(error))) is type(error) else RuntimeError(str(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")

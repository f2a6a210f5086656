"""One rank's part of a role's tensors on its way into a checkpoint: planned, copied, written and hashed.

Ranks plan together which of them writes what; that is the only collective. From then on they report through files in
the role's folder, so that a thread can copy and write while training goes on. `.rank_R.json` is the report of rank R.
Rank 0 waits for the others, writes `.metadata`, and reports the complete folder in `.written.json`: size and SHA-256 of
every file, taken while it was written, or the error of the first rank that failed. The manager reads and removes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from posttrain.checkpoint.folders import find_os_error, write_synced
from posttrain.cores import free_memory

WRITTEN = ".written.json"
STALLED_S = 600.0
"""A writer whose folder does not grow for so long is given up."""
_LARGE = 2**20
_SYNC_EVERY = 2**29


class GivenUp(Exception):
    """The save is not wanted any more: its folder was removed while it was written into."""


class _HashingStream:
    """A file that knows the hash of what was written to it."""

    def __init__(self, file: BinaryIO, folder: Path) -> None:
        self.file, self.folder, self.size, self._unsynced = file, folder, 0, 0
        self._digest, self.hasher = hashlib.sha256(), ThreadPoolExecutor(1)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= _LARGE and not self.folder.exists():
            raise GivenUp(f"{self.folder} was removed")
        if len(view) >= _LARGE:  # hashing takes as long as writing: side by side, as both let other threads run
            hashed = self.hasher.submit(self._digest.update, view)
            self.file.write(view)
            hashed.result()
        else:
            self._digest.update(view)
            self.file.write(view)
        self.size += len(view)
        self._unsynced += len(view)
        if self._unsynced >= _SYNC_EVERY:  # one sync of all at the end would stop every other write of the machine
            os.fdatasync(self.file.fileno())
            self._unsynced = 0
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        self.file.flush()
        return self.file.fileno()

    def entry(self) -> dict[str, Any]:
        return {"size": self.size, "sha256": self._digest.hexdigest()}


class _HashingFiles(FileSystem):
    """Files of one folder; `written` has what a manifest says of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as file:
            stream = _HashingStream(cast(BinaryIO, file), self.folder)
            with stream.hasher:
                yield stream
        self.written[Path(path).name] = stream.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self.fs = self.files = _HashingFiles(folder)

    def write_all(self, plan: SavePlan, planner: _Planner) -> list[WriteResult]:
        """This rank's tensors, one after the other into one file. The library's own loop keeps a host copy of each
        until the file is complete; here it is freed as soon as it was written."""
        name, results = f"{plan.storage_data.prefix}0.distcp", []
        with self.files.create_stream(self.files.folder / name, "wb") as stream:
            for item in plan.items:
                tensor = planner.take(item).detach().cpu()
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor = tensor.clone()  # a view would be saved with all of the memory that it looks into
                start = stream.tell()
                torch.save(tensor, stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            os.fsync(stream.fileno())
        return results

    def storage_meta(self) -> StorageMeta | None:
        return None  # the library would store the folder's path and a random id; equal tensors should give equal files


class _Planner(DefaultSavePlanner):
    """Gives the writer the live tensors, or the copies that were taken of them."""

    copies: dict[MetadataIndex, torch.Tensor] | None = None

    def take(self, item: WriteItem) -> Any:
        return self.resolve_data(item) if self.copies is None else self.copies.pop(item.index)


class RolePart:
    """What this rank writes of a role's `tensors` into `folder`.

    Alone, a process writes all of them. `together` every rank writes what it holds of tensors that are cut over ranks,
    and one of them what all have alike; all ranks must make the same calls. `save` writes the live tensors and returns
    when all ranks have; `begin` returns at once, and a thread takes `copies` and writes these. Whatever changes the
    tensors calls `copies.wait()` first.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        *,
        together: bool = False,
        copies: HostCopies | None = None,
    ) -> None:
        self.folder, self.together, self.copies = folder, together, copies or HostCopies()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self._planner, self._writer = _Planner(), _Writer(folder)
        own: Any = None
        try:
            own = self._plan_own(tensors)
        except Exception as error:  # sent to the others first: they would wait for this rank's plan for ever
            own = _described(error)
            if not together:
                raise
        found = self._gather((own, socket.gethostname(), free_memory() + self.copies.held_bytes()))
        _raise_first([plan for plan, *_ in found])
        plans, self._metadata = self._planner.create_global_plan([plan for plan, *_ in found])
        plans = self._writer.prepare_global_plan(plans)
        self._plan = self._planner.finish_plan(plans[self.rank])
        self._lack = _lack_of_memory([(_bytes_of(plan), *rest) for plan, (_, *rest) in zip(plans, found, strict=True)])

    def _plan_own(self, tensors: Mapping[str, torch.Tensor]) -> SavePlan:
        if odd := [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
            raise TypeError(f"only tensors can be saved; these are not: {', '.join(odd)}")
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            self._planner.set_up_planner(dict(tensors), None, self.rank == 0)
            self._writer.set_up_storage_writer(self.rank == 0)
            return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _gather(self, own: Any) -> list[Any]:
        found = [own] * self.ranks
        if self.together:
            dist.all_gather_object(found, own)
        return found

    def save(self) -> None:
        """Write while the caller waits."""
        error: BaseException | None = None
        try:
            self._write()
        except BaseException as caught:
            error = caught
        if self.together and not isinstance(error, KeyboardInterrupt):
            found = self._gather(None if error is None else _described(error))
            if error is None:
                _raise_first(found)
        if error is not None:
            raise error

    def begin(self) -> str | None:
        """Copy, and write the copies, in the background. Where memory does not suffice for them, all is written at
        once, and the reason returned."""
        if self._lack is not None:
            self.save()
            return self._lack
        live: dict[MetadataIndex, Any] = {item.index: self._planner.resolve_data(item) for item in self._plan.items}
        copying = self.copies.begin(live)
        self._planner.copies = copying.targets
        self._planner.state_dict = {}

        def write() -> None:
            with suppress(BaseException):  # it is in the report, which the driver reads
                self._write(copying)
            self._planner.copies = None  # of a write that failed

        try:
            # Not a daemon: a process that ends normally waits until the files are written.
            threading.Thread(target=write, name="checkpoint").start()
        except BaseException:
            copying.end()
            raise
        return None

    def _write(self, copying: Copying | None = None) -> None:
        """Copy, if that is still to be done, write, and report what was written or what went wrong."""
        written = self._writer.files.written
        try:
            if copying is not None:
                copying.run(self.folder)
            results = self._writer.write_all(self._plan, self._planner)
            if self.rank == 0:
                self._complete(results)
                self._report({"files": written})
            else:
                self._report({"files": written, "results": [_as_json(result) for result in results]})
        except BaseException as error:
            with suppress(OSError):
                for name in self._files():  # on a full disk this is the room that the report takes
                    (self.folder / name).unlink(missing_ok=True)
            if self.folder.exists():
                self._report(_described(error))
            if (system := find_os_error(error)) is not None and system is not error:
                raise OSError(system.errno, system.strerror) from error
            raise

    def _files(self) -> list[str]:
        prefix = f"__{self.rank}_"
        return [path.name for path in self.folder.iterdir() if path.name.startswith(prefix)]

    def _report(self, report: dict[str, Any]) -> None:
        path = self.folder / (WRITTEN if self.rank == 0 else f".rank_{self.rank}.json")
        partial = path.with_name(f"{path.name}.tmp")
        write_synced(partial, json.dumps(report).encode())
        partial.rename(path)  # a process that sees it sees all of it

    def _complete(self, own: list[WriteResult]) -> None:
        """Wait until the others have written, and describe what all of them wrote."""
        results = [own]
        for rank in range(1, self.ranks):
            report = take_report(self.folder, f".rank_{rank}.json")
            results.append([_from_json(entry) for entry in report["results"]])
            self._writer.files.written |= report["files"]
        self._writer.finish(self._metadata, results)


def take_report(folder: Path, name: str, is_given_up: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Wait for a report, remove and return it; the error that it holds is raised."""
    path, seen, changed, pause = folder / name, -1, time.monotonic(), 0.01
    while not path.exists():
        if is_given_up() or not folder.exists():
            raise GivenUp(f"{folder} was removed")
        if (size := _size_of(folder)) != seen:
            seen, changed = size, time.monotonic()
        elif time.monotonic() - changed > STALLED_S:
            raise TimeoutError(f"nothing was written into {folder} for {STALLED_S:.0f} s")
        time.sleep(pause)
        pause = min(0.5, 1.5 * pause)
    report = json.loads(path.read_bytes())
    path.unlink()
    _raise_first([report])
    return report


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # renamed or removed meanwhile
            total += path.stat().st_size
    return total


def _described(error: BaseException) -> dict[str, Any]:
    system = find_os_error(error)
    if system is not None and system.errno is not None:
        return {"error": [system.errno, system.strerror]}
    return {"error": [None, f"{type(error).__name__}: {error}"]}


def _raise_first(reports: list[Any]) -> None:
    """The first error that these tell of."""
    for report in reports:
        if isinstance(report, dict) and "error" in report:
            number, words = report["error"]
            raise RuntimeError(words) if number is None else OSError(number, words)


def _as_json(result: WriteResult) -> list[Any]:
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, place.relative_path, place.offset, place.length]


def _from_json(entry: list[Any]) -> WriteResult:
    name, offset, number, size, *place = entry
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    return WriteResult(index, size, _StorageInfo(*place))


def _bytes_of(plan: SavePlan) -> int:
    tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in tensors)


def _lack_of_memory(ranks: list[tuple[int, str, int]]) -> str | None:
    """Why the copies of all ranks do not fit beside what their machines hold; None if they do. All ranks find the same.

    `ranks` are (bytes to copy, machine, bytes free there)."""
    for machine in dict.fromkeys(name for _, name, _ in ranks):
        needed = sum(size for size, name, _ in ranks if name == machine)
        free = min(free for _, name, free in ranks if name == machine)
        if 1.25 * needed > free:  # what is left is for the rest of the step
            return (
                f"a copy in host memory takes {needed / 2**30:.1f} GiB on {machine}, where "
                f"{free / 2**30:.1f} GiB are free"
            )
    return None


# Copies of tensors in host memory, taken while training goes on.


Key = TypeVar("Key", bound=Hashable)
_STAGING = 2**27
Pair = tuple[torch.Tensor, torch.Tensor]  # a tensor, and the memory that its values are copied into


class HostCopies:
    """Takes copies of tensors in a thread, one set at a time: the next set may be taken when the last one was written.

    Passes and a rollout only read the tensors, so that they go on meanwhile. `wait` comes before everything that
    changes the tensors or gives their memory back: an optimizer step, loading, offloading.

    Copies of a GPU's tensors stay allocated for the next time: touching tens of GiB of new pages takes longer than
    copying into them. On a CPU they are freed, since the memory is what training itself runs in.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}
        self.staging: list[torch.Tensor] = []
        self.is_idle = threading.Event()
        self.is_idle.set()
        self._waited_s = 0.0

    def begin(self, tensors: Mapping[Key, torch.Tensor]) -> Copying[Key]:
        """Copies with the values of now, as soon as `run` of what is returned has ended; until then `wait` waits."""
        self.is_idle.wait()  # the last set is copied into the same memory; it may be of a save that was given up
        targets: dict[Key, torch.Tensor] = {}
        for key, tensor in tensors.items():
            kept = self._kept.get(key)
            if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                # Not pinned: torch rounds pinned memory up to powers of two, and locking its pages takes seconds.
                kept = torch.empty_like(tensor, device="cpu", requires_grad=False)
            if tensor.is_cuda:
                self._kept[key] = kept
            targets[key] = kept
        # Aliases, not the tensors themselves: `module.to` gives a parameter other memory, and the copy needs this one.
        pairs = [(tensor.detach(), targets[key]) for key, tensor in tensors.items()]
        return Copying(self, targets, pairs)

    def wait(self) -> None:
        """Until the tensors of the last `begin` may be changed."""
        if not self.is_idle.is_set():
            started = time.perf_counter()
            try:
                self.is_idle.wait()
            finally:
                self._waited_s += time.perf_counter() - started

    def take_waited(self) -> float:
        """Seconds that were spent in `wait` since the last call."""
        taken, self._waited_s = self._waited_s, 0.0
        return taken

    def held_bytes(self) -> int:
        """Memory that the next set needs no more of."""
        return sum(tensor.nbytes for tensor in self._kept.values())


class Copying(Generic[Key]):
    """One set of copies under way: `targets` have their values when `run` has returned."""

    def __init__(self, copies: HostCopies, targets: dict[Key, torch.Tensor], pairs: list[Pair]) -> None:
        self.targets, self._copies = targets, copies
        # As long as they are held here, torch's allocator gives their memory to no other tensor.
        self._pairs = pairs
        self._device = next((source.device for source, _ in pairs if source.is_cuda), None)
        self._is_ready: torch.cuda.Event | None = None
        if self._device is not None:  # what is queued now may be what computes the tensors
            self._is_ready = torch.cuda.Event()
            self._is_ready.record(torch.cuda.current_stream(self._device))
        copies.is_idle.clear()

    def run(self, folder: Path) -> None:
        """Copy all of them; GivenUp when the folder that they are meant for is gone."""
        try:
            with torch.no_grad():
                _copy(self._in_host_memory(), folder)
                if self._device is not None:
                    self._copy_from_device(self._device, folder)
        finally:
            self.end()

    def end(self) -> None:
        """Whoever waits goes on."""
        self._pairs = []
        self._copies.is_idle.set()

    def _in_host_memory(self) -> list[Pair]:
        return [pair for pair in self._pairs if not pair[0].is_cuda]

    def _copy_from_device(self, device: torch.device, folder: Path) -> None:
        # Streams and the current device are a thread's own: without these two lines all would go through the default
        # stream of device 0.
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream), _beside_captures():
            assert self._is_ready is not None
            stream.wait_event(self._is_ready)
            on_device = [pair for pair in self._pairs if pair[0].is_cuda]
            try:
                _copy([pair for pair in on_device if not _is_plain(pair)], folder)
                self._stage([pair for pair in on_device if _is_plain(pair)], stream, folder)
            finally:
                stream.synchronize()  # after an error, too: from here on the tensors may be changed

    def _stage(self, pairs: list[Pair], stream: torch.cuda.Stream, folder: Path) -> None:
        """Through two pinned pieces of memory: one is filled from the device while all cores empty the other."""
        staging = self._copies.staging
        if not staging:
            staging += [torch.empty(_STAGING, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        waiting: list[tuple[torch.cuda.Event, list[Pair]]] = []
        for turn, load in enumerate(_loads(pairs)):
            _check_wanted(folder)
            if len(waiting) == 2:
                _empty(*waiting.pop(0))
            staged = staging[turn % 2].split([piece.numel() for piece, _ in load] + [_STAGING - _bytes_in(load)])
            for place, (piece, _) in zip(staged, load, strict=False):
                place.copy_(piece, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # the thread sleeps: spinning would take a core of the rollout's
            event.record(stream)
            waiting.append((event, [(place, target) for place, (_, target) in zip(staged, load, strict=False)]))
        for event, load in waiting:
            _empty(event, load)


def _empty(event: torch.cuda.Event, load: list[Pair]) -> None:
    event.synchronize()
    for staged, target in load:
        target.copy_(staged)


def _copy(pairs: list[Pair], folder: Path) -> None:
    for source, target in pairs:
        if source.nbytes >= _LARGE:
            _check_wanted(folder)
        target.copy_(source)


def _check_wanted(folder: Path) -> None:
    if not folder.exists():
        raise GivenUp(f"{folder} was removed")


def _is_plain(pair: Pair) -> bool:
    return pair[0].is_contiguous()


def _loads(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """All of them as bytes, in pieces; those of one load fit into the staging memory."""
    load: list[Pair] = []
    room = _STAGING
    for source, target in pairs:
        ours, theirs = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
        while ours.numel():
            load.append((ours[:room], theirs[:room]))
            ours, theirs = ours[room:], theirs[room:]
            room -= load[-1][0].numel()
            if not room:
                yield load
                load, room = [], _STAGING
    if load:
        yield load


def _bytes_in(load: list[Pair]) -> int:
    return sum(piece.numel() for piece, _ in load)


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Inside, this thread may wait for the device while another one captures a CUDA graph, as a rollout does for each
    new number of sequences. By default such a call fails, and spoils the capture."""
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # another vendor's device, whose driver has no such rule
        yield
        return
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED; the call gives back the mode before
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))

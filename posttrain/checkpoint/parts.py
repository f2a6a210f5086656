"""One rank's part of a role's tensors on its way into a checkpoint: planned, copied, written and hashed.

Ranks plan together which of them writes what; that is the only collective. From then on they report through files in
the role's folder, so that a thread can write while training goes on. `.rank_R.json` is the report of rank R. Rank 0
waits for the others, writes `.metadata`, and reports the complete folder in `.written.json`: size and SHA-256 of every
file, taken while it was written, or the error of the first rank that failed. The manager reads and removes it.
"""

from __future__ import annotations

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
from typing import Any, BinaryIO, TypeVar, cast

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
    when all ranks have; `begin` takes `copies` first, and writes these in a thread.
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
        """Copy, and write the copies in the background. Where memory does not suffice for them, all is written at once,
        and the reason returned."""
        if self._lack is not None:
            self.save()
            return self._lack
        live: dict[MetadataIndex, Any] = {item.index: self._planner.resolve_data(item) for item in self._plan.items}
        self._planner.copies = self.copies.take(live)
        self._planner.state_dict = {}

        def write() -> None:
            with suppress(BaseException):  # it is in the report, which the driver reads
                self._write()
            self._planner.copies = None  # of a write that failed

        # Not a daemon: a process that ends normally waits until the files are written.
        threading.Thread(target=write, name="checkpoint").start()
        return None

    def _write(self) -> None:
        """Write, and report what was written or what went wrong."""
        written = self._writer.files.written
        try:
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


# Copies of tensors in host memory, taken while training waits: as quickly as the bus and the memory allow.


Key = TypeVar("Key", bound=Hashable)
_STAGING = 2**27


class HostCopies:
    """Takes copies of tensors, one set at a time: the next set may be taken when the last one was written.

    Copies of a GPU's tensors stay allocated for the next time: touching tens of GiB of new pages takes longer than
    copying into them. On a CPU they are freed, since the memory is what training itself runs in.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._staging: list[torch.Tensor] = []

    def take(self, tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """By the same keys, tensors in host memory with the values of now."""
        found, from_gpu = {}, []
        for key, tensor in tensors.items():
            if tensor.device.type != "cuda" or not tensor.is_contiguous():
                found[key] = tensor.detach().to("cpu", copy=True)
                continue
            kept = self._kept.get(key)
            if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                # Not pinned: torch rounds pinned memory up to powers of two, and locking its pages takes seconds.
                kept = self._kept[key] = torch.empty_like(tensor, device="cpu")
            found[key] = kept
            from_gpu.append((tensor.detach(), kept))
        if from_gpu:
            self._copy(from_gpu)
        return found

    def held_bytes(self) -> int:
        """Memory that the next set needs no more of."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Through two pinned pieces of memory: one is filled from the device while all cores empty the other."""
        if not self._staging:
            self._staging = [torch.empty(_STAGING, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        device = pairs[0][0].device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        waiting: list[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = []
        turn = 0
        for source, target in pairs:
            for piece, place in _pieces(source, target):
                staged = self._staging[turn % 2][: piece.numel()]
                turn += 1
                if len(waiting) == 2:
                    _empty(waiting.pop(0))
                with torch.cuda.stream(stream):
                    staged.copy_(piece, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record(stream)
                waiting.append((event, staged, place))
        for one in waiting:
            _empty(one)


def _empty(piece: tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]) -> None:
    event, staged, place = piece
    event.synchronize()
    place.copy_(staged)


def _pieces(source: torch.Tensor, target: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Both as bytes, in pieces of the staging memory's size."""
    ours, theirs = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
    return list(zip(ours.split(_STAGING), theirs.split(_STAGING), strict=True))

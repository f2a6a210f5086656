"""CheckpointManager: `global_step_N` folders that are complete or absent, and how a run resumes from them.

    global_step_N/
      actor/ critic/     tensors, one folder per role (torch.distributed.checkpoint)
      state.json         step, data position, controllers: plain JSON
      rng.safetensors    random number generators
      huggingface/ ...   whatever `extra` wrote
      manifest.json      sizes and hashes of all of it, written last

How they get into their places is in `folders.py`, how ranks write their tensors in `parts.py`.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from posttrain.checkpoint import dcp, folders
from posttrain.checkpoint.folders import (
    MANIFEST,
    CheckpointError,
    files_below,
    read_manifest,
    sync_folder,
    sync_tree,
    verify,
    write_failure,
    write_manifest,
)
from posttrain.checkpoint.parts import WRITTEN, RolePart, take_report
from posttrain.errors import UserError
from posttrain.tracking.safe_files import Background, replace_file


def state_as_json(state: dict[str, Any]) -> bytes:
    """A TypeError names the first entry that JSON would lose or change.

    Floats come back bitwise (also NaN and infinities); tuples come back as lists.
    """
    _check_plain(state, "state")
    return json.dumps(state, indent=1).encode() + b"\n"


def _state_from_json(data: bytes) -> dict[str, Any]:
    try:
        state = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"state.json is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError("state.json does not hold a mapping")
    return state


def _check_plain(value: Any, where: str) -> None:
    if value is None or type(value) in (bool, int, float, str):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; only text keys survive JSON")
            _check_plain(item, f"{where}.{key}")
    else:
        raise TypeError(f"{where} is a {type(value).__name__}; a checkpoint's state holds plain JSON values only")


STATE = "state.json"
RNG = "rng.safetensors"
LATEST = "latest_checkpointed_iteration.txt"


# Writes a role's tensors into a new folder. In the background it returns None once training may go on (what changes the
# tensors waits until they are copied), and the folder's `.written.json` says when it is complete; a text is why it has
# been written already.
WriteRole = Callable[[Path], Any]


class CheckpointManager:
    """Saves into and loads from one run's `checkpoints/` folder.

    `keep` is the number of newest checkpoints that stay, besides the one with the largest `metric`; None keeps all.
    `on_note` receives one sentence about everything that a user should know.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int | None = None, on_note: Callable[[str], object] = print
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(
                f"trainer.max_ckpt_to_keep={keep}: at least 1 checkpoint must be kept; null keeps all."
            )
        self.folder = Path(folder)
        self._keep = keep
        self._note = on_note
        # Checkpoints that are verified already: state, generators and each role would hash all files again.
        self._verified: set[Path] = set()
        self._writing, self._abandoned = Background("checkpoint"), threading.Event()
        self._noted: set[str] = set()
        folders.clear_leftovers(self.folder)

    # -- saving

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, torch.Tensor] | WriteRole],
        state: dict[str, Any],
        rng: Mapping[str, torch.Tensor],
        extra: Callable[[Path], None] | None = None,
        metric: float | None = None,
        background: bool = False,
        on_saved: Callable[[Path], object] = lambda path: None,
    ) -> Path:
        """Write `global_step_<step>` and return it; then remove checkpoints past `keep`.

        `tensors` maps a role (`actor`, `critic`) to its tensors by name, or to what writes them into the folder it is
        given, be it one process or many; `state` is plain JSON, `extra` writes further files. Only when all have
        written is the folder synced, listed and put in its place. After an error nothing of the new checkpoint is left.

        In the `background` this returns as soon as training may go on; only what changes the tensors of a role waits
        until they are copied (`parts.HostCopies`). The next `save`, `wait` or `raise_failure` raises what went wrong.
        One save at a time: the next waits for it.
        """
        self.wait()
        target = self.folder / f"global_step_{step}"
        text = state_as_json(state)  # a state that cannot be stored fails before anything is written
        needed = self._needed(tensors)
        with ExitStack() as stack:
            stack.enter_context(_failures_of(target, needed))
            folder = stack.enter_context(folders.temporary_folder(target))
            pending = []
            for role, held in tensors.items():
                if not callable(held):
                    RolePart(folder / role, held).save()
                elif (reason := held(folder / role)) is None and background:
                    pending.append(role)
                elif background:
                    self._note_once(f"note: checkpoints are written while training waits: {reason}.")
            (folder / STATE).write_bytes(text)
            (folder / RNG).write_bytes(save_safetensors({k: v.contiguous().cpu() for k, v in rng.items()}))
            if extra is not None:
                extra(folder)
            later = stack.pop_all()  # from here on the folder belongs to the process that completes it

        def complete() -> None:
            with later:
                known = self._written_files(folder, tensors, pending)
                # The order is the guarantee: data on the disk, then the manifest with its hashes, then the final name.
                # A power cut between any two of them leaves a checkpoint that is not found or not complete.
                sync_tree(folder)
                write_manifest(folder, step=step, metric=metric, known=known)
                sync_folder(folder)
                folders.put_in_place(folder, target)
            # The same step may be saved again after a resume: what was verified under this name is gone.
            self._verified.discard(target)
            self._name_latest(step)
            self._prune()
            on_saved(target)

        if pending:
            self._writing.run(complete)
        else:
            complete()
        return target

    def wait(self) -> None:
        """Until the last save is in its place; raises what went wrong with it."""
        self._writing.wait()

    def raise_failure(self) -> None:
        """What went wrong with a save in the background, if that is known by now; does not wait."""
        if not self._writing.is_busy:
            self._writing.wait()

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way in the background."""
        return self._writing.is_busy

    def abandon(self) -> bool:
        """Give up a save that is under way, and remove what it wrote; False if there is none."""
        if not self._writing.is_busy:
            return False
        self._abandoned.set()
        with suppress(Exception):
            self._writing.wait()
        self._abandoned.clear()
        return True

    def _written_files(self, folder: Path, roles: Iterable[str], pending: Collection[str]) -> folders.Entries:
        """What the ranks say of the files that they wrote: the manager need not read these again."""
        known: folders.Entries = {}
        for role in roles:
            if role in pending or (folder / role / WRITTEN).exists():
                report = take_report(folder / role, WRITTEN, self._abandoned.is_set)
                known |= {f"{role}/{name}": entry for name, entry in report["files"].items()}
        return known

    def _note_once(self, sentence: str) -> None:
        if sentence not in self._noted:
            self._noted.add(sentence)
            self._note(sentence)

    def _needed(self, tensors: Mapping[str, Mapping[str, torch.Tensor] | WriteRole]) -> int:
        # Bytes of a checkpoint: as many as the newest one has, where other processes write; 0 if unknown.
        if not any(callable(held) for held in tensors.values()):
            return sum(t.numel() * t.element_size() for role in tensors.values() for t in role.values())  # pyright: ignore
        steps = self.steps()
        return sum(file.stat().st_size for file in files_below(self.path_of(steps[-1]))) if steps else 0

    def _name_latest(self, step: int) -> None:
        try:
            replace_file(self.folder / LATEST, f"{step}\n".encode())  # for people and scripts; never read here
        except OSError as error:
            self._note(f"{self.folder / LATEST} could not be written: {error}.")

    # -- what is there

    def steps(self) -> list[int]:
        """Steps of all checkpoint folders, oldest first, complete or not."""
        return folders.steps_in(self.folder)

    def newest(self) -> Path | None:
        """The newest checkpoint whose every file is as it was written; damaged ones are named in a note and skipped.

        None if there is no checkpoint at all; if all are damaged, a CheckpointError: to start over would replace them.
        """
        damaged = []
        # The manifest lists every file with its hash, so that a checkpoint that was cut off or copied badly is never
        # loaded.
        for step in reversed(self.steps()):
            path = self.path_of(step)
            problems = verify(path)
            if not problems:
                self._verified.add(path)
                return path
            damaged.append(f"{path.name}: {dcp.few(problems)}")
            self._note(f"The checkpoint {path} is damaged and is skipped: {dcp.few(problems)}.")
        if damaged:
            raise CheckpointError(
                f"No checkpoint in {self.folder} can be loaded: {dcp.few(damaged)}. The run does not start over, as "
                "that would replace them. Bring one back from a copy; or move the folder away, or choose another "
                "trainer.experiment_name, to begin anew."
            )
        return None

    def best(self) -> tuple[int, float] | None:
        """Step and metric of the complete checkpoint with the largest metric (the earliest of equals)."""
        best = None
        for step in self.steps():
            # Read from the manifests rather than remembered: a resumed run keeps the best checkpoint of the run before
            # it.
            metric = _metric_of(self.path_of(step))
            if metric is not None and (best is None or metric > best[1]):
                best = (step, metric)
        return best

    def path_of(self, step: int) -> Path:
        return self.folder / f"global_step_{step}"

    # -- loading

    def load_state(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """The `state` that was saved."""
        return _state_from_json(self._checked(path, STATE).read_bytes())

    def load_rng(self, path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
        """The `rng` that was saved."""
        return load_safetensors(self._checked(path, RNG).read_bytes())

    def describe(self, path: str | os.PathLike[str], role: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Name -> (shape, dtype) of the tensors of `role`."""
        return dcp.describe(dcp.listed_metadata(self.role_folder(path, role)))

    def load_tensors(
        self, path: str | os.PathLike[str], role: str, into: dict[str, torch.Tensor], *, partial: bool = False
    ) -> None:
        """Fill the tensors of `into` in place.

        Every one must be in the checkpoint with its shape and dtype, and with `partial=False` the checkpoint must
        hold no others; otherwise nothing is changed and the error names them.
        """
        dcp.read_checked(self.role_folder(path, role), into, partial=partial)

    def role_folder(self, path: str | os.PathLike[str], role: str) -> Path:
        """The folder of a role's tensors, for callers that read it themselves; the complete checkpoint is verified."""
        metadata = f"{role}/.metadata"
        if metadata not in (files := self._verified_files(path)):
            held = sorted({name.split("/")[0] for name in files if name.endswith("/.metadata")})
            raise CheckpointError(
                f"The checkpoint {path} holds no {role}, only {', '.join(held) or 'no role at all'}: its run trained "
                "with other settings (algorithm.adv_estimator, for instance). Give this run those of the checkpoint, "
                "or start a new run (trainer.experiment_name)."
            )
        return Path(path) / role

    def _checked(self, path: str | os.PathLike[str], name: str) -> Path:
        """The file `name` of a checkpoint that was verified, if its manifest lists it."""
        if name not in self._verified_files(path):
            raise CheckpointError(f"The checkpoint {path} holds no {name} (its {MANIFEST} does not list it).")
        return Path(path) / name

    def _verified_files(self, path: str | os.PathLike[str]) -> Mapping[str, Any]:
        """What the manifest of a checkpoint lists, by name; the checkpoint is verified, once per manager."""
        folder = Path(path)
        if not folder.is_dir():
            there = [f"global_step_{step}" for step in folders.steps_in(folder.parent)]
            raise CheckpointError(f"There is no checkpoint {folder}; {folder.parent} holds {dcp.few(there) or 'none'}.")
        if folder not in self._verified:
            problems = verify(folder)
            if problems:
                raise CheckpointError(
                    f"The checkpoint {folder} is damaged and is not loaded: {dcp.few(problems)}. "
                    "Name another one with trainer.resume_from_path, or let trainer.resume_mode=auto find a good one."
                )
            self._verified.add(folder)
        return read_manifest(folder)["files"]

    # -- removing

    def _prune(self) -> None:
        if self._keep is None:
            return
        # Incomplete folders do not count, so that they never push out a good one.
        complete = [step for step in self.steps() if (self.path_of(step) / MANIFEST).is_file()]
        best = self.best()
        kept = {*complete[-self._keep :], *([best[0]] if best else [])}
        for step in complete:
            if step in kept:
                continue
            try:
                folders.remove(self.path_of(step))
            except OSError as error:
                self._note(f"The old checkpoint {self.path_of(step)} could not be removed: {error}.")

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename checkpoints later than `step` to `set_aside_...`: after a resume from `step` they belong to no run."""
        moved = []
        for later in [other for other in self.steps() if other > step]:
            # Renamed, not removed: the user may have resumed from an earlier step by mistake.
            place = folders.free_name(self.folder / f"set_aside_global_step_{later}")
            os.rename(self.path_of(later), place)
            moved.append(place)
        if moved:
            names = ", ".join(path.name for path in moved)
            self._note(f"Checkpoints later than step {step} were renamed, as the run continues from there: {names}.")
        return moved


@contextmanager
def _failures_of(target: Path, needed: int) -> Iterator[None]:
    """Mistakes of the caller, lost workers and Ctrl-C pass as they are; everything else is a disk that failed, and gets
    its own words."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, TypeError, ValueError, UserError):
        raise
    except BaseException as error:
        raise write_failure(target, error, needed) from error


def _metric_of(path: Path) -> float | None:
    try:
        metric = read_manifest(path).get("metric")
    except ValueError:
        return None
    return metric if isinstance(metric, int | float) and math.isfinite(metric) else None


def capture_rng() -> dict[str, torch.Tensor]:
    """The states of Python's, NumPy's and torch's global generators, for `CheckpointManager.save(rng=...)`."""
    # As tensors rather than pickles: a checkpoint is never unpickled when it is loaded.
    _, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict) and numpy_state["bit_generator"] == "MT19937"
    state = {
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy.key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy.pos": torch.tensor([numpy_state["state"]["pos"], numpy_state["has_gauss"]], dtype=torch.int64),
        "numpy.gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
        "torch.cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state |= {f"torch.cuda.{i}": one for i, one in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_rng(state: dict[str, torch.Tensor]) -> None:
    """Put the generators back; states of CUDA devices that this machine does not have are left out."""
    gauss = state["python.gauss"].tolist()
    random.setstate((3, tuple(state["python.words"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = state["numpy.pos"].tolist()
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": state["numpy.key"].numpy().astype(np.uint32), "pos": position},
            "has_gauss": has_gauss,
            "gauss": state["numpy.gauss"].item(),
        }
    )
    torch.set_rng_state(state["torch.cpu"])
    for index in range(torch.cuda.device_count()):
        if f"torch.cuda.{index}" in state:
            torch.cuda.set_rng_state(state[f"torch.cuda.{index}"], index)

"""The directory of a run: its files and lock, what a resumed run removes, and how runs are found.

outputs/<project>/<experiment>/
  config.yaml     the resolved settings without secrets
  run.json        command, versions and machine of each start
  metrics.jsonl   one line per step; so have diagnosis.jsonl and timeline.jsonl
  events.jsonl    of an asynchronous run: its groups, weights and engines, for trainer.replay_events
  samples/        step_N.parquet, val_N.parquet
  batches/        for `posttrain replay`, tensors and JSON, no pickle: replay.json has the settings of the workers,
                  adjusted to the data, and the run's updates; step_N/ a saved DataProto as the updates received it
  logs/           run.log
  checkpoints/    global_step_N/
  traces/         step_N.json.gz of trainer.profile_steps
  crash/          what was known when a run failed
  incidents/      a page for each worker that died or hung
outputs/checkpoints -> the checkpoints of the newest run that has one
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import yaml

from posttrain.errors import UserError
from posttrain.texts import redact, utf8
from posttrain.tracking.safe_files import DamagedFile, clear_leftovers, replace_file, stored_lines
from posttrain.yaml_text import dump_yaml

_SAMPLES = re.compile(r"(?:step|val)_(\d+)\.parquet")
_BY_STEP = ("metrics.jsonl", "diagnosis.jsonl", "timeline.jsonl", "events.jsonl")
_FREE_TO_CHANGE = {
    "trainer.total_training_steps",
    "trainer.total_epochs",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.replay_events",
}


class RunDirectory:
    """The paths of one run; `open()` (or `with`) creates them and takes the lock against a second process."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        project: str,
        experiment: str,
        *,
        on_note: Callable[[str], object] = print,
    ) -> None:
        for key, name in (("trainer.project_name", project), ("trainer.experiment_name", experiment)):
            if not name or name in (".", "..") or "/" in name or "\0" in name:
                raise RunDirectoryError(f"{key}={name!r} is no name for a folder: give one without '/'.")
        self.root = Path(root)
        self.path = self.root / project / experiment
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.logs = self.path / "logs"
        self.log = self.logs / "run.log"
        self.checkpoints = self.path / "checkpoints"
        self.crash = self.path / "crash"
        self.incidents = self.path / "incidents"
        self.restarts = 0  # how often the run was started again by this process, from what it had saved
        self.machines: int | None = None  # that are left, if it continues with fewer than it began with
        self.replaced = 0  # how many of its workers were replaced alone, while the others continued
        # Counts a worker that is to be replaced alone after so many steps, and writes its page; raises where none may
        # be any more. Not by the step in the status, which is seconds old while a run continues.
        self.note_replacement: Callable[[Any, int], None] | None = None
        self.snapshots: Path | None = None  # where it saves between checkpoints, in memory
        self._note = on_note
        self._lock = RunLock(self.path / "run.lock")

    def open(self) -> Self:
        """Make the folders, take the lock, and remove what a killed run left half-written."""
        for folder in (self.path, self.samples, self.logs, self.checkpoints, self.crash):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunDirectoryError(
                    f"The run directory {self.path} cannot be made: {error}. Choose another place with "
                    "trainer.default_local_dir, trainer.project_name or trainer.experiment_name."
                ) from error
        # The lock comes before anything is removed: temporary files of a living run are not leftovers.
        self._lock.acquire()
        clear_leftovers(self.path, self.samples, self.checkpoints)
        return self

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def holds_run(self) -> bool:
        """Whether an earlier run wrote metrics or checkpoints here."""
        if self.metrics.is_file() and self.metrics.stat().st_size > 0:
            return True
        return self.checkpoints.is_dir() and any(self.checkpoints.glob("global_step_*"))

    def link_as_newest(self) -> None:
        """Point `<root>/checkpoints` here; for a run that has a checkpoint, not for one that fails at its start."""
        link = self.root / "checkpoints"
        if link.exists() and not link.is_symlink():
            self._note(
                f"{link} is a real folder, so it is left alone; this run's checkpoints are in {self.checkpoints}."
            )
            return
        # A link is replaced by renaming another one over it: readers find the old run or the new, never nothing.
        temporary = self.root / f".checkpoints.{os.getpid()}.tmp"
        try:
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(self.checkpoints.relative_to(self.root), target_is_directory=True)
            os.replace(temporary, link)
        except OSError as error:
            self._note(
                f"The link {link} could not be made ({error}); this run's checkpoints are in {self.checkpoints}."
            )

    # -- settings

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Store the resolved settings, without secrets."""
        replace_file(self.config, dump_yaml(redact(config), allow_unicode=True).encode())

    def read_config(self) -> dict[str, Any] | None:
        """The stored settings, None if there are none."""
        if not self.config.is_file():
            return None
        return yaml.safe_load(self.config.read_text()) or {}

    def changed_settings(self, config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """(key, stored, new) for every setting that differs from the stored run's; secrets are not compared."""
        stored = self.read_config()
        return [] if stored is None else diff_config(stored, redact(config))

    # -- resuming

    def truncate_after(self, step: int) -> None:
        """Remove what was written after `step`: a killed and resumed run leaves the files of an uninterrupted one."""
        for file in (self.path / name for name in _BY_STEP):
            if file.is_file():
                # Steps after the checkpoint are repeated; their old lines would stand twice in the curves.
                kept = [line for line in file.read_bytes().splitlines(keepends=True) if _is_up_to(line, step)]
                replace_file(file, b"".join(kept))
        for path in self.samples.glob("*.parquet"):
            match = _SAMPLES.fullmatch(path.name)
            if match and int(match[1]) > step:
                path.unlink()


def diff_config(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) wherever two trees differ, except for a run's length and how it resumes."""
    before, after = flatten(old), flatten(new)
    keys = [*before, *(key for key in after if key not in before)]
    return [
        (key, before.get(key), after.get(key))
        for key in keys
        if key not in _FREE_TO_CHANGE and not _equal(before.get(key), after.get(key))
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        return len(old) == len(new) and all(map(_equal, old, new))
    if old in (None, {}, []) and new in (None, {}, []):
        return True  # an empty section equals an absent one
    return old == new


def _is_up_to(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False  # the write of a killed process
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


# -- finding runs ------------------------------------------------------------------------------------------------------
_FILES = ("metrics.jsonl", "config.yaml")
ROOT = "outputs"  # the default of trainer.default_local_dir


class NoSuchRun(UserError):
    """There is no run of that name; the message lists the runs that exist."""


def is_run(folder: Path) -> bool:
    """Whether a run was written here, be it damaged: a broken link in place of a file counts."""
    return any(os.path.lexists(folder / name) for name in _FILES)


def runs_under(root: str | os.PathLike[str]) -> list[Path]:
    """Runs in `root` and in its projects, oldest first."""
    folders = [*Path(root).glob("*/*"), *Path(root).glob("*")]
    found = {os.path.realpath(folder): folder for folder in folders if os.path.isdir(folder) and is_run(folder)}
    return sorted(found.values(), key=_modified_at)


def find_run(name: str) -> Path:
    """The folder of a run: a path, or the end of one below `ROOT` (`grpo-1`, `embedded/grpo-1`)."""
    if is_run(Path(name)):
        return Path(name)
    wanted = Path(name).parts
    fitting = [folder for folder in runs_under(ROOT) if folder.parts[-len(wanted) :] == wanted]
    if fitting:
        return fitting[-1]
    known = [str(folder) for folder in runs_under(ROOT)[-5:]]
    where = f"Runs in {ROOT}/: {', '.join(reversed(known))}." if known else f"There is no run in {ROOT}/ either."
    what = f"The folder {name} holds no run" if Path(name).is_dir() else f"There is no run `{name}`"
    raise NoSuchRun(f"{what}. Give the path of its folder, or its name. {where}")


def _modified_at(folder: Path) -> tuple[float, str]:
    times = [0.0]
    for name in _FILES:
        with suppress(OSError):  # absent, removed a moment ago, or a link that leads nowhere
            times.append((folder / name).stat().st_mtime)
    return max(times), str(folder)


# -- small files -------------------------------------------------------------------------------------------------------
# Responses to a few held-out prompts at the first validation, kept for the end of the run: a resumed run is compared
# with its own beginning, not with the step at which it resumed.
BEFORE = "before.json"
Before = tuple[int, list[dict[str, Any]]]  # (step, samples with `prompt`, `response` and `score`)


def write_before(folder: Path, step: int, samples: list[dict[str, Any]]) -> None:
    """Keep the samples of the run's first validation."""
    replace_file(folder / BEFORE, json.dumps({"step": step, "samples": samples}).encode())


def read_before(folder: Path) -> Before | None:
    """What was kept; None if nothing readable is there."""
    path = folder / BEFORE
    try:
        known = json.loads(path.read_bytes()) if path.is_file() else {}
        samples = [{key: one[key] for key in ("prompt", "response", "score")} for one in known["samples"]]
        return int(known["step"]), samples
    except (OSError, ValueError, KeyError, TypeError):
        return None


# One JSON object per step: its line and advice; when each stage began and how long it took.
DIAGNOSIS, TIMELINE, EVENTS = "diagnosis.jsonl", "timeline.jsonl", "events.jsonl"


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append without fsync: lines that a killed process loses are written again when its steps are repeated."""
    with path.open("ab") as file:
        file.write(utf8(json.dumps(line, ensure_ascii=False)) + b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, up to the first damaged part; none if there is no file."""
    with suppress(FileNotFoundError, DamagedFile):
        for line in stored_lines(path):
            found = None
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
            if isinstance(found, dict):
                yield found


# -- the lock ----------------------------------------------------------------------------------------------------------
class RunDirectoryError(UserError):
    """A run directory cannot be used; the text says what to do."""


class RunTaken(RunDirectoryError):
    """Another process writes into the run directory."""


# POSIX locks do not exclude a second opener in the same process, so this set does. They are chosen over flock because a
# forked child (a reward worker that outlives a killed run) does not inherit them.
_held: set[Path] = set()


class RunLock:
    """At most one living process writes a run: the kernel frees the lock when its process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise RunTaken with the process that holds it."""
        key = self.path.resolve()
        if key in _held:
            raise self._taken_error(f"this process ({os.getpid()})")
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise self._taken_error(owner or "another process") from None
        os.ftruncate(descriptor, 0)  # only now: before, it names the owner
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._descriptor = descriptor
        _held.add(key)

    def release(self) -> None:
        if self._descriptor is None:
            return
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self.path.resolve())

    def _taken_error(self, owner: str) -> RunTaken:
        return RunTaken(
            f"The run directory {self.path.parent} is in use by {owner}. Wait for it or end it, or choose another "
            "trainer.experiment_name."
        )


FACTS = "replay.json"
# The columns that an update reads besides tensors, and those that identify rows.
FIELDS = ("uid", "sample", "branch", "parent", "fork", "turn_ends", "reward_score", "routed_experts")
_STEP = re.compile(r"step_(\d+)")


def keep_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    replace_file(folder / FACTS, utf8(json.dumps(dict(facts), ensure_ascii=False)))


def read_facts(folder: Path) -> dict[str, Any] | None:
    path = folder / FACTS
    return json.loads(path.read_bytes()) if path.is_file() else None


def keep_batch(folder: Path, step: int, batch: Any, keep: int) -> None:
    """Write the batch of a step, all or nothing, and remove those more than `keep` steps ago (below 0: none)."""
    # Under another name until it is complete: `kept_steps` must not find half a batch after a kill.
    half = folder / f".step_{step}"
    shutil.rmtree(half, ignore_errors=True)
    present = [name for name in FIELDS if name in batch.non_tensor_batch]
    batch.select(non_tensor_batch_keys=present).save_to_disk(half)
    place = batch_folder(folder, step)
    shutil.rmtree(place, ignore_errors=True)
    # A rename does not replace a folder with content, so the one of the same step before a resume is removed first.
    half.rename(place)
    for old in kept_steps(folder):
        if keep > 0 and old <= step - keep:
            shutil.rmtree(batch_folder(folder, old), ignore_errors=True)


def drop_batches_after(folder: Path, step: int) -> None:
    """A resumed run repeats these steps."""
    for later in kept_steps(folder):
        if later > step:
            shutil.rmtree(batch_folder(folder, later), ignore_errors=True)


def kept_steps(folder: Path) -> list[int]:
    found = (_STEP.fullmatch(path.name) for path in folder.glob("step_*") if (path / "fields.json").is_file())
    return sorted(int(match[1]) for match in found if match)


def batch_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step}"

"""A run that goes on when it loses a worker: all workers are ended and started again, from what was saved last. A
worker that only generates, or only holds a reward model or the reference, is replaced alone, where that changes no
number (`TrainerParts`).

A run that continues from a checkpoint is bitwise the one that was never interrupted, so a restart changes no number; it
repeats the steps since the newest checkpoint or snapshot. Everything that a run opens is closed and opened anew, reward
workers and conversations too: they hold requests of the step that was cut off. The run's directory, its log and the
console stay.

A snapshot is a checkpoint in `/dev/shm`, made between those on the disk, so that little more than the step in flight is
repeated. It is made as checkpoints are, in the background, and so rarely that training waits for it 1% of the time. It
ends with the command, however that ends. Runs on several machines have none: ranks restore from files of one machine.
Asynchronous runs have none, either.

Errors of the user's own code and settings, and memory that would run out again, end the run as before.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from posttrain import cores
from posttrain.checkpoint.folders import steps_in
from posttrain.checkpoint.manager import CheckpointManager, WriteRole, capture_rng
from posttrain.config.resolved import Resolved
from posttrain.config.trainer import machines_for, one_process
from posttrain.controller.group import RoleGroup
from posttrain.controller.incidents import CONTINUES, Incident, NoRoom, WorkerDied
from posttrain.errors import UserError, first_line
from posttrain.tracking.progress import say
from posttrain.tracking.rundir import RunDirectory
from posttrain.tracking.status import read_status, write_status
from posttrain.trainer.run.memory import named_stage, note_stage, stage_of
from posttrain.trainer.run.process import opened_attempt, opened_run
from posttrain.trainer.run.result import RunResult, came_while_stopping

LIMIT, FEWEST = "trainer.max_restarts", "trainer.min_nnodes"
Attempt = Callable[[ExitStack, Any, RunDirectory], RunResult]


class Restarts:
    """Counts the restarts in a row that led to no new step; at most `most` of them are made."""

    def __init__(self, most: int, *, keeps_machines: bool = True) -> None:
        self.most, self.count, self._furthest, self.keeps_machines = most, 0, -1, keeps_machines

    def another(self, step: int) -> bool:
        """Whether to start again after a failure behind `step`."""
        # Compared with the furthest step of all attempts: steps that are only repeated are no progress.
        if step > self._furthest:
            self._furthest, self.count = step, 0
        self.count += 1
        return self.count <= self.most


def run_with_restarts(resolved: Resolved, attempt: Attempt, stem: str | None = None) -> RunResult:
    """A run in its directory. `attempt` opens everything else on the stack that it is given, and trains."""
    keeps_machines = _keeps_machines(resolved.config)
    if resolved.config.trainer.min_nnodes is not None and not keeps_machines:
        raise UserError(
            f"{FEWEST}={resolved.config.trainer.min_nnodes} needs a Ray that runs already: the other machines leave a "
            "Ray that this run starts as soon as a machine is lost. Start Ray on all machines (ray start) and name it "
            f"by RAY_ADDRESS=HOST:6379 (docs/clusters.md), or remove {FEWEST}."
        )
    with opened_run(resolved, stem) as run, snapshot_folder(resolved.config) as run.snapshots:
        restarts = Restarts(resolved.config.trainer.max_restarts, keeps_machines=keeps_machines)
        run.note_replacement = partial(_note_replacement, run, restarts)
        while True:
            try:
                with opened_attempt(resolved, run) as (stack, config):
                    result = attempt(stack, config, run)
            except WorkerDied as death:
                _go_on_or_raise(death, run, restarts)
                continue
            except NoRoom as full:
                _go_on_with_fewer_or_raise(full, run, resolved.config)
                continue
            if run.restarts or run.replaced:
                result.restarts, result.replaced = run.restarts, run.replaced
                say(f"Workers were lost: {_reaction(run)}. See {run.incidents}.")
            return result


def _reaction(run: RunDirectory) -> str:
    """`all were started again 1 time(s), 2 worker(s) were replaced alone`."""
    counts = {
        f"all were started again {run.restarts} time(s)": run.restarts,
        f"{run.replaced} worker(s) were replaced alone": run.replaced,
    }
    return ", ".join(words for words, count in counts.items() if count)


def _go_on_with_fewer_or_raise(full: NoRoom, run: RunDirectory, config: Any) -> None:
    """A lost machine did not return within the deadline; the run goes on with those that are left, if it may."""
    now = run.machines or config.trainer.nnodes
    left = machines_for(config, min(full.machines, now - 1)) if run.restarts else None
    if left is None:
        raise full
    run.machines = left
    words = f"The run goes on with {left} of {config.trainer.nnodes} machines ({FEWEST}): no other took the place of "
    words += "the lost one within trainer.placement_timeout_s. The same command asks for all of them again."
    say(f"  ! {words}")
    with suppress(OSError, ValueError):  # the page of the loss that led here; a full disk is reported elsewhere
        page = max(run.incidents.glob("*.md"))
        page.write_text(f"{page.read_text(encoding='utf-8')}\n## Fewer machines\n\n{words}\n", encoding="utf-8")


def _keeps_machines(config: Any) -> bool:
    """Whether the machines of the run are still there when its workers were ended."""
    if config.trainer.nnodes == 1:
        return True
    from posttrain.controller.ray_address import given_address

    return given_address() is not None  # the other machines leave a Ray that this run started, when it ends


def _go_on_or_raise(death: WorkerDied, run: RunDirectory, restarts: Restarts) -> None:
    status, step = _progress(run)
    _report(death, run, step, _decide(death, restarts, step, _newest(run)))
    run.restarts += 1
    with suppress(OSError):  # a full disk is reported where something that matters is written
        write_status(run.path, "running", step, int(status.get("total_steps", 0)))


def _note_replacement(run: RunDirectory, restarts: Restarts, death: WorkerDied, step: int) -> None:
    """A worker is to be replaced while the others go on, `step` steps being done; raises `death` where it is treated as
    any other."""
    if death.recurs or not restarts.another(step):
        raise death
    note_stage(death)
    decision = f"Replacement {restarts.count} of {restarts.most}: it alone is started again ({LIMIT})."
    _report(death, run, step, decision)
    run.replaced += 1


def _progress(run: RunDirectory) -> tuple[dict[str, Any], int]:
    status = read_status(run.path) if run.holds_run() else {}
    return status, int(status.get("step", 0))


def _report(death: WorkerDied, run: RunDirectory, step: int, decision: str) -> None:
    """Writes the page of an incident and prints its line; raises where the run ends with it."""
    page = write_page(run.incidents, death, step, decision)
    where = f" See {page}." if page else ""
    if decision.startswith("The run ends"):
        raise WorkerDied(f"{death} {decision}{where}") from death
    say(f"  ! {death.who or 'A worker'} {death.what}{_at(death, step)}. {decision}{where}")


def _newest(run: RunDirectory) -> int:
    """The step of the newest checkpoint or snapshot; 0 without one."""
    folders = (run.checkpoints, *([run.snapshots] if run.snapshots else []))
    return max((step for folder in folders for step in steps_in(folder)), default=0)


def _decide(death: WorkerDied, restarts: Restarts, step: int, saved: int) -> str:
    """What is done now, in words."""
    if death.recurs:
        return f"The run ends, since new workers would meet the same end ({LIMIT} has no effect)."
    if came_while_stopping(death):
        return "The run ends, as it was asked to stop."
    if not restarts.keeps_machines:
        return f"The run ends: over several machines {LIMIT} requires a Ray that runs already (RAY_ADDRESS)."
    if restarts.another(step):
        where = f"after step {saved}" if saved else "at the first step, as nothing was saved"
        return f"Restart {restarts.count} of {restarts.most} {where} ({LIMIT})."
    if restarts.most == 0:
        return f"The run ends, since {LIMIT} is 0."
    return f"The run ends: {restarts.most} restart(s) led to no step after step {step} ({LIMIT})."


def _at(death: WorkerDied, step: int) -> str:
    stage = stage_of(death)
    return f" in step {step + 1}{f', stage {stage}' if stage else ''}"


def write_page(folder: Path, death: WorkerDied, step: int, decision: str) -> Path | None:
    """`incidents/NNN.md`: who, where, in which stage, what was known, what is done. None where it cannot be written."""
    try:
        folder.mkdir(exist_ok=True)
        number = 1 + max((int(path.stem) for path in folder.glob("*.md") if path.stem.isdigit()), default=0)
        path = folder / f"{number:03}.md"
        path.write_text("\n".join(_page_lines(number, death, step, decision)) + "\n", encoding="utf-8")
        return path
    except OSError as error:
        say(f"The page of the incident could not be written: {error}.")
        return None


def _page_lines(number: int, death: WorkerDied, step: int, decision: str) -> Iterator[str]:
    incident = death.incident or Incident(death.who)
    yield f"# Incident {number}: {incident.who or 'a worker'} {death.what}"
    yield ""
    yield f"- time: {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    yield f"- step: {step + 1}, stage: {stage_of(death) or 'unknown'}"
    yield f"- what happened: {str(death).replace(CONTINUES, '').strip()}"
    yield f"- what was done: {decision}"
    yield ""
    yield "| worker | process | last call |"
    yield "|---|---|---|"
    for who in dict.fromkeys([*incident.states, *incident.calls]):
        yield f"| {who} | {incident.states.get(who, 'unknown')} | `{incident.calls.get(who, 'none')}` |"
    if death.__cause__ is not None:
        # Without the driver's own stack; a rank's traceback is a note of its error.
        yield from _section("Error that was seen first", "".join(traceback.format_exception_only(death.__cause__)))
    if incident.printed:
        yield from _section("What it printed last", "\n".join(incident.printed))
    for who, stack in incident.stacks.items():
        yield from _section(f"Stacks of {who}", stack)


def _section(title: str, text: str) -> Iterator[str]:
    yield from ("", f"## {title}", "", "```", text.rstrip(), "```")


MEMORY = Path("/dev/shm")
SHARE = 0.01  # of the time, at most, that training waits for snapshots
BYTES = 16  # of a parameter with its optimizer state, at most
COPIES = 3  # of the state at once: the one that is being written, its source in the ranks, and the last snapshot
FREE = 0.25  # of the free memory, at most, is taken


@contextmanager
def snapshot_folder(config: Any) -> Iterator[Path | None]:
    """A folder in memory that is gone with this process; None where a run has no use for it, or cannot have one."""
    if one_process(config) or config.trainer.max_restarts == 0 or config.trainer.nnodes > 1:
        yield None
        return
    from posttrain.controller.ray_address import given_address
    from posttrain.controller.ray_node import Watched

    # Ranks of a Ray that runs already may be on any machine.
    connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if given_address() or connected or not os.access(MEMORY, os.W_OK):
        yield None
        return
    watched = Watched(str(MEMORY))
    try:
        yield Path(watched.folder)
    finally:
        watched.close()


class Snapshots:
    """Of one attempt of a run; those in `folder` stay for the next. Without a folder none is ever due."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = None if folder is None else CheckpointManager(folder, keep=1, on_note=lambda note: None)
        self._clock, self._ended, self._waited = clock, clock(), 0.0
        self._is_newest = False  # no checkpoint was saved since

    def is_due(self) -> bool:
        """Whether enough time has passed since the last one, and that is written."""
        rested = SHARE * (self._clock() - self._ended) >= self._waited
        return self._manager is not None and rested and not self.is_writing

    def take(
        self,
        step: int,
        *,
        roles: Mapping[str, RoleGroup],
        writers: Mapping[str, WriteRole],
        state: dict[str, Any],
        extra: Callable[[Path], None] | None = None,
    ) -> None:
        """A snapshot of this step, written while training goes on. After one that fails there are no more."""
        manager = self._manager
        if manager is None or not self._fits(manager.folder, roles):
            return
        began = self._clock()
        try:
            with named_stage("snapshot"):
                manager.save(step, tensors=writers, state=state, rng=capture_rng(), extra=extra, background=True)
        except WorkerDied:
            raise
        except Exception as error:
            self._give_up(f"one could not be written: {first_line(error)}")
        self._ended = self._clock()
        self._waited = self._ended - began
        self._is_newest = True

    def count_wait(self, seconds: float) -> None:
        """An update waited for the copy of the newest save."""
        if self._is_newest:
            self._waited += seconds

    @property
    def is_writing(self) -> bool:
        return self._manager is not None and self._manager.is_writing

    def newest(self) -> Path | None:
        return None if self._manager is None else self._manager.newest()

    def end(self, *, abandon: bool = False) -> None:
        """Until none is being written, or with what is written of it removed."""
        self._is_newest = False
        if self._manager is None:
            return
        if abandon:
            self._manager.abandon()
        try:
            self._manager.wait()
        except Exception as error:
            self._give_up(f"one could not be written: {first_line(error)}")

    def _fits(self, folder: Path, roles: Mapping[str, RoleGroup]) -> bool:
        size = BYTES * sum(role.group.once("engine_facts").parameters for role in roles.values())
        room = min(FREE * cores.free_memory(), shutil.disk_usage(folder).free)
        if COPIES * size > room:
            self._give_up(f"{COPIES} times {size / 1e9:.1f} GB are more than the {room / 1e9:.1f} GB that it may take")
        return self._manager is not None

    def _give_up(self, reason: str) -> None:
        say(f"note: no snapshots are kept in memory ({reason}); lost workers restart from the newest checkpoint.")
        self._manager = None

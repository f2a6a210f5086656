"""A run that goes on when it loses a worker: all workers are ended and started again, from what was saved last. A
rollout worker is replaced alone, where that changes no number (`RayPPOTrainer`).

A run that continues from a checkpoint is bitwise the one that was never interrupted, so a restart changes no number; it
repeats the steps since the newest checkpoint or snapshot (`snapshots.py`). Everything that a run opens is closed and
opened anew, reward workers and conversations too: they hold requests of the step that was cut off. The run's directory,
its log and the console stay.

Errors of the user's own code and settings, and memory that would run out again, end the run as before.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.checkpoint.folders import steps_in
from posttrain.config.resolved import Resolved
from posttrain.config.trainer import machines_for
from posttrain.controller.incidents import CONTINUES, Incident, NoRoom, WorkerDied
from posttrain.errors import UserError
from posttrain.tracking.progress import say
from posttrain.tracking.rundir import RunDirectory
from posttrain.tracking.status import read_status, write_status
from posttrain.trainer.run.memory import note_stage, stage_of
from posttrain.trainer.run.process import opened_attempt, opened_run
from posttrain.trainer.run.result import RunResult, came_while_stopping
from posttrain.trainer.run.snapshots import snapshot_folder

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
    """`all were started again 1 time(s), 2 rollout worker(s) were replaced alone`."""
    counts = {
        f"all were started again {run.restarts} time(s)": run.restarts,
        f"{run.replaced} rollout worker(s) were replaced alone": run.replaced,
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


def _note_replacement(run: RunDirectory, restarts: Restarts, death: WorkerDied) -> None:
    """A rollout worker is to be replaced while the others go on; raises `death` where it is treated as any other."""
    _, step = _progress(run)
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

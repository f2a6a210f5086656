"""What every kind of run writes: settings, metrics, status, checkpoints, a progress bar, timings, traces of steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain import pulse
from posttrain.checkpoint.folders import CheckpointError, step_of
from posttrain.checkpoint.manager import CheckpointManager, capture_rng, restore_rng
from posttrain.config.environment import installed
from posttrain.controller.incidents import WorkerDied
from posttrain.controller.pool import StagePeaks, Workers, begin_trace, end_trace
from posttrain.tracking.loggers import open_loggers, read_metrics
from posttrain.tracking.progress import Every, Progress, say
from posttrain.tracking.rundir import TIMELINE, RunDirectory, append_line
from posttrain.tracking.safe_files import Background
from posttrain.tracking.status import FRESH_S, STATUS_FILE, write_origin, write_status
from posttrain.trainer.run.memory import named_stage
from posttrain.trainer.run.recovery import Snapshots
from posttrain.trainer.run.result import GracefulStop, RunResult
from posttrain.workers.measures import SAVE_WAIT

if TYPE_CHECKING:  # a supervised run does not load the workers of the others
    from posttrain.workers.groups import ActorRolloutGroup, CriticGroup
    from posttrain.workers.supervised import SupervisedGroup

# Role -> the settings of its model; `model` is what a supervised run trains.
_SECTIONS = {"actor": "actor_rollout_ref.model", "critic": "critic.model", "model": "model"}


CHECK_S = 2.0  # between two looks at the workers while a checkpoint is waited for


class StepTraces:
    """Traces of single steps (`trainer.profile_steps`) by torch's profiler, with the stages of the run as ranges.

    `of(step)` goes around every step, `stage(name)` around every stage. A traced step writes `traces/step_N.json.gz`,
    and one more file for each rank where there are several workers. No other step is touched.
    """

    def __init__(self, steps: Sequence[int] | None, run: Path) -> None:
        self.steps, self.folder, self.active = set(steps or ()), run / "traces", False
        self.workers: Workers | None = None

    def check(self, first: int, last: int) -> None:
        """Name the steps that will not be traced, since the run does not make them."""
        if skipped := sorted(step for step in self.steps if not first <= step <= last):
            say(f"note: trainer.profile_steps names {skipped}, but the steps {first} to {last} are made.")

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        if step not in self.steps:
            yield
            return
        stem = self.folder / f"step_{step}"
        with self.workers.traced(stem) if self.workers else nullcontext():
            profiler, written, self.active = begin_trace(), None, True
            try:
                yield
                written = stem.with_name(f"{stem.name}.json.gz")
            finally:  # a step that fails leaves no trace
                self.active = False
                end_trace(profiler, written)
        say(f"Trace of step {step}: {stem}*.json.gz; open it in https://ui.perfetto.dev or chrome://tracing.")

    def stage(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name) if self.active else nullcontext()


class RunWriter:
    """Writes one run. `start` it before the first step; `total_steps` is the run's length."""

    def __init__(self, config: Any, run: RunDirectory, total_steps: int, *, stored_config: Any) -> None:
        self.stored_config = stored_config.to_dict()
        self.config, self.run, self.total_steps = config, run, total_steps
        self.checkpoints = CheckpointManager(run.checkpoints, keep=config.trainer.max_ckpt_to_keep, on_note=say)
        self.snapshots = Snapshots(run.snapshots)
        self.history: list[dict[str, Any]] = []
        self.timing: dict[str, float] = {}
        self.peaks = StagePeaks()  # of this process; of the workers' where these are others
        self.traces = StepTraces(config.trainer.profile_steps, run.path)
        self.spans: list[list[Any]] = []  # [stage, when it began, its seconds] of this step
        # The same of the workers, with who it was; empty where they are in this process.
        self.worker_spans: Callable[[], list[list[Any]]] = list
        self.disk = pulse.Lane("save_checkpoint", "disk")
        self.lanes = [self.disk]  # of what goes on beside the loop
        self._step_began: float | None = None  # by time.perf_counter(): when the first stage of the step did
        self.check_workers: Callable[[], None] = lambda: None
        self.behind = Background("samples")
        self._stack, self._linked = ExitStack(), False
        self.is_ending = False  # no further step will be made
        self._background_s: list[float] = []  # seconds of each save that was completed since the last step

    def start(self, step: int) -> None:
        """Open loggers and the bar; `step` steps are done already, what lies beyond them is cut off."""
        self.step = step
        self.traces.check(step + 1, self.total_steps)
        self.run.truncate_after(step if step else -1)  # steps after the checkpoint are made again, bit-for-bit
        if step and step >= self.total_steps:
            self._say_nothing_left(step)
        else:
            self.run.write_config(self.stored_config)
            write_origin(self.run.path, step)
        self.history = (
            [line for line in read_metrics(self.run.metrics) if line["step"] > 0] if self.run.metrics.exists() else []
        )
        first = step + 1 if step else 0
        names = installed(self.config.trainer.logger)  # the others were noted when the settings were read
        self.loggers = open_loggers(names, self.run, self.stored_config, first_step=first, say=say, clock=time.time)
        self._stack.callback(self.loggers.close)
        self.progress = self._stack.enter_context(Progress(self.total_steps, done=step))
        write_status(self.run.path, "running", step, self.total_steps)
        self._stack.callback(Every(FRESH_S, self._refresh_status).close)

    def _say_nothing_left(self, step: int) -> None:
        # The settings on disk stay those that made the steps, whatever this command asks for.
        if not getattr(self.config.trainer, "val_only", False):
            say(
                f"Nothing is left to train: {step} steps are done, and {self.total_steps} are asked for. For more, "
                "raise trainer.total_training_steps or trainer.total_epochs; for a new run, give another "
                "trainer.experiment_name."
            )
        self.total_steps = step

    def _refresh_status(self) -> None:
        with suppress(OSError):  # a full disk is reported where something that matters is written
            write_status(self.run.path, "running", self.step, self.total_steps, self.progress.moment())

    @contextmanager
    def running(self, save: Callable[[], object]) -> Iterator[GracefulStop]:
        """The context of a run's steps, behind `start`. Ctrl-C and SIGTERM end the run early, after its last step was
        saved. At the end everything is written, and `status` says how the run has ended."""
        self.status = "failed"
        try:
            with GracefulStop(say) as stop:
                yield stop
                is_over = self.step >= self.total_steps
                self.status = "finished" if is_over or not stop.requested else "stopped"
                if stop.requested and not is_over:
                    self.is_ending = True
                    if self.step and not self.is_due(self.config.trainer.save_freq, self.step):
                        save()
                    self.wait_until_written()
                    what = f"Stopped by {stop.requested.name} after step {self.step}"
                    say(f"{what}; the same command continues this run.")
                self.wait_until_written()
        except KeyboardInterrupt:
            self.status = "stopped"
            raise
        finally:
            self.close(self.status)

    def result(self, stop: GracefulStop, validation: list[tuple[int, dict[str, float]]]) -> RunResult:
        """What the run has reached."""
        return RunResult(self.run.path, self.status, self.step, self.history, validation, stop.requested)

    def is_due(self, frequency: int, step: int) -> bool:
        """Whether something that is done every `frequency` steps (below 1: never), and at the last one, is done now."""
        return step >= self.total_steps or (frequency > 0 and step % frequency == 0)

    def wait_until_written(self) -> None:
        """Wait until everything of the steps so far is on the disk; what could not be written is raised here."""
        self.behind.wait()
        with self.showing("saving"):
            self._wait_for_writers()
            self.checkpoints.wait()

    def _wait_for_writers(self) -> None:
        # Ranks write in the background and report through files, so the end of a rank must be noticed here.
        looked = time.monotonic()
        while self.checkpoints.is_writing or self.snapshots.is_writing:
            time.sleep(0.02)
            if time.monotonic() - looked > CHECK_S:
                self.check_workers()
                looked = time.monotonic()

    def close(self, status: str) -> None:
        try:
            self.behind.wait()
        except Exception as error:  # a good end has waited already; otherwise the error that ended the run matters more
            say(f"{self.run.samples}: the last samples could not be written: {error}.")
        self._end_saves(sys.exception())
        try:
            self._stack.close()  # the status is kept fresh until here
        finally:
            try:
                write_status(self.run.path, status, self.step, self.total_steps)
            except OSError as error:  # a full disk: what ended the run matters more
                say(f"{self.run.path / STATUS_FILE} could not be written: {error}.")

    def _end_saves(self, reason: BaseException | None) -> None:
        """Finish a save that has begun, whatever ended the run, since its copy is complete. Ctrl-C does not wait for
        it, and a worker that died cannot write."""
        self.snapshots.end(abandon=True)
        if isinstance(reason, KeyboardInterrupt | WorkerDied):
            if self.checkpoints.abandon():
                say("The checkpoint that was being written is incomplete and was removed; earlier ones are intact.")
            return
        try:
            with self.showing("saving"):
                self.checkpoints.wait()
        except Exception as error:
            say(str(error))

    def showing(self, name: str) -> AbstractContextManager[None]:
        """Inside, the console and `status.json` name this stage; a run that was not started has neither."""
        return self.progress.stage(name) if hasattr(self, "progress") else nullcontext()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Names a stage and adds its time to this step's timings."""
        started, at = time.perf_counter(), time.time()
        if self._step_began is None:
            self._step_began = started
        self.peaks.begin()
        try:
            with self.showing(name), named_stage(name), self.traces.stage(name):
                yield
        finally:
            spent = time.perf_counter() - started
            self.peaks.end(name)
            self.timing[name] = self.timing.get(name, 0.0) + spent
            self.spans.append([name, round(at, 4), round(spent, 4)])

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Around the start of a call that goes on beside other stages: what it takes of its workers' memory counts for
        this stage, in which it is waited for."""
        # Workers get the bounds between their calls. Begun outside, the call would be over when its stage begins.
        self.peaks.begin()
        try:
            yield
        finally:
            self.peaks.end(name)

    def count_save_waits(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a step's updates without the seconds that these waited for the copy of a save. They become
        part of the save's time."""
        kept = {name: value for name, value in metrics.items() if name.rpartition("/")[2] != SAVE_WAIT}
        for name in metrics.keys() - kept.keys():
            role = name.rpartition("/")[0]
            stage = f"update_{role}" if role else "update"
            # A critic on workers of its own may have waited while the actor was updated.
            waited = min(metrics[name], self.timing.get(stage, 0.0))
            self.timing[stage] = self.timing.get(stage, 0.0) - waited
            self.timing["save_checkpoint"] = self.timing.get("save_checkpoint", 0.0) + waited
            self.snapshots.count_wait(waited)
        return kept

    def take_times(self) -> dict[str, float]:
        """Seconds of each stage since the last call, and the wall time from the first of them as `step`: stages may
        overlap, and their sum would count such times twice."""
        taken, self.timing = self.timing, {}
        if self._step_began is not None:
            taken["step"] = time.perf_counter() - self._step_began
        self._step_began = None
        return taken

    def write_timeline(self, step: int) -> None:
        """When the stages of this step began and how long they took, lane by lane."""
        beside = [span for lane in self.lanes for span in lane.take()]
        append_line(self.run.path / TIMELINE, {"step": step, "stages": [*self.spans, *self.worker_spans(), *beside]})
        self.spans = []

    def save(
        self,
        step: int,
        *,
        roles: Mapping[str, ActorRolloutGroup | CriticGroup | SupervisedGroup],
        state: dict[str, Any],
        export: Callable[[Path], None] | None,
    ) -> Path:
        """An atomic checkpoint of step `step`; a run that continues from it has all that came before. With
        `trainer.async_save` it is written while the next steps are computed."""
        # Where nothing is left to compute, a copy would only cost memory.
        background = self.config.trainer.async_save and not self.is_ending and step < self.total_steps
        started = time.perf_counter()

        def saved(path: Path) -> None:
            say(f"saved {path}")
            if not self._linked:
                self._linked = True
                self.run.link_as_newest()
            if background:
                self._background_s.append(time.perf_counter() - started)
                self.disk.note(False)

        with self.stage("save_checkpoint"), self.showing("saving"):
            # Samples are written behind the loop. A checkpoint promises everything up to its step, so they come first.
            self.wait_until_written()
            self.snapshots.end()  # ranks have memory for one copy of their state at a time
            self.disk.note(background)
            return self.checkpoints.save(
                step,
                tensors={name: role.begin_save if background else role.save for name, role in roles.items()},
                state=state,
                rng=capture_rng(),
                extra=export,
                metric=self._metric(step),
                background=background,
                on_saved=saved,
            )

    def snapshot_is_due(self) -> bool:
        """Whether the state of this step should be kept in memory; not while a checkpoint is being written."""
        return self.snapshots.is_due() and not self.checkpoints.is_writing

    def take_background_times(self) -> dict[str, float]:
        """Of saves that were completed since the last step: seconds from their start to their end, as a metric."""
        taken, self._background_s = self._background_s, []
        return {"perf/time_of_background_save": sum(taken)} if taken else {}

    def export_is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step gets a Hugging Face folder."""
        wanted = self.config.trainer.export_hf
        return wanted == "all" or (wanted == "last" and step >= self.total_steps)

    def find_resume_point(self, adapters: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
        """The checkpoint to continue from, and its state: `resume_from_path`, or the newest good one of the run
        directory. `adapters`: role -> `lora_state` of this run, which must match the checkpoint's."""
        settings = self.config.trainer
        path = None
        if settings.resume_mode == "auto" or self.run.restarts:
            path = self.checkpoints.newest()
            snapshot = self.snapshots.newest()
            if snapshot and (path is None or step_of(snapshot) > step_of(path)):
                path = snapshot
        if path is None and settings.resume_mode == "resume_path" and settings.resume_from_path:
            path = Path(settings.resume_from_path)
        if path is None:
            return None
        state = self.checkpoints.load_state(path)
        for role, stored in state.get("lora", {}).items():
            problem = _base_problem(stored, adapters.get(role), _SECTIONS[role])
            if problem is not None:
                raise CheckpointError(
                    f"The checkpoint {path} cannot be continued, {role}: {problem}. Give this run the base and "
                    "settings of the checkpoint, or start a new run (trainer.experiment_name)."
                )
        return path, state

    def continue_from(self, path: Path, step: int) -> None:
        """After all parts are restored: continue with the checkpoint's random numbers, without what lies behind it."""
        # Last, because loading models, data and batches may draw random numbers.
        restore_rng(self.checkpoints.load_rng(path))
        self.checkpoints.set_aside_after(step)

    def _metric(self, step: int) -> float | None:
        """The number of this step by which the best checkpoint is chosen, largest best; None if it has none."""
        return None

    def say_best(self, words: Callable[[float], str]) -> None:
        """Name the best checkpoint; `words` shows its number."""
        best = self.checkpoints.best()
        if best is not None:
            say(f"best checkpoint by validation: global_step_{best[0]} ({words(best[1])})")


def _base_problem(stored: Mapping[str, Any], present: Mapping[str, Any] | None, section: str) -> str | None:
    """Why adapters that were trained on one base must not continue on the base of this run; None if they may.

    `section` holds the settings of their model.
    """
    if present is None:
        return f"it holds LoRA adapters only, and this run trains all weights: set {section}.lora_rank"
    was, now = stored["base"], present["base"]
    if was["fingerprint"] != now["fingerprint"]:
        return (
            f"its adapters were trained beside the base {was['path']} (fingerprint {was['fingerprint']}), but the base "
            f"of this run, {now['path']}, has other weights (fingerprint {now['fingerprint']})"
        )
    for name in ("dtype", "quantization"):
        if was[name] != now[name]:
            return f"its base was held with model.{name}={was[name]}, but this run holds it with {now[name]}"
    return None

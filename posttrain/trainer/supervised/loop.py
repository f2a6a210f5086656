"""The supervised loop: rows -> one optimizer step -> metrics, with validation, checkpoints and exact resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.checkpoint.rng import restore_rng
from posttrain.data.sampler import PromptSampler
from posttrain.planning.batch_sizes import count_steps
from posttrain.tracking.progress import say
from posttrain.tracking.rundir import RunDirectory
from posttrain.trainer.run.adapter_base import check_bases
from posttrain.trainer.run.result import RunResult, TrainingStopped
from posttrain.trainer.run.stopping import GracefulStop
from posttrain.trainer.supervised.recorder import SupervisedRecorder
from posttrain.trainer.supervised.tasks import ROLE, Task


class SupervisedTrainer:
    """Holds the parts of a run; `fit` trains."""

    def __init__(self, config: Any, task: Task, run: RunDirectory, *, stored_config: Any) -> None:
        self.config, self.task, self.run = config, task, run
        batch, self.total_steps = count_steps(config, task.rows)
        seed = config.trainer.seed if config.data.seed is None else config.data.seed
        self.sampler = PromptSampler(task.rows, batch, seed=seed, shuffle=config.data.shuffle, drop_last=False)
        self.recorder = SupervisedRecorder(config, run, self.total_steps, task, stored_config=stored_config)
        self.step = self.bad_steps = 0

    def fit(self) -> RunResult:
        """Train to the last step; gives what was reached. Ctrl-C and SIGTERM save and end it early."""
        self._resume()
        self.recorder.start(self.step)
        status = "failed"
        try:
            with GracefulStop(say) as stop:
                self._validate_at_start()
                while self.step < self.total_steps and not stop.requested:
                    with self.recorder.traces.of(self.step + 1):
                        self._train_step()
                status = "finished" if self.step >= self.total_steps else "stopped"
                self._leave(stop)
        except KeyboardInterrupt:
            status = "stopped"
            raise
        finally:
            self.recorder.close(status)
        self.recorder.farewell()
        result = RunResult(self.run.path, status, self.step, self.recorder.history, self.recorder.validations)
        result.stopped_by = stop.requested
        return result

    def _train_step(self) -> None:
        with self.recorder.stage("update"):
            metrics = self.task.train_step(self.sampler.next_batch())
        self.step += 1
        validation = self._validate() if self._is_due(self.config.trainer.test_freq) else {}
        self.recorder.finish_step(self.step, metrics, validation, self._epoch())
        self._count_bad_steps(metrics)
        if self._is_due(self.config.trainer.save_freq):
            self._save()

    def _epoch(self) -> float:
        """Passes over the data that are done."""
        return self.step / self.sampler.batches_per_epoch

    def _is_due(self, frequency: int) -> bool:
        return self.step >= self.total_steps or (frequency > 0 and self.step % frequency == 0)

    def _count_bad_steps(self, metrics: dict[str, float]) -> None:
        self.bad_steps = self.bad_steps + 1 if metrics["skipped"] > 0 else 0
        if self.bad_steps:
            say(f"  ! step {self.step}: loss or gradient was not finite; the update was skipped.")
        if self.bad_steps >= self.config.trainer.max_bad_steps:
            raise TrainingStopped(
                f"{self.bad_steps} steps in a row were skipped because loss or gradient was not finite "
                "(trainer.max_bad_steps). Lower optim.lr, or look at the data. The run continues from its last "
                f"checkpoint in {self.run.checkpoints}."
            )

    # -- validation, saving, leaving ------------------------------------------------------------------------------
    def _validate_at_start(self) -> None:
        if self.config.trainer.val_before_train and self.step == 0:
            found = self._validate()
            if found:
                self.recorder.loggers.log(0, found)

    def _validate(self) -> dict[str, float]:
        with self.recorder.stage("validation"):
            found = self.task.validate()
        if found is None:
            return {}
        self.recorder.record_validation(self.step, found)
        return found

    def _save(self) -> Path:
        wanted, last = self.config.trainer.export_hf, self.step >= self.total_steps
        exports = wanted == "all" or (wanted == "last" and last)
        state = {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "bad_steps": self.bad_steps,
            "lora": self._adapters(),
        }
        return self.recorder.save(
            self.step,
            tensors={ROLE: self.task.group.save},
            state=state,
            export=(lambda folder: self.task.group.export_hf(folder / "huggingface")) if exports else None,
        )

    def _adapters(self) -> dict[str, Any]:
        return {} if self.task.adapters is None else {ROLE: self.task.adapters}

    def _resume(self) -> None:
        """Continue from `resume_from_path`, or from the newest good checkpoint of the run directory."""
        trainer, checkpoints = self.config.trainer, self.recorder.checkpoints
        given = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        path = Path(given) if given else checkpoints.newest() if trainer.resume_mode == "auto" else None
        if path is None:
            return
        state = checkpoints.load_state(path)
        check_bases(path, state.get("lora", {}), self._adapters())
        self.task.group.load(checkpoints.role_folder(path, ROLE))
        self.step, self.bad_steps = int(state["step"]), int(state["bad_steps"])
        self.sampler.load_state_dict(state["sampler"])
        restore_rng(checkpoints.load_rng(path))
        checkpoints.set_aside_after(self.step)
        say(f"Resumed from {path}: {self.step} of {self.total_steps} steps are done.")

    def _leave(self, stop: GracefulStop) -> None:
        if stop.requested and self.step < self.total_steps:
            if self.step and not self._is_due(self.config.trainer.save_freq):
                self._save()
            say(f"Stopped by {stop.requested.name} after step {self.step}; the same command continues this run.")

"""The supervised loop: rows -> one optimizer step -> metrics, with validation, checkpoints and exact resuming.

`SupervisedRecorder` writes what a run leaves behind, `SupervisedTrainer` is the loop. `run_supervised` makes a finished
run of a resolved configuration: directory, data, task, loop, and tidy ends.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from posttrain.config.resolved import Resolved
from posttrain.config.trainer import devices_of
from posttrain.data.sampler import PromptSampler
from posttrain.models.loading import check_positions, load_tokenizer
from posttrain.models.model_files import is_adapter
from posttrain.planning.budgets import count_steps
from posttrain.tracking.curve import text_plot
from posttrain.tracking.diagnosis import join_within
from posttrain.tracking.loggers import read_metrics
from posttrain.tracking.progress import say
from posttrain.tracking.rundir import RunDirectory
from posttrain.trainer.embedded import fill_embedded
from posttrain.trainer.run.memory import named_stage, plan_memory
from posttrain.trainer.run.process import (
    driven_by_one_machine,
    find_run_device,
    keep_worker_logs,
    load_external,
    open_workers,
    prepare_torch,
)
from posttrain.trainer.run.recovery import run_with_restarts
from posttrain.trainer.run.result import RunResult, TrainingStopped
from posttrain.trainer.run.writer import RunWriter
from posttrain.trainer.supervised.tasks import ROLE, Task
from posttrain.workers.roles import adapter_notes

# A step's metrics with another name in the log than `train/NAME`.
NAMES = {"skipped": "train/bad_steps", "tokens": "perf/total_num_tokens"}


class SupervisedRecorder(RunWriter):
    """Writes one supervised run."""

    def __init__(self, config: Any, run: RunDirectory, total_steps: int, task: Task, *, stored_config: Any) -> None:
        super().__init__(config, run, total_steps, stored_config=stored_config)
        self.task = task
        self.validations: list[tuple[int, dict[str, float]]] = []

    def finish_step(self, step: int, metrics: dict[str, float], validation: dict[str, float], epoch: float) -> None:
        """Metrics and the line of a finished step."""
        self.step = step
        metrics = self.count_save_waits(metrics)
        times = self.take_times()
        seconds = times.get("update", 0.0)
        logged = {NAMES.get(name, f"train/{name}"): value for name, value in metrics.items()}
        logged |= {"train/epoch": epoch, **validation}
        logged |= {f"timing_s/{stage}": spent for stage, spent in times.items()}
        logged |= self.take_background_times()
        throughput = metrics["tokens"] / seconds / devices_of(self.config) if seconds else 0.0
        logged |= {"perf/time_per_step": seconds, "perf/throughput": throughput}
        quiet = "console" not in self.config.trainer.logger
        self.progress.step(join_within(self.task.pieces(logged), self.progress.room), loss=metrics["loss"], quiet=quiet)
        self.write_timeline(step)
        self.loggers.log(step, logged)
        self.history.append({"step": step, **logged})
        self.checkpoints.raise_failure()

    def record_validation(self, step: int, metrics: dict[str, float]) -> None:
        self.validations.append((step, metrics))
        say(f"validation at step {step}: {self.task.validation_line(metrics)}")

    def _metric(self, step: int) -> float | None:
        latest = next((metrics for at, metrics in reversed(self.validations) if at == step), None)
        return None if latest is None else self.task.goodness(latest)

    def print_summary(self) -> None:
        """The curve, the change by training, and where everything lies."""
        logged = list(read_metrics(self.run.metrics))
        name = self.task.curve if any(self.task.curve in line for line in logged) else "train/loss"
        points = [(line["step"], line[name]) for line in logged if name in line]
        if len(points) > 2:
            say(text_plot([x for x, _ in points], [y for _, y in points], title=f"{name} over steps"))
        held_out = [line for line in logged if self.task.curve in line]
        if len(held_out) > 1:
            say(f"validation before: {self.task.validation_line(held_out[0])}")
            say(f"validation after:  {self.task.validation_line(held_out[-1])}")
        self.say_best(lambda number: f"{self.task.curve} {abs(number):.4g}")
        model = self.checkpoints.path_of(self.step) / "huggingface"
        if model.is_dir():
            what = "adapter" if is_adapter(model) else "model"
            say(f"The trained {what} is in {model}.")
        say(f"The run is in {self.run.path}: metrics.jsonl, logs/run.log, checkpoints/.")


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
        with self.recorder.running(self._save) as stop:
            self._validate_at_start()
            while self.step < self.total_steps and not stop.requested:
                with self.recorder.traces.of(self.step + 1):
                    self._train_step()
        self.recorder.print_summary()
        return self.recorder.result(stop, self.recorder.validations)

    def _train_step(self) -> None:
        with self.recorder.stage("update"):
            metrics = self.task.train_step(self.sampler.next_batch())
        self.step += 1
        validation = self._validate() if self.recorder.is_due(self.config.trainer.test_freq, self.step) else {}
        self.recorder.finish_step(self.step, metrics, validation, self._epoch())
        self._count_bad_steps(metrics)
        if self.recorder.is_due(self.config.trainer.save_freq, self.step):
            self._save()
        elif self.recorder.snapshot_is_due():
            roles, writers = {ROLE: self.task.group}, {ROLE: self.task.group.begin_save}
            self.recorder.snapshots.take(self.step, roles=roles, writers=writers, state=self._state())

    def _epoch(self) -> float:
        """Passes over the data that are done."""
        return self.step / self.sampler.batches_per_epoch

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
        return self.recorder.save(
            self.step,
            roles={ROLE: self.task.group},
            state=self._state(),
            export=self._export if self.recorder.export_is_due(self.step) else None,
        )

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "bad_steps": self.bad_steps,
            "lora": self._adapters(),
        }

    def _export(self, folder: Path) -> None:
        self.task.group.export_hf(folder / "huggingface")

    def _adapters(self) -> dict[str, Any]:
        return {} if self.task.adapters is None else {ROLE: self.task.adapters}

    def _resume(self) -> None:
        found = self.recorder.find_resume_point(self._adapters())
        if found is None:
            return
        path, state = found
        self.task.group.load(self.recorder.checkpoints.role_folder(path, ROLE))
        self.step, self.bad_steps = int(state["step"]), int(state["bad_steps"])
        self.sampler.load_state_dict(state["sampler"])
        self.recorder.continue_from(path, self.step)
        say(f"Resumed from {path}: {self.step} of {self.total_steps} steps are done.")


@driven_by_one_machine
def run_supervised(resolved: Resolved, task_class: type[Task], *, data: Any = None, val_data: Any = None) -> RunResult:
    """One whole run. `data` and `val_data` stand in for files."""

    def attempt(stack: ExitStack, config: Any, run: RunDirectory) -> RunResult:
        stored = copy.deepcopy(config)
        load_external(config.model.external_lib, "model.external_lib")
        device = find_run_device(config.trainer)
        prepare_torch(config.trainer, device)
        fill_embedded([config.model], config.data, given=data is not None, files=task_class.embedded_files)
        tokenizer = load_tokenizer(config.model)
        dataset, held_out = task_class.dataset, config.data.val_files if val_data is None else val_data
        train: Any = dataset(config.data.train_files if data is None else data, tokenizer, config.data, split="train")
        val: Any = None if held_out is None else dataset(held_out, tokenizer, config.data, split="val")
        for note in dict.fromkeys([*train.notes, *(val.notes if val else [])]):
            say(f"note: {note}")
        batch, steps = count_steps(config, len(train))
        if batch < config.data.train_batch_size:
            say(f"note: data.train_batch_size is lowered to the {batch} training rows that there are.")
        external = config.model.external_lib
        workers = stack.enter_context(open_workers(config, device, external, run.logs, run.machines))
        plan_memory(config, device, resolved.explicit, workers)
        stack.callback(keep_worker_logs, workers, run.logs)
        parts = {"tokenizer": tokenizer, "train": train, "val": val, "device": device, "workers": workers}
        with named_stage("load"):
            task = task_class(config, **parts, total_steps=steps)
        say(task.describe(train, val, steps))
        _say_model(config, task, device, max(train.longest, val.longest if val else 0))
        trainer = SupervisedTrainer(config, task, run, stored_config=stored)
        trainer.recorder.worker_spans, trainer.recorder.check_workers = workers.spans, workers.check
        trainer.recorder.traces.workers = workers
        return trainer.fit()

    return run_with_restarts(resolved, attempt, task_class.stem)


def _say_model(config: Any, task: Task, device: torch.device, longest: int) -> None:
    facts = task.group.engine_facts.once()
    share = f", {facts.trained:,} of them trained" * (facts.trained < facts.parameters)
    packed = "packed rows" if facts.packed else "padded rows"
    held = f", its base in 4 bits ({config.model.quantization})" if config.model.quantization else ""
    say(
        f"Model: {config.model.path}, {facts.parameters:,} parameters{share}, {facts.dtype} on {device}{held}, {packed}"
    )
    if facts.engine:
        say(f"Train engine: {facts.engine}")
    for note in adapter_notes(facts, config.model):
        say(f"note: {note}")
    positions = check_positions(facts.positions, longest, f"the longest row has {longest} tokens")
    for note in (facts.note, positions):
        if note:
            say(f"note: {note}")

"""What a supervised run leaves behind: metrics, checkpoints, and the words on the console."""

from __future__ import annotations

from typing import Any

from posttrain.models.paths import is_adapter
from posttrain.tracking.curve import text_plot
from posttrain.tracking.diagnosis import fitted
from posttrain.tracking.loggers import read_metrics
from posttrain.tracking.progress import say
from posttrain.tracking.rundir import RunDirectory
from posttrain.trainer.run.writer import RunWriter
from posttrain.trainer.supervised.tasks import Task

NAMES = {"skipped": "train/bad_steps", "tokens": "perf/total_num_tokens"}
"""A step's metrics with another name in the log than `train/NAME`."""


class SupervisedRecorder(RunWriter):
    """Writes one supervised run."""

    def __init__(self, config: Any, run: RunDirectory, total_steps: int, task: Task, *, stored_config: Any) -> None:
        super().__init__(config, run, total_steps, stored_config=stored_config)
        self.task = task
        self.validations: list[tuple[int, dict[str, float]]] = []

    def finish_step(self, step: int, metrics: dict[str, float], validation: dict[str, float], epoch: float) -> None:
        """Metrics and the line of a finished step."""
        self.step = step
        seconds = self.timing.get("update", 0.0)
        logged = {NAMES.get(name, f"train/{name}"): value for name, value in metrics.items()}
        logged |= {"train/epoch": epoch, **validation}
        logged |= {f"timing_s/{stage}": spent for stage, spent in self.timing.items()}
        logged |= {"perf/time_per_step": seconds, "perf/throughput": metrics["tokens"] / seconds if seconds else 0.0}
        self.timing = {}
        quiet = "console" not in self.config.trainer.logger
        self.progress.step(fitted(self.task.pieces(logged), self.progress.room), loss=metrics["loss"], quiet=quiet)
        self.write_timeline(step)
        self.loggers.log(step, logged)
        self.history.append({"step": step, **logged})

    def record_validation(self, step: int, metrics: dict[str, float]) -> None:
        self.validations.append((step, metrics))
        say(f"validation at step {step}: {self.task.validation_line(metrics)}")

    def _metric(self, step: int) -> float | None:
        latest = next((metrics for at, metrics in reversed(self.validations) if at == step), None)
        return None if latest is None else self.task.goodness(latest)

    def farewell(self) -> None:
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

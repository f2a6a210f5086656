"""What a run leaves behind: metrics, samples, checkpoints, and the words on the console."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.manager import CheckpointManager
from posttrain.checkpoint.rng import capture_rng
from posttrain.config.root import PPOConfig
from posttrain.protocol import DataProto
from posttrain.tracking.curve import before_after, text_plot
from posttrain.tracking.diagnosis import RunFacts, diagnose
from posttrain.tracking.loggers import open_loggers, read_metrics
from posttrain.tracking.metrics import step_metrics
from posttrain.tracking.progress import Progress, say
from posttrain.tracking.rundir import RunDirectory
from posttrain.tracking.samples import thin_samples, write_samples
from posttrain.trainer.ppo.rundirs import write_status


class Recorder:
    """Writes one run. Enter it before the first step; `total_steps` is the run's length."""

    def __init__(
        self,
        config: PPOConfig,
        run: RunDirectory,
        total_steps: int,
        *,
        stored_config: PPOConfig,
        grouped: bool,
        kl_on: bool,
    ) -> None:
        self.stored_config = stored_config.to_dict()
        self.config, self.run, self.total_steps = config, run, total_steps
        self.checkpoints = CheckpointManager(run.checkpoints, keep=config.trainer.max_ckpt_to_keep, on_note=say)
        self.history: list[dict[str, Any]] = []
        self.validations: list[tuple[int, dict[str, float], list[dict[str, Any]]]] = []
        self.timing: dict[str, float] = {}
        actor = config.actor_rollout_ref.actor
        self.facts = RunFacts(
            kl_on=kl_on,
            lr=actor.optim.lr,
            kl_coef=actor.kl_loss_coef,
            n=config.actor_rollout_ref.rollout.n,
            clip_ratio=actor.clip_ratio,
            loss_agg_mode=actor.loss_agg_mode,
            grouped=grouped,
        )
        self._stack = ExitStack()

    def start(self, step: int) -> None:
        """Open loggers and the bar; `step` steps are done already, what lies beyond them is cut off."""
        self.step = step
        self.run.truncate_after(step if step else -1)
        self.run.write_config(self.stored_config)
        self.history = (
            [line for line in read_metrics(self.run.metrics) if line["step"] > 0] if self.run.metrics.exists() else []
        )
        names = [name for name in self.config.trainer.logger if name != "console"]
        first = step + 1 if step else 0
        self.loggers = open_loggers(names, self.run, self.stored_config, first_step=first, say=say)
        self._stack.callback(self.loggers.close)
        self.progress = self._stack.enter_context(Progress(self.total_steps, done=step))
        write_status(self.run, "running", step, self.total_steps)

    def close(self, status: str) -> None:
        try:
            write_status(self.run, status, self.step, self.total_steps)
        except OSError as error:  # a full disk: what ended the run matters more
            say(f"{self.run.path / 'status.json'} could not be written: {error}.")
        finally:
            self._stack.close()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of a stage to this step's timings."""
        started = time.perf_counter()
        try:
            yield
        except torch.OutOfMemoryError as error:
            error.add_note(name)
            raise
        finally:
            self.timing[name] = self.timing.get(name, 0.0) + time.perf_counter() - started

    def finish_step(self, step: int, batch: DataProto, update: dict[str, float], validation: dict[str, float]) -> None:
        """Metrics, samples and the line of a finished step."""
        self.step = step
        self.timing["step"] = sum(self.timing.values())
        metrics = step_metrics(
            batch, timing=self.timing, update=update, max_response_length=self.config.data.max_response_length
        )
        metrics = {**metrics, **validation}
        self.timing = {}
        line, advice = diagnose(metrics, self.history, self.facts)
        tracking = self.config.tracking
        if tracking.samples_freq > 0 and step % tracking.samples_freq == 0:
            write_samples(self.run.samples, step, batch)
            thin_samples(self.run.samples, tracking.samples_max_gb * 1e9)
        self.loggers.log(step, metrics)
        self.history.append(metrics)
        quiet = "console" not in self.config.trainer.logger
        self.progress.step(line, advice, reward=metrics.get("reward_mean"), quiet=quiet)

    def record_validation(self, step: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        self.validations.append((step, metrics, samples))
        shown = ", ".join(
            f"{name} {value:.3f}" for name, value in metrics.items() if "mean@" in name or "pass@" in name
        )
        say(f"validation at step {step}: {shown}")

    def save(
        self,
        step: int,
        *,
        tensors: dict[str, dict[str, torch.Tensor]],
        state: dict[str, Any],
        export: Callable[[Path], None] | None,
    ) -> Path:
        """An atomic checkpoint of step `step`."""
        path = self.checkpoints.save(
            step, tensors=tensors, state=state, rng=capture_rng(), extra=export, metric=self._metric(step)
        )
        say(f"saved {path}")
        return path

    def _metric(self, step: int) -> float | None:
        """The validation metric of this step by which the best checkpoint is chosen."""
        latest = next((metrics for at, metrics, _ in reversed(self.validations) if at == step), None)
        if latest is None:
            return None
        wanted = self.config.trainer.best_metric
        if wanted is not None:
            return latest.get(wanted)
        return next((value for name, value in latest.items() if "/mean@" in name), None)

    def farewell(self) -> None:
        """The curve, samples from before and after, and where everything lies."""
        name, points = self._curve()
        if len(points) > 1:
            say(text_plot([x for x, _ in points], [y for _, y in points], title=f"{name} over steps"))
        if len(self.validations) > 1 and self.validations[0][2]:
            say("the same prompts before and after:")
            pairs = zip(self.validations[0][2], self.validations[-1][2], strict=False)
            say(
                before_after(
                    [(b["prompt"], b["response"], b["score"], a["response"], a["score"]) for b, a in list(pairs)[:5]]
                )
            )
        best = self.checkpoints.best()
        if best is not None:
            say(f"best checkpoint by validation: global_step_{best[0]} ({best[1]:.3f})")
        say(f"The run is in {self.run.path}: metrics.jsonl, samples/, logs/run.log, checkpoints/.")

    def _curve(self) -> tuple[str, list[tuple[int, float]]]:
        """Validation accuracy if there is any, otherwise the reward."""
        logged = list(read_metrics(self.run.metrics))
        names = [key for line in logged for key in line if key.startswith("val/") and "/mean@" in key]
        name = names[0] if names else "reward_mean"
        return name, [(line["step"], line[name]) for line in logged if name in line]

"""What a run leaves behind: metrics, samples, checkpoints, and the words on the console."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from posttrain.config.root import PPOConfig
from posttrain.config.trainer import devices_of
from posttrain.controller.pool import Workers
from posttrain.planning.budgets import Sizes
from posttrain.protocol import DataProto
from posttrain.rollout.sampling import sampling_words
from posttrain.texts import own_words, redact
from posttrain.tracking.curve import before_after, text_plot
from posttrain.tracking.diagnosis import RunFacts, StepFacts, collect_advice, diagnose
from posttrain.tracking.loggers import read_metrics
from posttrain.tracking.metrics import GENERATED_S, step_metrics
from posttrain.tracking.progress import console_width, say
from posttrain.tracking.rundir import (
    DIAGNOSIS,
    Before,
    RunDirectory,
    append_line,
    drop_batches_after,
    keep_batch,
    keep_facts,
    read_before,
    write_before,
)
from posttrain.tracking.samples import sample_table, thin_samples, write_step, write_validation, write_vocabulary
from posttrain.tracking.step_line import describe_failures, failing_tools, most_common_error
from posttrain.trainer.ppo.own_roles import STATES, RoleStates
from posttrain.trainer.ppo.sample_writer import SampleWriter
from posttrain.trainer.run.writer import RunWriter
from posttrain.workers.groups import ActorRolloutGroup, CriticGroup


class Recorder(RunWriter):
    """Writes a run of the PPO family."""

    def __init__(
        self,
        config: PPOConfig,
        run: RunDirectory,
        total_steps: int,
        *,
        stored_config: PPOConfig,
        workers: Workers,
        grouped: bool,
        kl_on: bool,
    ) -> None:
        super().__init__(config, run, total_steps, stored_config=stored_config)
        self.peaks, self.worker_spans, self.traces.workers = workers.peaks(), workers.spans, workers
        self.check_workers = workers.check
        self.validations: list[tuple[int, dict[str, float], list[dict[str, Any]]]] = []
        self.before: Before | None = None
        self.tokenizer: Any = None
        self.sample_writer: SampleWriter | None = None
        actor = config.actor_rollout_ref.actor
        self.facts = RunFacts(
            kl_on=kl_on,
            lr=actor.optim.lr,
            kl_coef=actor.kl_loss_coef,
            n=config.actor_rollout_ref.rollout.n,
            temperature=config.actor_rollout_ref.rollout.temperature,
            clip_ratio=actor.clip_ratio,
            loss_agg_mode=actor.loss_agg_mode,
            grouped=grouped,
            samples_freq=config.tracking.samples_freq,
        )

    def start(self, step: int) -> None:
        super().start(step)
        self.before = read_before(self.run.path) if step else None

    def keep_facts(self, **facts: Any) -> None:
        """For `posttrain replay`: the settings as they were fitted to the data, and the run's length."""
        if self.config.tracking.keep_batches:
            keep_facts(self.run.path / "batches", {"config": redact(self.config.to_dict()), **facts})
            drop_batches_after(self.run.path / "batches", self.step)

    def keep_batch(self, step: int, batch: DataProto) -> None:
        """The batch as the update is about to take it."""
        if keep := self.config.tracking.keep_batches:
            keep_batch(self.run.path / "batches", step, batch, keep)

    def finish_step(self, step: int, batch: DataProto, update: dict[str, float], validation: dict[str, float]) -> None:
        """Metrics, samples and the line of a finished step."""
        self.step = step
        update = self.count_save_waits(update)
        metrics = step_metrics(
            batch,
            timing=self.take_times(),
            update=update,
            max_response_length=self.config.data.max_response_length,
            n_devices=devices_of(self.config),
            generated_s=batch.meta_info.get(GENERATED_S),
        )
        metrics = {**metrics, **validation, **self.peaks.take(), **self.take_background_times()}
        error = most_common_error(batch.non_tensor_batch.get("reward_error", ()))
        tools = describe_failures(failing_tools(batch.non_tensor_batch.get("tool_calls", ())))
        seen = metrics, self.history, self.facts
        line, advice = diagnose(*seen, width=self.progress.room, reward_error=error, tool_error=tools)
        if self.samples_are_due(step):
            self._write_samples(step, batch)
        quiet = "console" not in self.config.trainer.logger
        self.progress.step(line, advice, reward=metrics.get("reward_mean"), quiet=quiet)
        self.write_timeline(step)
        said = [one._asdict() for one in collect_advice(StepFacts(*seen, error, tools))]
        if said:
            append_line(self.run.path / DIAGNOSIS, {"step": step, "advice": said})
        self.loggers.log(step, metrics, said)
        self.history.append(metrics)
        self.checkpoints.raise_failure()

    def _write_samples(self, step: int, batch: DataProto) -> None:
        sampling = sampling_words(self.config)
        if self.tokenizer is not None and SampleWriter.takes(batch):
            self.sample_writer = self.sample_writer or SampleWriter(
                self.tokenizer, say, self.config.trainer.hung_worker_timeout_s
            )
            self._write_in_background(self.sample_writer.job(self.run.samples, step, batch, sampling))
            return
        # The table is built here, as the batch's tensors are about to be freed; compressing it is left to a thread.
        table = self._samples(step, batch, sampling)
        self._write_in_background(lambda: write_step(self.run.samples, step, table))

    def samples_are_due(self, step: int) -> bool:
        freq = self.config.tracking.samples_freq
        return freq > 0 and step % freq == 0

    def keep_vocabulary(self, tokenizer: Any) -> None:
        """What each token id of the samples stands for; a tokenizer that cannot tell is no reason to stop."""
        self.tokenizer = tokenizer
        try:
            write_vocabulary(self.run.path, tokenizer)
        except OSError:
            raise
        except Exception as error:
            say(f"note: samples will be shown without their tokens, as the tokenizer does not list them: {error}")

    def validation_table(self, step: int, batch: DataProto) -> pa.Table | None:
        """One batch of a validation for `write_validation_samples`; None where no samples are wanted."""
        if self.config.tracking.samples_freq == 0:
            return None
        return self._samples(step, batch, sampling_words(self.config, validate=True))

    def _samples(self, step: int, batch: DataProto, sampling: dict[str, Any]) -> pa.Table:
        # With tools, the text that the model itself wrote goes along: `posttrain eval --responses` scores it.
        table = sample_table(step, batch, sampling=sampling)
        if self.tokenizer is None or "num_turns" not in batch.non_tensor_batch:
            return table
        ids, marks = (table[name].to_pylist() for name in ("response_ids", "response_mask"))
        written = pa.array(own_words(ids, marks, self.tokenizer), pa.string())
        return table.set_column(table.column_names.index("own_words"), "own_words", written)

    def write_validation_samples(self, step: int, tables: Sequence[pa.Table | None]) -> None:
        wanted = [table for table in tables if table is not None]
        if wanted:
            self._write_in_background(lambda: write_validation(self.run.samples, step, wanted))

    def _write_in_background(self, write: Callable[[], object]) -> None:
        """Write a file of samples while the next step is computed."""
        most = self.config.tracking.samples_max_gb * 1e9

        def work() -> None:
            write()
            thin_samples(self.run.samples, most)

        self.behind.run(work)

    def record_validation(self, step: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        self.validations.append((step, metrics, samples))
        # Written once, at the run's first validation: a resumed run shows the same "before".
        if self.before is None and samples:
            self.before = (step, samples)
            write_before(self.run.path, step, samples)
        shown = ", ".join(
            f"{name} {value:.3f}"
            for name, value in metrics.items()
            if "/mean@" in name or ("/pass@" in name and not name.endswith("/pass@1"))
        )
        say(f"validation at step {step}: {shown}")

    def _metric(self, step: int) -> float | None:
        """The validation metric of this step by which the best checkpoint is chosen."""
        latest = next((metrics for at, metrics, _ in reversed(self.validations) if at == step), None)
        if latest is None:
            return None
        wanted = self.config.trainer.best_metric
        if wanted is not None:
            return latest.get(wanted)
        return next((value for name, value in latest.items() if "/mean@" in name), None)

    def print_summary(self) -> None:
        """The curve, samples from before and after, and where everything lies."""
        name, points = self._curve()
        if len(points) > 1:
            say(text_plot([x for x, _ in points], [y for _, y in points], title=f"{name} over steps"))
        last = self.validations[-1] if self.validations else None
        if last is not None and self.before is not None and self.before[0] < last[0]:
            say(f"the same prompts before (step {self.before[0]}) and after (step {last[0]}):")
            pairs = zip(self.before[1], last[2], strict=False)
            say(
                before_after(
                    [(b["prompt"], b["response"], b["score"], a["response"], a["score"]) for b, a in list(pairs)[:5]],
                    width=console_width(),
                )
            )
        self.say_best(lambda number: f"{number:.3f}")
        say(f"The run is in {self.run.path}: metrics.jsonl, samples/, logs/run.log, checkpoints/.")

    def _curve(self) -> tuple[str, list[tuple[int, float]]]:
        """Validation accuracy if there is any, otherwise the reward."""
        logged = list(read_metrics(self.run.metrics))
        names = [key for line in logged for key in line if key.startswith("val/") and "/mean@" in key]
        name = names[0] if names else "reward_mean"
        return name, [(line["step"], line[name]) for line in logged if name in line]


class Stateful(Protocol):
    """A part of the run with a small state, as plain JSON."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


class HoldsBatch(Protocol):
    """A part of the run that may hold sampled responses for a later step, which are files of the checkpoint."""

    @property
    def is_empty(self) -> bool: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int
    bad_steps: int  # steps in a row whose updates were skipped


class Checkpoints:
    """Saves and restores a run: the roles' weights and optimizers, `parts` by their names in `state.json`, `batches`
    by the names of their flags there, what the user's own roles hold, and the global random numbers."""

    def __init__(
        self,
        recorder: Recorder,
        sizes: Sizes,
        *,
        actor: ActorRolloutGroup,
        critic: CriticGroup | None,
        parts: Mapping[str, Stateful],
        batches: Mapping[str, HoldsBatch],
        own: RoleStates,
    ) -> None:
        self.recorder, self.sizes, self.own = recorder, sizes, own
        self.actor, self.critic, self.parts, self.batches = actor, critic, parts, batches

    def save(self, progress: Progress) -> Path:
        """Write the checkpoint of this step, with a Hugging Face folder where one is due."""

        def extra(folder: Path) -> None:
            self._save_beside(folder)
            if self.recorder.export_is_due(progress.step):
                self.actor.export_hf(folder / "huggingface")

        return self.recorder.save(progress.step, roles=self._roles(), state=self._state(progress), export=extra)

    def snapshot(self, progress: Progress) -> None:
        """Keep the state of this step in memory, if that is due: lost workers are started again from it."""
        if self.recorder.snapshot_is_due():
            roles = self._roles()
            writers = {name: role.begin_save for name, role in roles.items()}
            self.recorder.snapshots.take(
                progress.step, roles=roles, writers=writers, state=self._state(progress), extra=self._save_beside
            )

    def _roles(self) -> dict[str, ActorRolloutGroup | CriticGroup]:
        return {"actor": self.actor, **({"critic": self.critic} if self.critic else {})}

    def _save_beside(self, folder: Path) -> None:
        for held in self.batches.values():
            held.save(folder)
        self.own.save(folder)

    def _state(self, progress: Progress) -> dict[str, Any]:
        return {
            "step": progress.step,
            "bad_steps": progress.bad_steps,
            **{name: part.state_dict() for name, part in self.parts.items()},
            **{name: not held.is_empty for name, held in self.batches.items()},
            "lora": self._adapters(),
            **({STATES: sizes} if (sizes := self.own.sizes()) else {}),
        }

    def restore(self) -> Progress | None:
        """Continue from `resume_from_path`, or from the newest good checkpoint of the run directory; None where there
        is nothing to continue from."""
        found, checkpoints = self.recorder.find_resume_point(self._adapters()), self.recorder.checkpoints
        if found is None:
            return None
        path, state = found
        self.own.load(path, state.get(STATES, {}))
        self.actor.load(checkpoints.role_folder(path, "actor"))
        if self.critic:
            self.critic.load(checkpoints.role_folder(path, "critic"))
        progress = Progress(int(state["step"]), int(state["bad_steps"]))
        state.setdefault("prompts", progress.step * self.sizes.prompts)  # earlier versions did not count them
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        for name, held in self.batches.items():
            if state.get(name):
                held.load(path)
        self.recorder.continue_from(path, progress.step)
        self.actor.sync_weights(progress.step)
        say(f"Resumed from {path}: {progress.step} of {self.sizes.total_steps} steps are done.")
        return progress

    def _adapters(self) -> dict[str, Any]:
        # A checkpoint of adapters does not hold their base, so it records which base they belong to.
        found = {"actor": self.actor.lora_state()}
        if self.critic:
            found["critic"] = self.critic.lora_state()
        return {role: state for role, state in found.items() if state is not None}

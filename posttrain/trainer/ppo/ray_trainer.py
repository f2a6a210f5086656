"""The training loop of the PPO family: prompts -> rollout -> reward -> log-probs -> advantages -> update -> sync.

What differs between algorithms is data: which estimator, which loss, whether there is a critic, a reference, KL in the
reward. A stage whose result is not needed is not run. One controller process runs the loop and calls worker groups;
with one worker the group calls it in this process and Ray is not needed.
"""

from __future__ import annotations

from pathlib import Path

import torch

from posttrain.algorithms import apply_kl_in_reward, correction_is_on
from posttrain.batch.columns import Column
from posttrain.batch.samples import has_several_rows, sample_of_rows
from posttrain.controller.group import Future
from posttrain.controller.incidents import WorkerDied
from posttrain.data.dataset import collate
from posttrain.planning.budgets import critic_updates
from posttrain.protocol import DataProto
from posttrain.rollout.native.speculation import speculation_metrics
from posttrain.tracking.progress import say
from posttrain.trainer.ppo.advantages import compute_advantage, greedy_baselines
from posttrain.trainer.ppo.experience import take_prompts
from posttrain.trainer.ppo.first_batch import is_fresh
from posttrain.trainer.ppo.parts import REFERENCE, TrainerParts
from posttrain.trainer.ppo.recorder import Progress
from posttrain.trainer.ppo.reward import reward_weights
from posttrain.trainer.run.memory import named_stage
from posttrain.trainer.run.result import RunResult, TrainingStopped
from posttrain.workers.actor.correction import can_correct_in_update
from posttrain.workers.measures import ROW


class RayPPOTrainer(TrainerParts):
    """Trains with the parts of a run; `fit` is the loop. Built from a configuration, a tokenizer, data and a reward.

    A subclass may name worker classes of its own, and override a stage.
    """

    # -- the loop -------------------------------------------------------------------------------------------------
    def fit(self) -> RunResult:
        """Train to the last step; gives what was reached. Ctrl-C and SIGTERM save and end it early."""
        self._load_checkpoint()
        self.recorder.start(self.step)
        self.recorder.keep_facts(
            updates=self.sizes.total_updates,
            critic_updates=critic_updates(self.config, self.sizes),
            critic_warmup=self.sizes.critic_warmup,
        )
        with self.recorder.running(self._save_checkpoint) as stop:
            if self.config.tracking.samples_freq > 0:
                self.recorder.keep_vocabulary(self.tokenizer)
            self.pending.begin(self.step, self.sizes.total_steps)
            self._validate_at_start()
            while self.step < self.sizes.total_steps and not (stop.requested or self.config.trainer.val_only):
                with self.recorder.traces.of(self.step + 1):
                    self._train_step()
        self.recorder.print_summary()
        validation = [(step, metrics) for step, metrics, _ in self.recorder.validations]
        return self.recorder.result(stop, validation)

    def _train_step(self) -> None:
        stage = self.recorder.stage
        step = self.step + 1
        self.reward_fn.progress = (self.step, self.sizes.total_steps)
        self.pending.begin_step(step)
        # Every stage adds its fields to this one batch; rows keep their order from here to the update.
        batch, metrics = self._rollout(step)
        self._start_next_rollout()  # from here on other workers generate while these train
        self._check_step_zero(batch)
        beside = self._begin_beside(batch)  # reference and critic on workers of their own compute from here on
        if self.estimator.needs_greedy_baseline:
            with stage("greedy"):
                metrics |= greedy_baselines(self.experience, batch)
        if self._needs_old_log_probs():
            with stage("old_log_prob"):
                batch.union(self._old_log_probs(batch))
        if self.estimator.needs_sum_pi_squared:
            with stage("sum_pi_squared"):
                batch.union(self.actor_rollout_wg.compute_sum_pi_squared(batch))
        if self.use_reference:
            with stage("ref"):
                batch.union(self._reference_log_probs(batch, beside.get("ref")))
        if self.critic_wg:
            with stage("values"):
                begun = beside.get("values") or self.critic_wg.compute_values.later(batch)
                batch.union(self.critic_wg.group.wait(begun))
        with stage("adv"):
            metrics |= self._reward_kl(batch)
            self._advantages(batch)
            metrics |= self._choose_next_prompts(batch)
        self.recorder.keep_batch(step, batch)  # before the update: `posttrain replay` repeats it from this
        metrics |= self._update(batch, step)
        self.pending.reach_sync()  # waits for whole responses, unless they continue with new weights
        with stage("sync"):
            metrics |= self._sync_weights(step)
            self.pending.note_weights(step, metrics.get("sync/checksum"))
        self.step = step
        validation = self._validate_if_due()
        self.recorder.finish_step(step, batch, metrics, validation)
        self._count_bad_steps(metrics)  # after the metrics are written: they show what went wrong
        if self._save_is_due():
            self._save_checkpoint()
        elif not self.config.trainer.max_staleness:  # otherwise responses are under way: a snapshot would wait for them
            self.checkpoints.snapshot(Progress(self.step, self.bad_steps))
        elif self.pending.was_drained(step):
            self.pending.drain(step)  # the replayed run was stopped here, and continued

    # -- stages ---------------------------------------------------------------------------------------------------
    def _rollout(self, step: int) -> tuple[DataProto, dict[str, float]]:
        """The step's responses with their scores; with dynamic sampling as many batches as fill one with signal."""
        if not self.config.algorithm.filter_groups.enable:
            batch, metrics = self._sample(), {}
        else:
            if self.pending.bound:  # in synchronous training surplus is a step old, and trained
                self.pending.drop(self.group_filter.take_out(lambda rows: self.pending.is_too_old(rows, self.step)))
            batch, metrics = self.group_filter.fill(lambda _: self._sample(), self.sizes.prompts)
            batch.set_decoder(self.experience.decode)
        batch.meta_info["step"] = step
        metrics |= self.pending.note_trained(batch, self.step)
        if self.config.actor_rollout_ref.rollout.speculation is not None:
            metrics |= speculation_metrics(self.rollout_wg.take_counts())
        return batch, metrics

    def _sample(self) -> DataProto:
        """A batch: prompts -> responses -> scores."""
        with self.recorder.stage("gen"):
            batch = self.pending.take(self.step)
            # At the beginning of a run with over-sampling, or where some were too old.
            while batch is None and (self.pending.extra or self.pending.groups):
                self._ask_ahead(self.sizes.prompts + self.pending.extra - self.pending.groups)
                batch = self.pending.take(self.step)
            if batch is None:
                batch = self._generate(self._next_prompts())
        return self._score(batch)

    def _start_next_rollout(self) -> None:
        """With `trainer.max_staleness`: have responses of so many next steps generated from here on."""
        if self.pending.extra:
            steps = min(self.pending.bound, self.sizes.total_steps - self.step - 1)
            wanted = steps * self.sizes.prompts + self.pending.extra - self.group_filter.groups
            if steps and wanted > self.pending.groups:
                self._ask_ahead(wanted - self.pending.groups)
            return
        while self._can_ask_ahead():
            # Less than a batch where groups of one are left: they were too old, or the settings have changed.
            self._ask_ahead(self.sizes.prompts - self.pending.groups % self.sizes.prompts)

    def _ask_ahead(self, prompts: int) -> None:
        self.pending.start(self._next_prompts(prompts), self.config.actor_rollout_ref.rollout.n)

    def _can_ask_ahead(self) -> bool:
        # The surplus of dynamic sampling is trained first: a batch that waits for it would grow older than the bound.
        ahead = self.pending.groups // self.sizes.prompts + self.group_filter.groups // self.sizes.prompts
        return ahead < self.config.trainer.max_staleness and self.step + 1 + ahead < self.sizes.total_steps

    def _next_prompts(self, count: int | None = None) -> DataProto:
        """The next prompts (those of a step, or `count`), each with a serial number and a uid of its own."""
        rows = self.pending.next_rows(self.sampler.next_batch, count or self.sizes.prompts)
        prompts = collate([self.train_dataset[row] for row in rows], pad_token_id=self.tokenizer.pad_token_id)
        numbered = self.pending.note_asked(self.experience.number(prompts), rows, self.step)
        self.row_of_prompt = dict(zip(numbered.non_tensor_batch["uid"], rows, strict=True))
        return numbered

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """The prompt's fields only; everything else stays in `batch`, same rows, same order."""
        return take_prompts(batch)

    def _generate(self, batch: DataProto) -> DataProto:
        """n responses per prompt; each goes to the reward workers as soon as it ends."""
        rows = self.experience.ask(batch, self.config.actor_rollout_ref.rollout.n)
        return self.experience.wait_for_responses(rows)

    def _score(self, batch: DataProto) -> DataProto:
        """Waits for the scores that are still being computed, and puts each on its response's last token."""
        if "reward_score" not in batch.non_tensor_batch:  # a checkpoint's batch has its scores
            with self.recorder.stage("reward"):
                self.experience.wait_for_scores(batch)
        if self.model_reward:
            with self.recorder.stage("reward_model"):
                self.model_reward.join(batch)
        return self.experience.with_token_scores(batch)

    def _needs_old_log_probs(self) -> bool:
        # With one update per batch the old policy is the one being differentiated, unless older weights sampled rows.
        algorithm, correction = self.config.algorithm, self.config.algorithm.rollout_correction
        return (
            self.config.actor_rollout_ref.actor.old_log_probs != "auto"
            or self._records_routes
            or self.sizes.updates_per_step > 1
            or algorithm.use_kl_in_reward
            or algorithm.filter_groups.enable
            or self.estimator.needs_sum_pi_squared
            or (correction_is_on(correction) and not can_correct_in_update(correction))
        )

    @property
    def _records_routes(self) -> bool:
        """Whether the pass over old log-probs records which experts the update takes."""
        return self.config.actor_rollout_ref.actor.router_replay.mode == "R2"

    def _old_log_probs(self, batch: DataProto) -> DataProto:
        source = self.config.actor_rollout_ref.actor.old_log_probs
        off = self.config.trainer.max_staleness > 0  # the old policy is the one that begins to learn (pending.py)
        from_rollout = self.first_batch.rollout_is_exact and not off and not self._records_routes
        if source == "rollout" or (source == "auto" and from_rollout):
            made = batch.batch.column("rollout_log_probs")
            return DataProto({"old_log_probs": made if isinstance(made, Column) else made.clone()})
        computed = self.actor_rollout_wg.compute_log_prob(batch)
        if source == "auto" and not off and not correction_is_on(self.config.algorithm.rollout_correction):
            # Sampled by earlier weights (surplus of dynamic sampling): those are their old policy.
            older_B = ~torch.from_numpy(is_fresh(batch, self.step))
            if older_B.any():
                computed.batch["old_log_probs"][older_B] = batch.batch["rollout_log_probs"][older_B]
        return computed

    def _begin_beside(self, batch: DataProto) -> dict[str, Future[DataProto]]:
        """By stage, the passes of roles with workers of their own, which compute while the policy does."""
        begun: dict[str, Future[DataProto]] = {}
        if self.use_reference and self.groups.is_apart(REFERENCE):
            with self.recorder.measured("ref"):
                begun["ref"] = self.ref_wg.compute_ref_log_prob.later(batch)
        if self.critic_wg and self.groups.is_apart("critic"):
            with self.recorder.measured("values"):
                begun["values"] = self.critic_wg.compute_values.later(batch)
        return begun

    def _reference_log_probs(self, batch: DataProto, begun: Future[DataProto] | None) -> DataProto:
        """The reference's log-probs, by a call that has begun or begins here. Its weights never change: where a worker
        of its own is lost, the call is repeated by the one in its place."""
        while True:
            begun = begun or self.ref_wg.compute_ref_log_prob.later(batch)
            try:
                return self.ref_wg.group.wait(begun)
            except WorkerDied as death:
                if self.replace_reference is None:
                    raise
                self.replace_reference(death)
                begun = None

    def _reward_kl(self, batch: DataProto) -> dict[str, float]:
        """KL taken from the reward, if configured; the coefficient is the controller's."""
        if not self.config.algorithm.use_kl_in_reward:
            return {}
        fields = batch.batch
        fields["token_level_rewards"], metrics = apply_kl_in_reward(
            fields["token_level_scores"],
            fields["old_log_probs"],
            fields["ref_log_prob"],
            fields["response_mask"],
            self.kl_controller,
            self.config.algorithm.kl_penalty,
            torch.from_numpy(sample_of_rows(batch)) if has_several_rows(batch) else None,
        )
        return metrics

    def _choose_next_prompts(self, batch: DataProto) -> dict[str, float]:
        """Have the next step repeat prompts of this one, if the estimator does so; never those of a repeated step."""
        choose = self.estimator.prompts_to_repeat
        if choose is None:
            return {}
        is_repeating = self.sampler.is_repeating
        if not is_repeating:
            self.sampler.repeat([self.row_of_prompt[uid] for uid in choose(batch, self.config.algorithm)])
        return {"prompts/repeated": float(is_repeating)}

    def _advantages(self, batch: DataProto) -> None:
        weights = reward_weights(
            self.config.reward, self.model_reward, self.reward_fn.parts, named=self.reward_fn.named
        )
        compute_advantage(
            batch,
            self.config.algorithm.adv_estimator,
            config=self.config.algorithm,
            reward_weights=weights,
            failure_score=self.config.reward.failure_score,
        )

    def _update(self, batch: DataProto, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        critic, beside = self.critic_wg, None
        if critic and self.groups.is_apart("critic"):
            with self.recorder.measured("update_critic"):
                beside = critic.update_critic.later(batch)
        elif critic:
            with self.recorder.stage("update_critic"):
                metrics |= critic.update_critic(batch)
        warming_up = step <= self.sizes.critic_warmup
        if self.sizes.critic_warmup:
            metrics["critic/warmup"] = float(warming_up)
        if not warming_up:
            with self.recorder.stage("update_actor"):
                metrics |= self._update_actor(batch, keep_tokens=self.recorder.samples_are_due(step))
        if critic and beside is not None:  # it was updated while the actor was
            with self.recorder.stage("update_critic"):
                metrics |= critic.group.wait(beside)
        # Some notes are known only after a first update, such as a user's loss that returns a scalar.
        if step == 1:
            for note in self.actor_rollout_wg.notes():
                if note not in self.groups.notes:
                    say(f"note: {note}")
        return metrics

    def _update_actor(self, batch: DataProto, *, keep_tokens: bool) -> dict[str, float]:
        """All optimizer steps on a batch; `keep_tokens` gives it the `new_log_probs` and `entropy` of these."""
        # Keeping log-probs of every token costs memory on the device: only steps whose samples are written do.
        if not keep_tokens:
            return self.actor_rollout_wg.update_actor(batch)
        batch.batch[ROW] = torch.arange(len(batch))
        metrics = self.actor_rollout_wg.update_actor(batch)
        del batch.batch[ROW]
        for name, values in self.actor_rollout_wg.token_stats().items():
            batch.batch[name] = values
        return metrics

    def _sync_weights(self, version: int) -> dict[str, float]:
        while True:
            try:
                return self.actor_rollout_wg.sync_weights(version)
            except WorkerDied as death:
                if self.experience.replace is None:
                    raise
                self._replace_rollout(death, version)

    # -- checks ---------------------------------------------------------------------------------------------------
    def _check_step_zero(self, batch: DataProto) -> None:
        """On the first batch of this process: whole groups, agreement with the rollout, the largest batch tried."""
        if (fresh := self.first_batch.unchecked(batch, self.step)) is not None:
            with self.recorder.showing("check"), named_stage("check"):
                self.first_batch.run(fresh, self.step)

    def _count_bad_steps(self, metrics: dict[str, float]) -> None:
        skipped = {role: int(metrics.get(f"{role}/bad_steps", 0)) for role in ("actor", "critic")}
        self.bad_steps = self.bad_steps + 1 if any(skipped.values()) else 0
        for role, count in skipped.items():
            if count:
                updates = int(metrics[f"{role}/optimizer_steps"])
                what = f"loss or gradient was not finite in {count} of {updates} updates of the {role}"
                say(f"  ! step {self.step}: {what}; skipped.")
        if self.bad_steps >= self.config.trainer.max_bad_steps:
            raise TrainingStopped(
                f"In {self.bad_steps} steps in a row updates were skipped because loss or gradient was not finite "
                "(trainer.max_bad_steps). Lower actor_rollout_ref.actor.optim.lr (or critic.optim.lr), or look at the "
                "samples for rewards that are not numbers. The run continues from its last checkpoint in "
                f"{self.run.checkpoints}."
            )

    # -- validation, saving, leaving ------------------------------------------------------------------------------
    def _validate_at_start(self) -> None:
        wanted = self.config.trainer.val_before_train and self.step == 0
        if self.validator is None or not (wanted or self.config.trainer.val_only):
            return
        metrics = self.validator.run(self.step)
        if self.step == 0:
            self.recorder.loggers.log(0, metrics)

    def _validate_if_due(self) -> dict[str, float]:
        if self.validator is None or not self.recorder.is_due(self.config.trainer.test_freq, self.step):
            return {}
        with self.recorder.stage("validation"):
            return self.validator.run(self.step)

    def _save_is_due(self) -> bool:
        return self.recorder.is_due(self.config.trainer.save_freq, self.step)

    def _save_checkpoint(self) -> Path:
        self.pending.drain(self.step)  # a checkpoint has whole groups only, so that resuming it is exact
        return self.checkpoints.save(Progress(self.step, self.bad_steps))

    def _load_checkpoint(self) -> None:
        if (progress := self.checkpoints.restore()) is not None:
            self.step, self.bad_steps = progress.step, progress.bad_steps

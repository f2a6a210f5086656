"""The policy's update: passes over the batch, mini-batches inside them, one optimizer step each.

The actor's loss on one mini-batch: policy loss + KL loss - entropy bonus, with counts of the whole mini-batch.

`prepare` gives every response token its weight once per mini-batch; the loss of a micro-batch is the weighted sum over
its own tokens, so the shares add up to the same number however the rows are split.

With one optimizer step on a batch the update computes the old policy's log-probs itself. Importance weights and
rejection (`algorithm.rollout_correction`) are in `correction.py`.

Shapes: b rows of a micro-batch, B rows of the mini-batch, R response width.
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain import pulse
from posttrain.algorithms import (
    call_policy_loss,
    kl_penalty,
    prepare_policy_loss,
    scalar_loss_note,
)
from posttrain.config.root import ActorConfig, PPOConfig, RolloutCorrectionConfig
from posttrain.engine.base import Passes, TrainEngine
from posttrain.protocol import DataProto
from posttrain.workers.actor.correction import (
    finish_importance_metrics,
    mean_weight_over_ranks,
    needs_mean_weight,
    weights_before_update,
    weights_in_update,
)
from posttrain.workers.measures import Measures, TokenStats, reduce_over_steps
from posttrain.workers.update_plan import MiniBatch, Schedule, UpdatePlan, one_rank_plan, token_weights

ROUTER_METRICS = ("router_entropy", "route_changes", "router_balance")  # outputs of a mixture's passes, per token
PREPARED = "prepared_"  # prefix of the fields that a loss's `prepare` gave per row


class ActorObjective:
    """`prepare` a mini-batch where all of it is known; call it with a micro-batch and the engine's outputs wherever
    these are computed; `measures` then holds this rank's metrics of the mini-batch."""

    def __init__(self, config: ActorConfig, correction: RolloutCorrectionConfig, loss_scale_factor: float) -> None:
        self.config, self.correction, self.loss_scale_factor = config, correction, loss_scale_factor
        self.mean_weight = 1.0  # what importance weights that are made in the update are divided by
        self.notes: list[str] = []
        self.measures = Measures()
        self.seen = TokenStats()

    def prepare(self, mini: DataProto) -> DataProto:
        """The mini-batch with its token weights; the loss computes here what it needs from the whole mini-batch.

        What the loss's `prepare` gives per row goes with the rows into their micro-batches, the rest to all of them.
        """
        weights, facts = weights_before_update(mini.batch, self.config, self.correction)
        made, counted = token_weights(mini, self.config.loss_agg_mode, self.loss_scale_factor)
        tensors: dict[str, Any] = dict(made)
        if weights is not None:
            tensors["rollout_is_weights"] = weights
        prepared = prepare_policy_loss(self.config.policy_loss.loss_mode, mini, self.config)
        for name, value in list(prepared.items()):
            if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == len(mini):
                tensors[f"{PREPARED}{name}"] = prepared.pop(name)
        counts = {**counted, "loss_scale_factor": self.loss_scale_factor}
        known = {"prepared": prepared, "measured": facts, "counts": counts}
        mini = mini.union(DataProto(tensors, meta_info=known))
        self.begin(mini)
        return mini

    def begin(self, mini: DataProto) -> Measures:
        """Measure anew, for an optimizer step on this prepared mini-batch."""
        self.measures = Measures()
        for name, value in mini.meta_info["measured"].items():
            self.measures.tell(name, value, steps="first" if name.startswith("mismatch/") else "mean")
        return self.measures

    def __call__(self, micro: DataProto, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        batch, log_prob = micro.batch, outputs["log_probs"]
        # With one update per batch the old policy is the one that is differentiated: its ratio is 1 by definition.
        old = batch["old_log_probs"] if "old_log_probs" in batch else log_prob.detach()
        weights, means = batch["loss_weights"], batch["mean_weights"]
        own = {name.removeprefix(PREPARED): value for name, value in batch.items() if name.startswith(PREPARED)}
        result = call_policy_loss(
            self.config.policy_loss.loss_mode,
            old_log_prob=old,
            log_prob=log_prob,
            advantages=batch["advantages"],
            response_mask=batch["response_mask"],
            config=self.config,
            rollout_is_weights=self._weights(log_prob.detach(), micro),
            prepared=micro.meta_info["prepared"] | own,
            counts=micro.meta_info["counts"],
        )
        if result.is_scalar and not result.is_share and not self.notes:
            self.notes.append(scalar_loss_note(self.config.policy_loss.loss_mode))
        share = result.loss if result.is_scalar else (weights * result.loss).sum()
        if result.is_scalar and not result.is_share:
            share = share * means.sum()  # a loss that returned its own mean: weighted by this micro-batch's tokens
        self._add("policy_loss", share)
        share = share + self._kl(log_prob, batch, weights) + self._entropy(outputs["entropy"], weights, means)
        share = share + self._router(outputs, means)
        self._add("actor/loss", share)
        self._measure(result.metrics, means)
        self._measure_agreement(log_prob.detach(), old, batch)
        self.seen.add(batch, outputs)
        return share

    def _kl(self, log_prob, batch, weights) -> torch.Tensor | float:
        if "ref_log_prob" not in batch or not self.config.use_kl_loss:
            return 0.0
        kl = (weights * kl_penalty(log_prob, batch["ref_log_prob"], self.config.kl_loss_type)).sum()
        self._add("kl_loss", kl)
        self._add("actor/kl_term", kl * self.config.kl_loss_coef)
        return kl * self.config.kl_loss_coef

    def _entropy(self, entropy, weights, mean_weights) -> torch.Tensor | float:
        self._add("actor/entropy", (mean_weights * entropy.detach()).sum())
        if self.config.entropy_coeff == 0:
            return 0.0
        return -self.config.entropy_coeff * (weights * entropy).sum()

    def _router(self, outputs: dict[str, torch.Tensor], mean_weights: torch.Tensor) -> torch.Tensor | float:
        # Of mixtures: means over the tokens of the mini-batch, so that no split of it changes loss or metrics.
        for name in ROUTER_METRICS:
            if name in outputs:
                # Before the weights moved: further updates on a batch choose other experts anyway.
                steps = "first" if name == "route_changes" else "mean"
                self.measures.add(f"actor/{name}", (mean_weights * outputs[name].detach()).sum(), steps=steps)
        if "router_balance" not in outputs:
            return 0.0
        return self.config.router_aux_loss_coef * (mean_weights * outputs["router_balance"]).sum()

    def _weights(self, log_prob: torch.Tensor, micro: DataProto) -> torch.Tensor | None:
        return weights_in_update(log_prob, micro, self.config, self.correction, self.measures, self.mean_weight)

    def _measure_agreement(self, log_prob: torch.Tensor, old: torch.Tensor, batch: Any) -> None:
        # How far the policy moved from the old one, and how well rollout and trainer agree: of a batch's first
        # optimizer step, before the weights moved.
        real = batch["response_mask"].bool()
        self._max("actor/ratio_deviation", ((log_prob - old).exp() - 1).abs(), real)
        if "rollout_log_probs" in batch:
            gap = (log_prob - batch["rollout_log_probs"]).abs()
            self.measures.add("mismatch/logp_mean", (batch["mean_weights"] * gap).sum(), steps="first")
            self._max("mismatch/logp_max", gap, real)
        if "sampling_log_probs" in batch:  # how far filters and penalties are from the policy, whatever computed them
            gap = batch["sampling_log_probs"] - batch["rollout_log_probs"]
            self.measures.add("mismatch/sampling_kl", (batch["mean_weights"] * gap).sum(), steps="first")

    def _measure(self, metrics: dict[str, Any], mean_weights: torch.Tensor) -> None:
        # Per-token metrics become means over the mini-batch's tokens; numbers are weighted by their share of them.
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.shape == mean_weights.shape:
                self._add(name, (mean_weights * value.detach()).sum())
            else:
                self._add(name, value * mean_weights.sum())

    def _add(self, name: str, value: float | torch.Tensor) -> None:
        self.measures.add(name, value)

    def _max(self, name: str, values: torch.Tensor, real: torch.Tensor) -> None:
        """The largest of the real values, none of which is below 0."""
        if values.numel():
            self.measures.most(name, torch.where(real, values, 0.0).max(), steps="first")

    def metrics(self) -> dict[str, float]:
        """What was measured of the mini-batch, as far as this rank computed it."""
        return self.measures.numbers()


def actor_objective(actor: ActorConfig, correction: RolloutCorrectionConfig, longest: int) -> ActorObjective:
    """The loss of the policy as configured; responses have `longest` tokens at most."""
    return ActorObjective(actor, correction, actor.loss_scale_factor or float(longest))


def actor_schedule(actor: ActorConfig, seed: int) -> Schedule:
    return Schedule(actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, seed)


class DataParallelPPOActor:
    """Runs `update_policy` and `compute_log_prob` on a train engine."""

    def __init__(self, config: PPOConfig, engine: TrainEngine) -> None:
        roles, longest = config.actor_rollout_ref, config.data.max_response_length
        self.config, self.engine, self.temperature = config, engine, roles.rollout.temperature
        self.objective = actor_objective(roles.actor, config.algorithm.rollout_correction, longest)

    def update_policy(self, data: DataProto) -> dict[str, float]:
        """All optimizer steps on a batch that this rank has to itself; gives their metrics."""
        schedule = actor_schedule(self.config.actor_rollout_ref.actor, self.config.trainer.seed)
        plan = one_rank_plan(data, schedule, self.objective.prepare)
        return finish_importance_metrics(reduce_over_steps(self.execute(plan)))

    def execute(self, plan: UpdatePlan) -> list[Measures]:
        """The optimizer steps of a plan; gives the metrics of each."""
        passes = 2 if self._measures_weights_first else 1
        with pulse.work("rows", passes * plan.rows):
            return [self._step(mini) for mini in plan]

    @property
    def _measures_weights_first(self) -> bool:
        return needs_mean_weight(self.objective.config, self.objective.correction)

    def _step(self, mini: MiniBatch) -> Measures:
        measures = self.objective.begin(mini.data)
        if self._measures_weights_first:
            # A mean over each micro-batch would make the gradient depend on how the mini-batch is cut.
            log_prob = self.compute_log_prob(mini.data, mini.passes).get("log_probs")
            mean = mean_weight_over_ranks(log_prob, mini.data.batch, self.objective.correction)
            self.objective.mean_weight = mean
            measures.tell("rollout_is/norm", mean)
        made = self.engine.update(mini.data, self.objective, temperature=self.temperature, passes=mini.passes)
        measures.tell_update("actor", self.engine, made)
        return measures.read_values()

    def compute_log_prob(self, data: DataProto, passes: Passes | None = None) -> dict[str, torch.Tensor]:
        """`log_probs` and `entropy` (rows, response width) under the weights as they are."""
        return self.engine.log_probs(data, temperature=self.temperature, passes=passes)

    compute_log_probs = compute_log_prob

    def _forward_micro_batch(self, micro_batch: DataProto) -> torch.Tensor:
        """Log-probs of one micro-batch, as the seeds' pseudo-code calls it."""
        return self.compute_log_prob(micro_batch)["log_probs"]

"""The policy's update: passes over the batch, mini-batches inside them, one optimizer step each."""

from __future__ import annotations

import torch

from posttrain import pulse
from posttrain.config.root import ActorConfig, PPOConfig, RolloutCorrectionConfig
from posttrain.engine.base import Passes, TrainEngine
from posttrain.protocol import DataProto
from posttrain.workers.actor.objective import ActorObjective, finish_importance_metrics
from posttrain.workers.measures import Measures, reduce_over_steps
from posttrain.workers.update_plan import MiniBatch, Schedule, UpdatePlan, one_rank_plan


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
        with pulse.work("rows", plan.rows):
            return [self._step(mini) for mini in plan]

    def _step(self, mini: MiniBatch) -> Measures:
        measures = self.objective.begin(mini.data)
        made = self.engine.update(mini.data, self.objective, temperature=self.temperature, passes=mini.passes)
        measures.tell_update("actor", made)
        return measures.read_values()

    def compute_log_prob(self, data: DataProto, passes: Passes | None = None) -> dict[str, torch.Tensor]:
        """`log_probs` and `entropy` (rows, response width) under the weights as they are."""
        return self.engine.log_probs(data, temperature=self.temperature, passes=passes)

    compute_log_probs = compute_log_prob

    def _forward_micro_batch(self, micro_batch: DataProto) -> torch.Tensor:
        """Log-probs of one micro-batch, as the seeds' pseudo-code calls it."""
        return self.compute_log_prob(micro_batch)["log_probs"]

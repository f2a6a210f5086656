"""The critic: values of responses, and their clipped regression to the returns."""

from __future__ import annotations

from functools import partial

import torch

from posttrain import pulse
from posttrain.algorithms import compute_value_loss
from posttrain.config.root import ActorConfig, CriticConfig, PPOConfig
from posttrain.engine.base import Passes, TrainEngine
from posttrain.protocol import DataProto
from posttrain.workers.measures import Measures, reduce_over_steps
from posttrain.workers.update_plan import MiniBatch, Schedule, UpdatePlan, one_rank_plan, token_weights


def critic_schedule(critic: CriticConfig, actor: ActorConfig, seed: int) -> Schedule:
    """As the actor's, where the critic has no settings of its own."""
    prompts = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
    return Schedule(prompts, critic.ppo_epochs or actor.ppo_epochs, critic.shuffle, seed)


def prepare_values(mini: DataProto, loss_agg_mode: str, longest: int) -> DataProto:
    """The mini-batch with its token weights; responses have `longest` tokens at most."""
    made, _ = token_weights(mini, loss_agg_mode, float(longest))
    return mini.union(DataProto(made))


class DataParallelPPOCritic:
    """Runs `compute_values` and `update_critic` on a train engine whose module has a value head."""

    def __init__(self, config: PPOConfig, engine: TrainEngine) -> None:
        self.config, self.engine = config.critic, engine
        self.schedule = critic_schedule(config.critic, config.actor_rollout_ref.actor, config.trainer.seed)
        self.longest = config.data.max_response_length
        self.measures = Measures()

    def compute_values(self, data: DataProto, passes: Passes | None = None) -> torch.Tensor:
        return self.engine.values(data, passes=passes)

    def update_critic(self, data: DataProto) -> dict[str, float]:
        """All optimizer steps on a batch that this rank has to itself; gives their metrics."""
        prepare = partial(prepare_values, loss_agg_mode=self.config.loss_agg_mode, longest=self.longest)
        return reduce_over_steps(self.execute(one_rank_plan(data, self.schedule, prepare)))

    def execute(self, plan: UpdatePlan) -> list[Measures]:
        """The optimizer steps of a plan; gives the metrics of each."""
        with pulse.work("rows", plan.rows):
            return [self._step(mini) for mini in plan]

    def _step(self, mini: MiniBatch) -> Measures:
        self.measures = measures = Measures()
        made = self.engine.update(mini.data, self._loss, passes=mini.passes)
        measures.tell_update("critic", self.engine, made)
        return measures.read_values()

    def _loss(self, micro: DataProto, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        batch = micro.batch
        token_loss, facts = compute_value_loss(
            outputs["values"],
            batch["values"],
            batch["returns"],
            batch["response_mask"],
            cliprange_value=self.config.cliprange_value,
        )
        share = (batch["loss_weights"] * token_loss).sum()
        self._add("critic/vf_loss", share)
        self._add("critic/vpred_mean", (batch["mean_weights"] * outputs["values"]).sum())
        for name, value in facts.items():
            self._add(name, (batch["mean_weights"] * value).sum())
        return share

    def _add(self, name: str, value: torch.Tensor) -> None:
        self.measures.add(name, value)

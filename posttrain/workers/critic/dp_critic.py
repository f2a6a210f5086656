"""The critic: values of responses, and their clipped regression to the returns."""

from __future__ import annotations

import torch

from posttrain import pulse
from posttrain.algorithms import aggregation_weights, compute_value_loss
from posttrain.config.root import PPOConfig
from posttrain.engine.base import TrainEngine
from posttrain.protocol import DataProto
from posttrain.workers.actor.dp_actor import mean_of, shuffled


class DataParallelPPOCritic:
    """Runs `compute_values` and `update_critic` on a train engine whose module has a value head."""

    def __init__(self, config: PPOConfig, engine: TrainEngine) -> None:
        actor = config.actor_rollout_ref.actor
        self.config, self.engine = config.critic, engine
        self.epochs = config.critic.ppo_epochs or actor.ppo_epochs
        prompts = config.critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
        self.mini_batch_rows = prompts * config.actor_rollout_ref.rollout.n
        self.scale, self.seed = float(config.data.max_response_length), config.trainer.seed
        self.sums: dict[str, float] = {}

    def compute_values(self, data: DataProto) -> torch.Tensor:
        return self.engine.values(data)

    def update_critic(self, data: DataProto) -> dict[str, float]:
        """`critic.ppo_epochs` passes over the mini-batches of `data`; gives the mean metrics of the optimizer steps."""
        with pulse.work("rows", len(data) * self.epochs):
            metrics = [
                self._step(mini)
                for epoch in range(self.epochs)
                for mini in self._ordered(data, epoch).split(self.mini_batch_rows)
            ]
        skipped = sum(part["critic/bad_steps"] for part in metrics)
        return {**mean_of(metrics), "critic/bad_steps": skipped, "critic/optimizer_steps": float(len(metrics))}

    def _ordered(self, data: DataProto, epoch: int) -> DataProto:
        return shuffled(data, self.seed, epoch) if self.config.shuffle else data

    def _step(self, mini: DataProto) -> dict[str, float]:
        """One optimizer step; gives its metrics."""
        mask = mini.batch["response_mask"]
        weights = aggregation_weights(mask, self.config.loss_agg_mode, loss_scale_factor=self.scale)
        extra = {"loss_weights": weights, "mean_weights": aggregation_weights(mask, "token-mean")}
        self.sums = {}
        step = self.engine.update(mini.union(DataProto.from_dict(tensors=extra)), self._loss)
        named = {f"critic/{name}": step[name] for name in ("grad_norm", "lr")}
        return {**self.sums, **named, "critic/bad_steps": step["skipped"]}

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
        self.sums[name] = self.sums.get(name, 0.0) + float(value.detach())

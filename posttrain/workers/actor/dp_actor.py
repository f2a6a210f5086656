"""The policy's update: passes over the batch, mini-batches inside them, one optimizer step each."""

from __future__ import annotations

import torch

from posttrain import pulse
from posttrain.config.root import PPOConfig
from posttrain.engine.base import TrainEngine
from posttrain.protocol import DataProto
from posttrain.workers.actor.objective import ActorObjective

FIRST_ONLY = ("mismatch/", "actor/ratio_deviation")  # meaningful before the first step on a batch only


def mean_of(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Means over the mini-batches; agreement with the rollout is that of the first, before the weights moved."""
    names = list(dict.fromkeys(name for part in metrics for name in part))
    out = {}
    for name in names:
        values = [part[name] for part in metrics if name in part]
        out[name] = values[0] if name.startswith(FIRST_ONLY) else sum(values) / len(values)
    return out


def shuffled(data: DataProto, seed: int, epoch: int) -> DataProto:
    """The rows in an order that depends on the seed, the step and the pass."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + int(data.meta_info["step"]) * 101 + epoch)
    return data[torch.randperm(len(data), generator=generator)]


class DataParallelPPOActor:
    """Runs `update_policy` and `compute_log_prob` on a train engine."""

    def __init__(self, config: PPOConfig, engine: TrainEngine) -> None:
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self.config, self.engine, self.temperature = actor, engine, rollout.temperature
        self.mini_batch_rows = actor.ppo_mini_batch_size * rollout.n
        self.seed = config.trainer.seed
        scale = actor.loss_scale_factor or float(config.data.max_response_length)
        self.objective = ActorObjective(actor, config.algorithm.rollout_correction, scale)

    def update_policy(self, data: DataProto) -> dict[str, float]:
        """`ppo_epochs` passes over the mini-batches of `data`; gives the mean metrics of the optimizer steps."""
        with pulse.work("rows", len(data) * self.config.ppo_epochs):
            metrics = [
                self._step(mini_batch)
                for epoch in range(self.config.ppo_epochs)
                for mini_batch in self._ordered(data, epoch).split(self.mini_batch_rows)
            ]
        skipped = sum(part["actor/bad_steps"] for part in metrics)
        return {**mean_of(metrics), "actor/bad_steps": skipped, "actor/optimizer_steps": float(len(metrics))}

    def _ordered(self, data: DataProto, epoch: int) -> DataProto:
        return shuffled(data, self.seed, epoch) if self.config.shuffle else data

    def _step(self, mini_batch: DataProto) -> dict[str, float]:
        """One optimizer step; gives its metrics."""
        prepared = self.objective.prepare(mini_batch)
        step = self.engine.update(prepared, self.objective, temperature=self.temperature)
        named = {"actor/grad_norm": step["grad_norm"], "actor/lr": step["lr"], "actor/bad_steps": step["skipped"]}
        return {**self.objective.metrics(), **named}

    def compute_log_prob(self, data: DataProto) -> dict[str, torch.Tensor]:
        """`log_probs` and `entropy` (rows, response width) under the weights as they are."""
        return self.engine.log_probs(data, temperature=self.temperature)

    compute_log_probs = compute_log_prob

    def _forward_micro_batch(self, micro_batch: DataProto) -> torch.Tensor:
        """Log-probs of one micro-batch, as the seeds' pseudo-code calls it."""
        return self.compute_log_prob(micro_batch)["log_probs"]

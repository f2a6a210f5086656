"""Supervised steps: the mean negative log-likelihood of given responses, by the same engine that RL uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from posttrain.algorithms import aggregation_weights
from posttrain.engine.base import TrainEngine
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch

Pair = tuple[Sequence[int], Sequence[int]]


def sft_batch(pairs: Sequence[Pair], pad_token_id: int) -> DataProto:
    """(prompt ids, response ids) pairs as a batch whose response tokens all count."""
    outputs = [Output(row, list(response), [0.0] * len(response), "stop") for row, (_, response) in enumerate(pairs)]
    batch = to_batch([prompt for prompt, _ in pairs], outputs, pad_token_id)
    weights = aggregation_weights(batch.batch["response_mask"], "token-mean")
    return batch.union(DataProto.from_dict(tensors={"loss_weights": weights}))


def sft_step(engine: TrainEngine, batch: DataProto) -> dict[str, float]:
    """One optimizer step; gives the engine's metrics and `loss`."""
    total = 0.0

    def loss(micro: DataProto, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal total
        share = -(micro.batch["loss_weights"] * outputs["log_probs"]).sum()
        total += float(share.detach())
        return share

    return {**engine.update(batch, loss), "loss": total}


def fit_pairs(
    engine: TrainEngine,
    pairs: Sequence[Pair],
    *,
    steps: int,
    batch_size: int,
    pad_token_id: int,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> float:
    """`steps` optimizer steps on random batches of `pairs`; gives the last loss."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.zeros(0, dtype=torch.long)
    loss = float("nan")
    for step in range(steps):
        if len(order) < batch_size:
            order = torch.randperm(len(pairs), generator=generator)
        chosen, order = order[:batch_size].tolist(), order[batch_size:]
        loss = sft_step(engine, sft_batch([pairs[i] for i in chosen], pad_token_id))["loss"]
        if on_step is not None:
            on_step(step, loss)
    return loss

"""Supervised steps: the mean negative log-likelihood of given responses, by the same engine that RL uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from posttrain.algorithms import aggregation_weights
from posttrain.data.chat import TrainedRow
from posttrain.engine.base import TrainEngine
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from posttrain.workers.supervised import sft_step

Pair = tuple[Sequence[int], Sequence[int]]


def pair_row(pair: Pair) -> TrainedRow:
    """(prompt ids, response ids) as a row whose response tokens are all trained."""
    prompt, response = pair
    return TrainedRow([*prompt, *response], [False] * len(prompt) + [True] * len(response))


def sft_batch(rows: Sequence[TrainedRow], pad_token_id: int) -> DataProto:
    """Rows as a batch: what precedes the first trained token is the prompt, what follows the last one is left out.

    `response_mask` marks the trained tokens; `loss_weights` make their mean over the whole batch.
    """
    bounds = [(1 + row.trained[1:].index(True), len(row.ids) - row.trained[::-1].index(True)) for row in rows]
    responses = [row.ids[start:end] for row, (start, end) in zip(rows, bounds, strict=True)]
    outputs = [Output(number, ids, [0.0] * len(ids), "stop") for number, ids in enumerate(responses)]
    prompts = [row.ids[:start] for row, (start, _) in zip(rows, bounds, strict=True)]
    batch = to_batch(prompts, outputs, pad_token_id)
    mask = batch.batch["response_mask"]
    for number, (row, (start, end)) in enumerate(zip(rows, bounds, strict=True)):
        mask[number, : end - start] = torch.tensor(row.trained[start:end])
    return batch.union(DataProto.from_dict(tensors={"loss_weights": aggregation_weights(mask, "token-mean")}))


@torch.no_grad()
def greedy_accuracy(model: torch.nn.Module, pairs: Sequence[Pair], pad_token_id: int) -> float:
    """Share of pairs whose response is what the model would write greedily: every token is its likeliest next one."""
    batch = sft_batch([pair_row(pair) for pair in pairs], pad_token_id).batch
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs).logits[:, -batch["responses"].shape[1] - 1 : -1]
    right = (logits.argmax(-1) == batch["responses"]) | (batch["response_mask"] == 0)
    return float(right.all(-1).float().mean())


def fit_pairs(
    engine: TrainEngine,
    pairs: Sequence[Pair],
    *,
    steps: int,
    batch_size: int,
    pad_token_id: int,
    seed: int,
    on_step: Callable[[int, float], bool | None] | None = None,
) -> float:
    """`steps` optimizer steps on random batches of `pairs`, fewer if `on_step` says True; gives the last loss."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.zeros(0, dtype=torch.long)
    loss = float("nan")
    for step in range(steps):
        if len(order) < batch_size:
            order = torch.randperm(len(pairs), generator=generator)
        chosen, order = order[:batch_size].tolist(), order[batch_size:]
        loss = sft_step(engine, sft_batch([pair_row(pairs[i]) for i in chosen], pad_token_id))["loss"]
        if on_step is not None and on_step(step, loss):
            break
    return loss

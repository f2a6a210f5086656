"""The greedy baseline of ReMax: one greedy response per prompt, scored as the others are and not trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from posttrain.protocol import DataProto
from posttrain.tracking.fields import groups_of
from posttrain.trainer.ppo.reward import add_overlong_penalty, on_last_token

if TYPE_CHECKING:
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer


def greedy_baselines(trainer: RayPPOTrainer, batch: DataProto) -> dict[str, float]:
    """Adds `reward_baselines` (rows,): the score of the greedy response to each row's prompt; gives metrics."""
    groups = [list(rows) for rows in groups_of(batch.non_tensor_batch["uid"])]
    first = batch[[rows[0] for rows in groups]]
    greedy = first.select([], ["uid", "data_source", "ground_truth", "extra_info", "raw_prompt"])
    greedy.meta_info.clear()
    output = trainer.actor_rollout_wg.generate_sequences(_prompts(first))
    greedy.union(output)
    greedy.union(trainer.reward_fn.score(greedy))
    if trainer.model_reward:
        trainer.model_reward.join(greedy)
    scores = on_last_token(greedy.non_tensor_batch["reward_score"], greedy)
    config = trainer.config
    add_overlong_penalty(scores, greedy, config.reward.overlong_buffer, config.data.max_response_length)
    scores_G = scores.sum(-1)
    baselines_B = scores_G.new_zeros(len(batch))
    for group, rows in enumerate(groups):
        baselines_B[rows] = scores_G[group]
    batch.batch["reward_baselines"] = baselines_B
    return {"remax/baseline_mean": float(scores_G.mean())}


def _prompts(batch: DataProto) -> DataProto:
    """The prompts of these rows as generation wants them; greedy decoding draws no random numbers."""
    width = batch.batch["prompts"].shape[1]
    ids = np.empty(len(batch), dtype=object)
    for row, (prompt, mask) in enumerate(
        zip(batch.batch["prompts"], batch.batch["attention_mask"][:, :width].bool(), strict=True)
    ):
        ids[row] = prompt[mask].tolist()
    seeds = np.zeros(len(batch), dtype=object)
    return DataProto.from_dict(non_tensors={"raw_prompt_ids": ids, "seed": seeds}, meta_info={"greedy": True})

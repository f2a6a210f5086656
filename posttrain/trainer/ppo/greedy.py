"""The greedy baseline of ReMax: one greedy response per prompt, scored as the others are and not trained on."""

from __future__ import annotations

import numpy as np

from posttrain.protocol import DataProto
from posttrain.tracking.fields import groups_of
from posttrain.trainer.ppo.experience import Experience

NEEDED = ["uid", "data_source", "ground_truth", "extra_info", "raw_prompt"]


def greedy_baselines(experience: Experience, batch: DataProto) -> dict[str, float]:
    """Adds `reward_baselines` (rows,): the score of the greedy response to each row's prompt; gives metrics."""
    # One greedy response per prompt, not per sample: the baseline of a group is the same for all of its rows.
    groups = [list(rows) for rows in groups_of(batch.non_tensor_batch["uid"])]
    rows = experience.ask(_prompts(batch[[rows[0] for rows in groups]]), 1, greedy=True)
    greedy = experience.with_token_scores(experience.complete(rows))
    scores_G = greedy.batch["token_level_scores"].sum(-1)
    baselines_B = scores_G.new_zeros(len(batch))
    for group, members in enumerate(groups):
        baselines_B[members] = scores_G[group]
    batch.batch["reward_baselines"] = baselines_B
    return {"remax/baseline_mean": float(scores_G.mean())}


def _prompts(firsts: DataProto) -> DataProto:
    """The prompts of these rows, to be asked anew; greedy decoding draws no random numbers."""
    prompts = firsts.select([], NEEDED, [])
    width = firsts.batch["prompts"].shape[1]
    masks = firsts.batch["attention_mask"][:, :width].bool()
    ids = np.empty(len(firsts), dtype=object)
    for row, (prompt, mask) in enumerate(zip(firsts.batch["prompts"], masks, strict=True)):
        ids[row] = prompt[mask].tolist()
    uids = [f"{uid}-greedy" for uid in prompts.non_tensor_batch["uid"]]
    prompts.non_tensor_batch.update(
        {"uid": np.array(uids, dtype=object), "raw_prompt_ids": ids, "serial": np.zeros(len(ids), dtype=object)}
    )
    return prompts

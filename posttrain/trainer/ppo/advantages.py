"""Advantages of a batch: what an estimator is given of the batch, where its answer goes, and the greedy baseline."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from posttrain import algorithms
from posttrain.batch.columns import EveryTokenColumn, LastTokenColumn
from posttrain.batch.samples import BRANCH_FIELDS, has_several_rows, last_rows, rows_of_samples
from posttrain.config.root import AlgorithmConfig
from posttrain.protocol import DataProto
from posttrain.rewards.types import NONE_APPLIES
from posttrain.tracking.metrics import groups_of
from posttrain.trainer.ppo.experience import Experience

ESTIMATOR_FIELDS = (
    "values",
    "old_log_probs",
    "ref_log_prob",
    "reward_baselines",
    "sum_pi_squared",
    "rollout_log_probs",
)
REWARD_FIELDS = {"reward_parts": "reward_parts", "reward_score": "reward_scores", "reward_error": "reward_errors"}


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    *,
    config: AlgorithmConfig | None = None,
    **settings: Any,
) -> DataProto:
    """`data` with `advantages` and `returns`, from its `token_level_rewards`, `response_mask` and `uid`.

    A response without any score (no reward function applies to it) is a group of its own, so that it is in no other's
    baseline, and its advantage is 0. A sample of several rows is one response to the estimator.
    """
    if has_several_rows(data):
        check_several_rows(adv_estimator)
        joined = JoinedRows(data)
        whole = compute_advantage(joined.samples, adv_estimator, config=config, **settings)
        for name in ("advantages", "returns"):
            data.batch[name] = joined.split(whole.batch[name])
        return data
    batch = data.batch
    column = batch.column("token_level_rewards")
    estimator = algorithms.get_adv_estimator(adv_estimator)
    outcomes = column if isinstance(column, LastTokenColumn) and estimator.per_response else None
    if outcomes is not None:  # one number in place of a response's tokens, which lie elsewhere
        given = torch.from_numpy(outcomes.values_B)[:, None], torch.from_numpy(outcomes.response_B > 0)[:, None].long()
        found: dict[str, Any] = {}
    else:
        given = batch["token_level_rewards"], batch["response_mask"]
        found = {name: batch[name] for name in ESTIMATOR_FIELDS if name in batch}
    rows = data.non_tensor_batch
    unscored_B = np.array([error == NONE_APPLIES for error in rows["reward_error"]] if "reward_error" in rows else [])
    found |= {argument: rows[name] for name, argument in REWARD_FIELDS.items() if name in rows}
    advantages, returns = algorithms.compute_advantage(
        adv_estimator,
        token_level_rewards=given[0],
        response_mask=given[1],
        index=_groups(data, unscored_B),
        config=config,
        data=data,
        **found,
        **settings,
    )
    if unscored_B.any():
        kept_B1 = torch.from_numpy(~unscored_B).to(advantages).unsqueeze(-1)
        advantages, returns = advantages * kept_B1, returns * kept_B1
    for name, tensor in (("advantages", advantages), ("returns", returns)):
        if outcomes is None:
            batch[name] = tensor
        else:
            batch[name] = EveryTokenColumn(tensor[:, 0].numpy(), outcomes.response_B, outcomes.width)
    return data


def check_several_rows(name: str) -> None:
    """Rejects an estimator that does not say how samples of several rows enter it."""
    if algorithms.get_adv_estimator(name).several_rows is None:
        known = [one for one, estimator in algorithms.ADV_ESTIMATORS.items() if estimator.several_rows]
        raise algorithms.AlgorithmError(
            f"A conversation of this batch ended in several rows, and the advantage estimator `{name}` does not "
            "declare how these enter it.\n"
            '  to do:  register it with several_rows="sample" (one advantage for all tokens of a sample) or "turns" '
            f"(the turns of a sample are one response), or choose one of {', '.join(known)}"
        )


class JoinedRows:
    """The samples of a batch as one row each: the rows of a sample end to end, its turns in the order in which they
    were sampled. `samples` are that batch, `split` gives a tensor of it back to the rows.

    Shapes: B rows of R tokens, S samples of W.
    """

    def __init__(self, data: DataProto) -> None:
        self.shape = data.batch["response_mask"].shape
        places = [self._places(data, rows) for rows in rows_of_samples(data)]
        width = max(map(len, places))
        unused = self.shape.numel()  # one past the last token: a place of zeros
        self._place_SW = torch.full((len(places), width), unused)
        for sample, own in enumerate(places):
            self._place_SW[sample, : len(own)] = own
        names = ("token_level_rewards", "response_mask", *ESTIMATOR_FIELDS)
        tensors = {name: tensor for name in names if (tensor := data.batch.get(name)) is not None}
        last = data[[rows[-1] for rows in rows_of_samples(data)]]
        joined = {name: self._join(x) if x.shape == self.shape else last.batch[name] for name, x in tensors.items()}
        own = {name: values for name, values in last.non_tensor_batch.items() if name not in BRANCH_FIELDS}
        self.samples = DataProto.from_dict(joined, own, data.meta_info)

    def _places(self, data: DataProto, rows: np.ndarray) -> torch.Tensor:
        """The tokens of a sample in their order, as places in a flattened (B, R) tensor."""
        spans: list[tuple[int, int, int]] = []
        for row in rows.tolist():
            # What was read before a turn goes with it; what stands behind the last turn is padding.
            start, ends = row * self.shape[1], data.non_tensor_batch["turn_ends"][row]
            stops = [*(row * self.shape[1] + end for _, end in ends[:-1]), (row + 1) * self.shape[1]]
            for number, stop in zip([turn for turn, _ in ends] or [0], stops, strict=True):
                spans.append((number, start, stop))
                start = stop
        return torch.cat([torch.arange(start, stop) for _, start, stop in sorted(spans)])

    def _join(self, values_BR: torch.Tensor) -> torch.Tensor:
        flat = torch.cat([values_BR.flatten(), values_BR.new_zeros(1)])
        return flat[self._place_SW]

    def split(self, values_SW: torch.Tensor) -> torch.Tensor:
        """(B, R) from (S, W)."""
        flat = values_SW.new_zeros(self.shape.numel() + 1)
        flat[self._place_SW.flatten()] = values_SW.flatten()
        return flat[:-1].view(self.shape)


def _groups(data: DataProto, unscored_B: np.ndarray) -> np.ndarray | None:
    uids = data.non_tensor_batch.get("uid")
    if uids is None or not unscored_B.any():
        return uids
    numbers: dict[Any, int] = {}
    groups = np.array([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=object)
    # Each unscored response gets a group of its own: it must not move the mean that the others are compared with.
    groups[unscored_B] = np.arange(len(numbers), len(numbers) + unscored_B.sum())
    return groups


NEEDED = ["uid", "data_source", "ground_truth", "extra_info", "raw_prompt"]


def greedy_baselines(experience: Experience, batch: DataProto) -> dict[str, float]:
    """The baseline of ReMax: one greedy response per prompt, scored as the others are and not trained on.

    Adds `reward_baselines` (rows,), the score of the greedy response to each row's prompt; gives metrics.
    """
    # One greedy response per prompt, not per sample: the baseline of a group is the same for all of its rows.
    groups = [list(rows) for rows in groups_of(batch.non_tensor_batch["uid"])]
    # Of several rows of a sample the first branch has the prompt of the data.
    firsts = [min(rows, key=lambda row: _branch(batch, row)) for rows in groups]
    rows = experience.ask(_prompts(batch[firsts]), 1, greedy=True)
    greedy = experience.with_token_scores(experience.complete(rows))
    scores_G = greedy.batch["token_level_scores"].sum(-1)[np.unique(last_rows(greedy))]
    baselines_B = scores_G.new_zeros(len(batch))
    for group, members in enumerate(groups):
        baselines_B[members] = scores_G[group]
    batch.batch["reward_baselines"] = baselines_B
    return {"remax/baseline_mean": float(scores_G.mean())}


def _branch(batch: DataProto, row: int) -> int:
    return batch.non_tensor_batch["branch"][row] if "branch" in batch.non_tensor_batch else 0


def _prompts(firsts: DataProto) -> DataProto:
    # Every prompt can have serial number 0: greedy decoding draws no random numbers.
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

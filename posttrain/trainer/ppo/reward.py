"""Scores of responses, computed in worker processes while other responses are still being generated.

Shapes: B rows, R response width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from posttrain.algorithms import overlong_penalty
from posttrain.config.reward import OverlongBufferConfig
from posttrain.protocol import DataProto
from posttrain.rewards.all_failed import FailureWatch
from posttrain.rewards.pool import RewardPool
from posttrain.rewards.types import RewardItem, RewardResult

_WHERE = "custom_reward_function, reward.functions, or the rows' data_source"


class RewardManager:
    """`begin` a batch, `feed` responses as they end, `finish` to have all scores; or call it on a whole batch.

    Without a pool all scores are 0: a reward model gives them. `named` says whether the user named the function.
    """

    def __init__(
        self, pool: RewardPool | None, tokenizer: Any, *, default_source: str | None = None, named: bool = True
    ) -> None:
        self.pool, self.tokenizer, self.default_source, self.named = pool, tokenizer, default_source, named
        self.rows: DataProto | None = None
        self.watch: FailureWatch | None = FailureWatch("reward", _WHERE) if pool is not None else None
        """Ends the run when no response can be scored; None where another reward gives the scores."""

    def begin(self, rows: DataProto) -> None:
        """The rows that responses will be fed for, with their truths and groups."""
        self.rows = rows
        fields = rows.non_tensor_batch
        columns = [fields[name].tolist() for name in ("uid", "data_source", "ground_truth", "extra_info")]
        self.fields = list(zip(*columns, strict=True))
        self.group_size = Counter(columns[0])

    def feed(self, responses: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Score responses, each the number of its row and its token ids; returns at once."""
        assert self.rows is not None, "begin() comes before feed()"
        if self.pool is None or not responses:
            return
        texts = self._texts([ids for _, ids in responses])
        items: list[tuple[int, RewardItem]] = []
        for (row, ids), text in zip(responses, texts, strict=True):
            uid, source, truth, extra_info = self.fields[row]
            size = self.group_size[uid]
            item = RewardItem(source or self.default_source, text, truth, extra_info, uid, size, len(ids))
            items.append((row, item))
        self.pool.submit_many(items)

    def _texts(self, responses: list[Sequence[int]]) -> list[str]:
        """Short responses are often the same: each is decoded once."""
        keys = [tuple(ids) for ids in responses]
        different = list(set(keys))
        decoded = self.tokenizer.batch_decode([list(key) for key in different], skip_special_tokens=True)
        texts = dict(zip(different, decoded, strict=True))
        return [texts[key] for key in keys]

    def finish(self) -> DataProto:
        """Wait for the rest; gives `reward_score`, `reward_parts` and `reward_error` of each row."""
        assert self.rows is not None
        results = self.pool.wait_all() if self.pool is not None else {}
        ordered: list[RewardResult] = [results.get(row) or RewardResult(0.0) for row in range(len(self.rows))]
        self.rows = None
        if self.watch is not None:
            self.watch.look([result.error for result in ordered])
        return DataProto.from_dict(
            non_tensors={
                "reward_score": [result.score for result in ordered],
                "reward_parts": [dict(result.parts) for result in ordered],
                "reward_error": [result.error for result in ordered],
            }
        )

    def score(self, data: DataProto) -> DataProto:
        """As begin, feed and finish, for responses that are all there."""
        self.begin(data)
        pairs = zip(data.batch["responses"], _real_responses(data), strict=True)
        self.feed([(row, ids[mask].tolist()) for row, (ids, mask) in enumerate(pairs)])
        return self.finish()

    def __call__(self, data: DataProto) -> torch.Tensor:
        """(B, R): each row's score on its last response token, 0 elsewhere."""
        return on_last_token(self.score(data).non_tensor_batch["reward_score"], data)


def _real_responses(data: DataProto) -> torch.Tensor:
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :].bool()


def on_last_token(scores: Any, data: DataProto) -> torch.Tensor:
    """(B, R) token-level scores: each score on the last real token of its response."""
    out = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
    out[_last_token(data)] = torch.tensor([float(score) for score in scores], dtype=torch.float32)
    return out


def _last_token(data: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, place) of each response's last real token."""
    return torch.arange(len(data)), _real_responses(data).long().cumsum(-1).argmax(-1)


def add_overlong_penalty(scores_BR: torch.Tensor, data: DataProto, config: OverlongBufferConfig, limit: int) -> None:
    """Takes the penalty of responses near the length limit from their scores; `overlong_reward` becomes a part."""
    if not config.enable:
        return
    length_B = _real_responses(data).sum(-1)
    penalty_B = overlong_penalty(length_B, limit, config.len or max(1, limit // 5), config.penalty_factor)
    scores_BR[_last_token(data)] += penalty_B.to(scores_BR.dtype)
    for part, penalty in zip(data.non_tensor_batch["reward_parts"], penalty_B.tolist(), strict=True):
        part["overlong_reward"] = penalty

"""verl's reward managers: one response at a time, a whole batch at once, DAPO's with its penalty for length.

In a run of posttrain's own loop rewards need no manager: they run in worker processes while others are generated.
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain.algorithms import overlong_penalty
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.registry import register


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Scores responses one by one and puts each score on its response's last token. The first `num_examine` of every
    data source are printed."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.compute_score = compute_score or default_compute_score
        self.reward_kwargs = kwargs

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        given = self._extract_reward_from_rm_scores(data, return_dict)
        if given is not None:
            return given
        texts, lengths = self._texts(data)
        results = self._results(data, texts)
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra: dict[str, list[Any]] = {}
        for row, (result, length) in enumerate(zip(results, lengths, strict=True)):
            parts: dict[str, Any] = result if isinstance(result, dict) else {}
            score: Any = parts["score"] if parts else result
            rewards[row, length - 1] = float(score)
            for name, value in parts.items():
                extra.setdefault(name, []).append(value)
        self._finish(rewards, extra, lengths)
        self._examine(data, texts, results)
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards

    def _texts(self, data: Any) -> tuple[list[str], list[int]]:
        """The responses, decoded, and how many tokens each has."""
        responses = data.batch["responses"]
        lengths = data.batch["attention_mask"][:, -responses.shape[1] :].sum(-1).tolist()
        ids = [row[:length].tolist() for row, length in zip(responses, lengths, strict=True)]
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in ids], lengths

    def _columns(self, data: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Data sources, truths and further facts of each row."""
        fields, rows = data.non_tensor_batch, range(len(data))
        extras = [dict(fields["extra_info"][row] or {}) if "extra_info" in fields else {} for row in rows]
        for row, extra in enumerate(extras):
            extra["num_turns"] = fields["__num_turns__"][row] if "__num_turns__" in fields else None
            extra["rollout_reward_scores"] = fields["reward_scores"][row] if "reward_scores" in fields else {}
        truths = [one["ground_truth"] for one in fields["reward_model"]]
        return list(fields[self.reward_fn_key]), truths, extras

    def _results(self, data: Any, texts: list[str]) -> list[Any]:
        columns = zip(*self._columns(data), texts, strict=True)
        return [
            self.compute_score(
                data_source=source, solution_str=text, ground_truth=truth, extra_info=extra, **self.reward_kwargs
            )
            for source, truth, extra, text in columns
        ]

    def _finish(self, rewards: torch.Tensor, extra: dict[str, list[Any]], lengths: list[int]) -> None:
        """Nothing to add."""

    def _examine(self, data: Any, texts: list[str], results: list[Any]) -> None:
        shown: dict[Any, int] = {}
        for source, truth, text, result in zip(*self._columns(data)[:2], texts, results, strict=True):
            shown[source] = shown.get(source, 0) + 1
            if shown[source] <= self.num_examine:
                print(f"[response] {text}\n[ground_truth] {truth}\n[score] {result}")


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """`compute_score` is called once with lists: data_sources, solution_strs, ground_truths, extra_infos."""

    def _results(self, data: Any, texts: list[str]) -> list[Any]:
        sources, truths, extras = self._columns(data)
        return list(
            self.compute_score(
                data_sources=sources,
                solution_strs=texts,
                ground_truths=truths,
                extra_infos=extras,
                **self.reward_kwargs,
            )
        )


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """As `naive`. (verl scores in a process pool; a run of posttrain does so by itself.)"""


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """As `naive`, less a penalty for responses that come near `max_resp_len` (overlong_buffer_cfg)."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **kwargs)
        self.max_resp_len, self.overlong_buffer_cfg = max_resp_len, overlong_buffer_cfg
        if overlong_buffer_cfg is not None:
            assert max_resp_len is not None, "max_resp_len must be given with overlong_buffer_cfg"
            assert max_resp_len >= overlong_buffer_cfg.len, "max_resp_len must be at least overlong_buffer_cfg.len"

    def _finish(self, rewards: torch.Tensor, extra: dict[str, list[Any]], lengths: list[int]) -> None:
        buffer = self.overlong_buffer_cfg
        if buffer is None or not buffer.enable:
            return
        assert self.max_resp_len is not None
        length_B = torch.tensor(lengths)
        penalty_B = overlong_penalty(length_B, self.max_resp_len, buffer.len, buffer.penalty_factor)
        rewards[torch.arange(len(lengths)), length_B - 1] += penalty_B.to(rewards.dtype)
        if getattr(buffer, "log", False):
            extra["overlong_reward"] = penalty_B.tolist()
            extra["overlong"] = (penalty_B < 0).tolist()

"""The base of reward managers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

RawRewardFn = Callable[..., Any]


class AbstractRewardManager(ABC):
    """Called with a batch, gives the rewards of its tokens; with `return_dict` also what else was measured."""

    @abstractmethod
    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: Any, return_dict: bool = False) -> Any: ...

    def _extract_reward_from_rm_scores(self, data: Any, return_dict: bool = False) -> Any:
        """Scores that the batch has already, or None."""
        if "rm_scores" not in data.batch.keys():
            return None
        if not return_dict:
            return data.batch["rm_scores"]
        extra = {name: data.non_tensor_batch[name] for name in data.meta_info.get("reward_extra_keys", [])}
        return {"reward_tensor": data.batch["rm_scores"], "reward_extra_info": extra}

"""The base of reward managers that score one response at a time, and how a whole batch is scored with one."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch


class RewardManagerBase(ABC):
    """`run_single` gets a DataProto of one row and gives `reward_score` and `reward_extra_info`."""

    _class_initialized: ClassVar[bool] = False

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """What all managers of the class share; called for each, so that a subclass looks at `_class_initialized`."""
        cls._class_initialized = True

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that runs `run_single`."""
        return asyncio.get_running_loop()

    @abstractmethod
    async def run_single(self, data: Any) -> dict[str, Any]: ...

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: list[float]) -> torch.Tensor:
        """Each score on the last token of its response, 0 elsewhere."""
        responses = data.batch["responses"]
        length_B = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].sum(1)
        rewards_BT = torch.zeros_like(responses, dtype=torch.float32)
        rewards_BT[torch.arange(len(length_B)), length_B - 1] = rewards_BT.new_tensor(scores)
        return rewards_BT


class WholeBatch:
    """A manager of single responses, called with a whole batch as `verl.workers.reward_manager` are."""

    def __init__(self, manager: RewardManagerBase) -> None:
        self.manager = manager

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        results = asyncio.run(self._all(data))
        rewards = self.manager.assemble_rm_scores(data, [float(result["reward_score"]) for result in results])
        if not return_dict:
            return rewards
        told = [result.get("reward_extra_info") or {} for result in results]
        names = dict.fromkeys(name for one in told for name in one)
        return {
            "reward_tensor": rewards,
            "reward_extra_info": {name: [one.get(name) for one in told] for name in names},
        }

    async def _all(self, data: Any) -> list[dict[str, Any]]:
        return await asyncio.gather(*(self.manager.run_single(data[row : row + 1]) for row in range(len(data))))

"""A reward manager written for verl in posttrain's place for rewards: it is called with all responses of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.batch.fields import object_array
from posttrain.protocol import DataProto as Batch
from posttrain.rewards.types import RewardResult
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from posttrain.trainer.ppo.reward import Key, RewardManager, keys_of
from verl._rows import to_verl


class ManagedRewards(RewardManager):
    """`manager(data, return_dict=True)` gives the rewards of the tokens; a response's score is their sum, and what the
    manager measured beside them becomes its parts."""

    def __init__(self, manager: Any, tokenizer: Any, default_source: str | None = None) -> None:
        super().__init__(None, tokenizer, default_source=default_source)
        self.manager = manager.with_tokenizer(tokenizer) if hasattr(manager, "with_tokenizer") else manager
        self.has_no_function = False
        self._rows: dict[Key, dict[str, Any]] = {}
        self._fed: list[tuple[Key, Sequence[int]]] = []

    def expect(self, rows: Batch) -> None:
        fields = {name: rows.non_tensor_batch[name] for name in rows.non_tensor_batch}
        for row, key in enumerate(keys_of(rows)):
            self._rows[key] = {name: values[row] for name, values in fields.items()}

    def feed(
        self,
        responses: Sequence[tuple[Key, Sequence[int]]],
        more: Mapping[Key, Mapping[str, Any]] | None = None,
        marks: Mapping[Key, Sequence[Any]] | None = None,
        texts: Mapping[Key, str] | None = None,
    ) -> None:
        """As verl's, a manager sees all tokens of a response: what the model was told in it, too."""
        self._fed += responses
        for key, facts in (more or {}).items():
            row = self._rows[key]
            row["extra_info"] = {**(row.get("extra_info") or {}), **facts}

    def settle(self, scored: Sequence[tuple[Key, RewardResult]]) -> None:
        for key, _ in scored:
            del self._rows[key]
        self._unscored += scored

    def poll(self) -> list[tuple[Any, RewardResult]]:
        """Nothing before somebody waits: then all are there, and the manager sees them together."""
        return self._take_results()

    def wait(self) -> list[tuple[Any, RewardResult]]:
        if found := self._take_results():
            return found
        if not self._fed:
            return []
        fed, self._fed = self._fed, []
        return list(zip([key for key, _ in fed], self._score(fed), strict=True))

    def _score(self, fed: list[tuple[Key, Sequence[int]]]) -> list[RewardResult]:
        from verl.trainer.ppo.reward import compute_reward

        rewards, extra = compute_reward(to_verl(self._batch(fed)), self.manager)
        scores = rewards.sum(-1).tolist()
        counts = {name: len(values) for name, values in extra.items()}
        if wrong := {name: count for name, count in counts.items() if count != len(scores)}:
            raise ValueError(f"the reward manager measured {wrong} values for {len(scores)} responses")
        parts = [{name: values[row] for name, values in extra.items() if name != "score"} for row in range(len(scores))]
        return [RewardResult(float(score), part) for score, part in zip(scores, parts, strict=True)]

    def _batch(self, fed: list[tuple[Key, Sequence[int]]]) -> Batch:
        rows = [self._rows.pop(key) for key, _ in fed]
        outputs = [Output(key, list(ids), [0.0] * len(ids), "stop", []) for key, ids in fed]
        texts = [str(row.get("prompt") or "") for row in rows]
        prompts = [self.tokenizer(text, add_special_tokens=False)["input_ids"] or [0] for text in texts]
        made = to_batch(prompts, outputs, self.tokenizer.pad_token_id)
        shared = set.intersection(*(set(row) for row in rows))
        for name in shared - {"finish_reason", "policy_versions"}:
            made.non_tensor_batch[name] = object_array([row[name] for row in rows])
        if self.default_source is not None:
            sources = [source or self.default_source for source in made.non_tensor_batch["data_source"]]
            made.non_tensor_batch["data_source"] = object_array(sources)
        return made


def uid_counts(uids: Sequence[Any]) -> list[int]:
    """The number of each row among those of its uid."""
    seen: Counter[Any] = Counter()
    numbers = []
    for uid in uids:
        numbers.append(seen[uid])
        seen[uid] += 1
    return numbers

"""Scores for an evaluation: the reward that the settings name, in worker processes as in training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Self

from posttrain.config.root import PPOConfig
from posttrain.conversations.settings import agent_settings
from posttrain.rewards.loading import check_columns, resolve_reward
from posttrain.rewards.outcomes import all_failed_error
from posttrain.rewards.types import RewardItem, RewardResult
from posttrain.trainer.ppo.reward import make_reward_pool

UNKNOWN = "unknown"


class Scoring:
    """`feed` the responses to a prompt as they come, `finish` for all scores. Use `with`."""

    def __init__(self, config: PPOConfig, sources: Iterable[str | None], say: Callable[[str], Any]) -> None:
        limits = config.reward
        self._default = config.data.data_source
        self._spec = resolve_reward(config.custom_reward_function, functions=limits.functions)
        found = {source or self._default for source in sources}
        by_agent = agent_settings(config.actor_rollout_ref.rollout.agent).enable
        self._pool = make_reward_pool(self._spec, limits, found, say, check=not by_agent)
        self._failed, self._given = limits.failure_score, dict[Any, RewardResult]()

    @property
    def label(self) -> str:
        return self._spec.label

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.__exit__(*exc)

    def check_columns(self, known: Collection[str]) -> None:
        """RewardError where the reward takes a column of the rows that there is not."""
        check_columns(self._spec, known)

    def source(self, data_source: str | None) -> str:
        """The data source under which a prompt is reported."""
        return data_source or self._default or UNKNOWN

    def feed(
        self,
        prompt: int,
        responses: list[str],
        tokens: list[int | None],
        *,
        data_source: str | None,
        ground_truth: Any,
        extra_info: Any,
        asked: Any = None,
        token_ids: Sequence[Sequence[int]] | None = None,
        more: Sequence[dict[str, Any]] = (),
        by_agent: Sequence[dict[str, Any] | None] = (),
    ) -> None:
        """Score the responses to one prompt; returns at once. `asked` (the prompt, as the data has it) and `token_ids`
        are for functions of TRL's form. `more` is what several turns add to each `extra_info`, `own_words` among it;
        `by_agent` are results that an agent gave itself."""
        given = {number: RewardResult(**one) for number, one in enumerate(by_agent) if one is not None}
        for number, result in given.items():
            result.score = result.score if result.error is None else self._failed
            self._given[prompt, number] = result
        items = [
            RewardItem(
                data_source=data_source or self._default,
                solution_str=text,
                ground_truth=ground_truth,
                extra_info={**(extra_info or {}), **told} if told else extra_info,
                group=prompt,
                group_size=len(responses) - len(given),
                tokens=length,
                own_words=told.get("own_words"),
                prompt=asked,
                token_ids=ids,
            )
            for text, length, told, ids in zip(
                responses,
                tokens,
                more or [{}] * len(responses),
                token_ids or [None] * len(responses),
                strict=True,
            )
        ]
        self._pool.submit_many([((prompt, at), item) for at, item in enumerate(items) if at not in given])

    def finish(self) -> dict[Any, RewardResult]:
        """(prompt, number of the response) -> its result, for all that was fed; AllFailed if none has a score."""
        results = {**self._given, **self._pool.wait_all()}
        errors = [result.error for result in results.values() if result.error is not None]
        if results and len(errors) == len(results):
            raise all_failed_error(errors, "reward", self.label)
        return results

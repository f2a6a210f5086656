"""Reward functions as TRL and Unsloth call them: lists of prompts and completions, and the columns of the rows by name.

    def accuracy(completions, answer, **kwargs):
        return [1.0 if a in c[0]["content"] else 0.0 for c, a in zip(completions, answer)]

One call gets all responses of a prompt. Prompts and completions are lists of messages if the rows' prompts are, and
texts otherwise. A result of None (or NaN) means that the function does not apply to a response: it is not part of
that response's sum.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.rewards.outcomes import (
    Outcome,
    check_length,
    describe_exception,
    failure,
    read_part,
    read_result,
    text_of,
)
from posttrain.rewards.signatures import BATCH, Fields, required_parameters, takes_any_keyword, wait_for_result
from posttrain.rewards.types import RewardError

# The outcome of a response that a function does not apply to.
NOT_APPLICABLE: Outcome = (math.nan, {}, None)
_NAME_CHARS = 200


@dataclass(frozen=True)
class BatchFacts:
    """What only functions of TRL's form can receive of a response."""

    # Messages or a text, as in the row; None if unknown.
    prompt: Any = None
    # Finished steps, and steps of the run.
    progress: tuple[int, int] | None = None
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class TrainerState:
    """The run's progress, under the names of transformers' TrainerState."""

    global_step: int
    max_steps: int


@dataclass
class _Logs:
    """What a function logs with `log_extra` and `log_metric`. It becomes named parts of its scores."""

    count: int
    parts: list[dict[str, float | str]] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def extra(self, column: str, values: Any) -> None:
        values = list(values)
        if len(values) != self.count:
            raise ValueError(f"log_extra({column!r}) has {len(values)} values for {self.count} responses")
        self.parts = self.parts or [{} for _ in values]
        for parts, value in zip(self.parts, values, strict=True):
            parts[text_of(column, _NAME_CHARS)] = read_part(value)

    def metric(self, name: str, value: Any) -> None:
        self.metrics.setdefault(text_of(name, _NAME_CHARS), []).append(float(value))

    def of(self, row: int) -> dict[str, float | str]:
        means = {name: read_part(sum(values) / len(values)) for name, values in self.metrics.items()}
        return {**means, **(self.parts[row] if self.parts else {})}


class BatchCall:
    """Scores all responses of a prompt with one function."""

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self.function, self.kwargs = function, kwargs
        self._all, self._names = takes_any_keyword(function), set(inspect.signature(function).parameters)
        self._required = required_parameters(function) - kwargs.keys()

    def __call__(self, items: Sequence[Fields]) -> list[Outcome]:
        logs = _Logs(len(items))
        try:
            results = wait_for_result(self.function(**self._arguments(items, logs), **self.kwargs))
            results = results.tolist() if hasattr(results, "tolist") else results
            wrong = check_length(results, len(items))
            if wrong is not None:
                return [failure(wrong)] * len(items)
            return [_read(result, logs.of(row)) for row, result in enumerate(results)]
        except RewardError as error:
            return [failure(error.what)] * len(items)
        except BaseException as error:
            return [failure(describe_exception(error))] * len(items)

    def _arguments(self, items: Sequence[Fields], logs: _Logs) -> dict[str, Any]:
        facts = [item[6] or BatchFacts() for item in items]
        prompts = [one.prompt for one in facts]
        texts = [item[1] for item in items]
        in_messages = [isinstance(prompt, list) for prompt in prompts]
        given: dict[str, Any] = {
            "prompts": prompts,
            "completions": [
                [{"role": "assistant", "content": text}] if is_list else text
                for text, is_list in zip(texts, in_messages, strict=True)
            ],
            "log_extra": logs.extra,
            "log_metric": logs.metric,
        }
        if all(one.token_ids is not None for one in facts):
            given["completion_ids"] = [list(one.token_ids or ()) for one in facts]
        if facts[0].progress is not None:
            given["trainer_state"] = TrainerState(*facts[0].progress)
        columns = [columns_of(item) for item in items]
        names = dict.fromkeys(name for row in columns for name in row if name not in BATCH)
        given |= {name: [row.get(name) for row in columns] for name in (*names, *self._required) if name not in BATCH}
        if "ground_truths" in self._names and "ground_truths" not in names:
            given["ground_truths"] = [item[2] for item in items]
        missing = self._required - given.keys()
        if missing:
            raise RewardError(f"it needs {', '.join(sorted(missing))}, which is known in a run alone")
        wanted = {name: value for name, value in given.items() if self._all or name in self._names}
        return {name: value for name, value in wanted.items() if name not in self.kwargs}


def columns_of(item: Fields) -> dict[str, Any]:
    source, _, truth, extra_info, *_ = item
    own = extra_info if isinstance(extra_info, dict) else {}
    return {**own, "ground_truth": truth, "data_source": source, "extra_info": extra_info}


def _read(result: Any, logged: dict[str, float | str]) -> Outcome:
    applies = result is not None
    if applies and not isinstance(result, str | bytes | dict):
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # read_result reports these
            applies = not math.isnan(result)
    score, parts, error = read_result(result) if applies else NOT_APPLICABLE
    return score, {**logged, **parts}, error

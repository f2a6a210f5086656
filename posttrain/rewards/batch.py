"""Reward functions as TRL and Unsloth call them: lists of prompts and completions, and the columns of the rows by name.

    def accuracy(completions, answer, **kwargs):
        return [1.0 if a in c[0]["content"] else 0.0 for c, a in zip(completions, answer)]

One call gets all responses of a prompt. Prompts and completions are lists of messages where the rows' prompts are, and
texts where those are texts. A result of None (or NaN) says that the function does not apply to a response: it is left
out of that response's sum.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.rewards.failures import describe_exception, text_of
from posttrain.rewards.outcomes import Outcome, failure, not_a_list, read_part, read_result
from posttrain.rewards.signatures import BATCH, Fields, awaited, required, takes_all
from posttrain.rewards.types import RewardError

NOT_APPLICABLE: Outcome = (math.nan, {}, None)
"""Of a response that a function does not apply to."""
_NAME_CHARS = 200


@dataclass(frozen=True)
class BatchFacts:
    """What a function of this form may be given of a response besides the fields of all forms."""

    prompt: Any = None
    """Messages or a text, as the row has it; None where it is unknown."""
    progress: tuple[int, int] | None = None
    """Steps that are done, and steps of the run."""
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class TrainerState:
    """How far the run is, under the names of transformers' TrainerState."""

    global_step: int
    max_steps: int


@dataclass
class _Logs:
    """What a function logs by `log_extra` and `log_metric`: parts of its responses."""

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
    """Scores the responses of a prompt by one function."""

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self.function, self.kwargs = function, kwargs
        self._all, self._names = takes_all(function), set(inspect.signature(function).parameters)
        self._required = required(function) - kwargs.keys()

    def __call__(self, items: Sequence[Fields]) -> list[Outcome]:
        logs = _Logs(len(items))
        try:
            results = awaited(self.function(**self._arguments(items, logs), **self.kwargs))
            results = results.tolist() if hasattr(results, "tolist") else results
            wrong = not_a_list(results, len(items))
            if wrong is not None:
                return [failure(wrong)] * len(items)
            return [_read(result, logs.of(row)) for row, result in enumerate(results)]
        except RewardError as error:
            return [failure(error.what)] * len(items)
        except BaseException as error:
            return [failure(describe_exception(error))] * len(items)

    def _arguments(self, items: Sequence[Fields], logs: _Logs) -> dict[str, Any]:
        """What the function takes of all that there is, by name."""
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
    """A row's columns by name, as training has them."""
    source, _, truth, extra_info, *_ = item
    own = extra_info if isinstance(extra_info, dict) else {}
    return {**own, "ground_truth": truth, "data_source": source, "extra_info": extra_info}


def _read(result: Any, logged: dict[str, float | str]) -> Outcome:
    applies = result is not None
    if applies and not isinstance(result, str | bytes | dict):
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # which is read below, in words
            applies = not math.isnan(result)
    score, parts, error = read_result(result) if applies else NOT_APPLICABLE
    return score, {**logged, **parts}, error

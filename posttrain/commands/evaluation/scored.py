"""Scored responses and the numbers made of them: per prompt first, then means over prompts with intervals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.commands.evaluation.statistics import estimate, majority_at_k
from posttrain.tracking.metrics import mean, right_answers
from posttrain.tracking.validation import has_answer, pass_at_k

ALL = "all"  # name of the row over all data sources


@dataclass
class ScoredPrompt:
    """One prompt with the responses to it and what the reward made of them."""

    messages: Any  # the conversation that was asked
    prompt: str  # the same as the text that a model reads, for the samples
    data_source: str
    ground_truth: Any
    responses: list[str]
    scores: list[float]
    parts: list[dict[str, Any]]
    errors: list[str | None]
    finish_reasons: list[str | None]
    tokens: list[int | None]
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[list[int]] = field(default_factory=list)
    # With tools, as are those that follow: which tokens the model wrote.
    marks: list[list[bool]] = field(default_factory=list)
    own_words: list[str] = field(default_factory=list)
    num_turns: list[int] = field(default_factory=list)
    tool_calls: list[str] = field(default_factory=list)

    @property
    def right(self) -> list[float]:
        """1 or 0 per response: by the reward's `acc`, otherwise by its score reaching 0.5."""
        return right_answers(np.asarray(self.scores, dtype=np.float64), self.parts).astype(float).tolist()

    @property
    def answers(self) -> list[str | None]:
        """What each response answered: as the reward read it, or, if it does not say, as answers usually stand."""
        from posttrain.trainer.ppo.validate import given_answer  # imports torch, which `eval compare` does without

        rows = zip(self.own_words or self.responses, self.parts, self.errors, strict=True)
        return [given_answer(self.data_source, *row) for row in rows]


def keys_of(prompts: Sequence[ScoredPrompt]) -> list[str]:
    """A name for each prompt that is the same wherever the same question is asked; repeated ones are numbered."""
    seen: dict[str, int] = {}
    keys = []
    for prompt in prompts:
        text = json.dumps([prompt.data_source, prompt.messages, prompt.ground_truth], sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        seen[key] = seen.get(key, 0) + 1
        keys.append(key if seen[key] == 1 else f"{key}-{seen[key]}")
    return keys


def per_prompt(prompts: Sequence[ScoredPrompt]) -> dict[str, list[float]]:
    """Metric -> one value per prompt: reward, accuracy, and pass@k and maj@k for k up to the fewest responses."""
    fewest = min(len(prompt.responses) for prompt in prompts)
    values: dict[str, list[float]] = {
        "reward": [mean(prompt.scores) for prompt in prompts],
        "accuracy": [mean(prompt.right) for prompt in prompts],
    }
    ks = [2**power for power in range(1, fewest.bit_length()) if 2**power < fewest] + ([fewest] if fewest > 1 else [])
    for k in ks:
        values[f"pass@{k}"] = [pass_at_k(len(p.responses), round(sum(p.right)), k) for p in prompts]
    if any(answer is not None for prompt in prompts for answer in prompt.answers):
        for k in ks:
            values[f"maj@{k}"] = [majority_at_k(prompt.answers, prompt.right, k) for prompt in prompts]
    return values


def summary(prompts: Sequence[ScoredPrompt], values: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Data source -> its numbers; with several sources also `all`, in which every prompt counts once."""
    sources = list(dict.fromkeys(prompt.data_source for prompt in prompts))
    rows = {source: [i for i, prompt in enumerate(prompts) if prompt.data_source == source] for source in sources}
    if len(sources) > 1:
        rows[ALL] = list(range(len(prompts)))
    return {name: _numbers([prompts[i] for i in chosen], values, chosen) for name, chosen in rows.items()}


def _numbers(prompts: list[ScoredPrompt], values: dict[str, list[float]], rows: list[int]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for name, column in values.items():
        found = estimate([column[row] for row in rows])
        metrics[name] = {"value": found.value, "low": found.low, "high": found.high, "interval": found.method}
    reasons = [reason for prompt in prompts for reason in prompt.finish_reasons if reason is not None]
    answers = [answer for prompt in prompts for answer in prompt.answers]
    # A reward that never says what it read, on responses in which nothing can be found, tells nothing about answers.
    known = any(map(has_answer, (part for prompt in prompts for part in prompt.parts))) or any(answers)
    lengths = [tokens for prompt in prompts for tokens in prompt.tokens if tokens is not None]
    return {
        "prompts": len(prompts),
        "responses": sum(len(prompt.responses) for prompt in prompts),
        "metrics": metrics,
        "truncated": mean(reason == "length" for reason in reasons) if reasons else None,
        "mean_length": mean(lengths) if lengths else None,
        "without_answer": mean(answer is None for answer in answers) if known else None,
        "reward_failures": sum(error is not None for prompt in prompts for error in prompt.errors),
    }

"""step_metrics: the numbers of one training step, from its batch, its update and its timings.

Sums are exact (`math.fsum` over float64), so that the same batch gives the same numbers in any order of rows.
`reward_mean`, `reward_std`, `kl_loss`, `policy_loss` and `response_length` are the five to watch; the others are the
names that tools for this kind of training commonly read.

Validation metrics, per data source over the k responses of each prompt:

mean@k  mean score
std@k   mean over prompts of the sample deviation of the scores
pass@k  probability that one of k responses, drawn from the n of a prompt, is right: 1 - C(n-c, k) / C(n, k) with c
        right ones, the unbiased estimate (Chen et al. 2021, arXiv 2107.03374)
maj@k   score of the answer that most of the k responses gave (of equals, the one given first)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.batch.columns import Column, EveryTokenColumn, MaskColumn
from posttrain.batch.samples import has_several_rows, last_rows, sample_of_rows
from posttrain.tracking.step_line import failing_tools


class Fields:
    """Columns of `batch`, tensors and object arrays alike; `batch` is a DataProto or one mapping with both."""

    def __init__(self, batch: Any) -> None:
        self._parts = [batch.batch, batch.non_tensor_batch] if hasattr(batch, "non_tensor_batch") else [batch]

    def raw(self, *names: str) -> Any:
        """The first present column of `names`, None if there is none."""
        for name in names:
            for part in self._parts:
                if part is not None and name in part:
                    return part[name]
        return None

    def numbers(self, *names: str) -> np.ndarray | None:
        """The column as float64 on the host: sums in it do not depend on the batch's dtype."""
        column = self.raw(*names)
        return None if column is None else as_numpy(column, np.float64)

    def column(self, *names: str) -> Any:
        """As `raw`, but not made where it is made when it is read."""
        for name in names:
            for part in self._parts:
                if part is not None and name in part:
                    return part.column(name) if hasattr(part, "column") else part[name]
        return None

    def sums(self, *names: str) -> np.ndarray | None:
        """(B,) the column's sum over each row's tokens, in float64."""
        column = self.column(*names)
        if isinstance(column, Column):
            return column.row_sums()
        return None if column is None else _row_sums(as_numpy(column, np.float64))

    def objects(self, *names: str) -> list[Any] | None:
        column = self.raw(*names)
        return None if column is None else list(column.tolist() if hasattr(column, "tolist") else column)


def as_numpy(column: Any, dtype: Any) -> np.ndarray:
    """A torch tensor (of any device and dtype) or a sequence as a NumPy array of `dtype`."""
    if hasattr(column, "detach"):
        column = column.detach().cpu()
        column = (column.double() if column.is_floating_point() else column).numpy()
    return np.asarray(column).astype(dtype)


def groups_of(uids: Iterable[Any]) -> list[np.ndarray]:
    """Row numbers of each group of equal uid, groups in the order of their first row."""
    rows: dict[Any, list[int]] = {}
    for row, uid in enumerate(uids):
        rows.setdefault(uid, []).append(row)
    return [np.asarray(members) for members in rows.values()]


# A response whose score reaches this counts as right, unless its reward gave an `acc` part.
RIGHT_FROM = 0.5
# A variance below this share of the mean square is float32 rounding of equal numbers.
ROUNDING = 1e-10
# Key of `meta_info`: seconds of a generation that overlapped other work.
GENERATED_S = "generated_s"
_CORRECTNESS_PARTS = ("acc", "accuracy", "correct")


def step_metrics(
    batch: Any,
    *,
    timing: Mapping[str, float] | None = None,
    update: Mapping[str, float | Sequence[float]] | None = None,
    max_response_length: int | None = None,
    n_devices: int = 1,
    generated_s: float | None = None,
) -> dict[str, float]:
    """Metrics by name.

    `batch` is a DataProto, or one mapping, with `response_mask`, `token_level_scores` and `uid`; where present also
    `token_level_rewards`, `advantages`, `returns`, `values`, `attention_mask`, `data_source`, `finish_reason`,
    `reward_parts` (a dict per row) and `reward_error` (text or None per row).
    `timing` maps stages (`gen`, `reward`, ..., and `step` for all of it) to seconds.
    `generated_s` are the seconds from the first token to the last; with one-step-off `gen` is only the waiting time.
    `update` holds the update's metrics by their names (`actor/policy_loss`, ...): numbers, or one per mini-batch.
    """
    rows = Fields(batch)
    if rows.column("response_mask") is None or rows.column("token_level_scores", "token_level_rewards") is None:
        raise KeyError("a step's batch needs response_mask and token_level_scores")
    several = hasattr(batch, "non_tensor_batch") and has_several_rows(batch)
    fields = Fields(_one_row_per_sample(batch)) if several else rows
    scores, lengths = fields.sums("token_level_scores", "token_level_rewards"), fields.sums("response_mask")
    assert scores is not None and lengths is not None
    parts: list[Mapping[str, Any]] = [part or {} for part in fields.objects("reward_parts") or [{}] * len(scores)]
    right = right_answers(scores, parts)
    metrics = _score_metrics(fields, scores)
    metrics |= _group_metrics(fields, scores, right)
    metrics |= _token_metrics(rows)
    metrics |= _length_metrics(fields, lengths, right, max_response_length)
    metrics |= _turn_metrics(fields)
    metrics |= _source_metrics(fields, scores)
    metrics |= _part_metrics(fields, parts)
    metrics |= _update_metrics(update or {})
    metrics |= _time_metrics(rows, lengths, timing or {}, n_devices, generated_s)
    if several:
        metrics |= _mean_max_min("num_rows", np.bincount(sample_of_rows(batch)).astype(np.float64))
    return metrics


def _one_row_per_sample(batch: Any) -> dict[str, Any]:
    """Columns with one row per sample: sums over its rows, and what its last row has."""
    last = batch[np.unique(last_rows(batch))]
    numbers = sample_of_rows(batch)
    sums: dict[str, Any] = {}
    for name in ("response_mask", "token_level_scores", "token_level_rewards"):
        if name in batch.batch:
            values_B = Fields(batch).sums(name)
            sums[name] = np.bincount(numbers, weights=values_B)[:, None]
    return {**last.batch, **last.non_tensor_batch, **sums}


def right_answers(scores: np.ndarray, parts: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Whether each response is right: by its `acc` part, otherwise by its score reaching RIGHT_FROM."""
    right = np.asarray(scores) >= RIGHT_FROM
    for row, part in enumerate(parts):
        for name in _CORRECTNESS_PARTS:
            if isinstance(part.get(name), bool | int | float):
                right[row] = part[name] >= RIGHT_FROM
                break
    return right


def mean(values: Iterable[float]) -> float:
    """The mean, rounded once; NaN for nothing."""
    numbers = [float(value) for value in values]
    return math.fsum(numbers) / len(numbers) if numbers else math.nan


def sample_deviation(values: Iterable[float]) -> float:
    """The sample standard deviation (divisor n - 1); 0 for a single value."""
    numbers = [float(value) for value in values]
    if len(numbers) < 2:
        return 0.0
    centre = mean(numbers)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in numbers) / (len(numbers) - 1))


def _score_metrics(fields: Fields, scores: np.ndarray) -> dict[str, float]:
    metrics = {"reward_mean": mean(scores), **_mean_max_min("critic/score", scores)}
    rewards = fields.sums("token_level_rewards")
    metrics["critic/rewards/mean"] = metrics["reward_mean"] if rewards is None else mean(rewards)
    return metrics


def _group_metrics(fields: Fields, scores: np.ndarray, right: np.ndarray) -> dict[str, float]:
    uids = fields.objects("uid")
    groups = groups_of(uids if uids is not None else range(len(scores)))
    deviations = [sample_deviation(scores[rows]) for rows in groups]
    metrics = {"reward_std": mean(deviations)}
    several = [rows for rows in groups if len(rows) > 1]
    if several:  # a group of one has nothing to be compared with
        means = [mean(scores[rows]) for rows in several]
        metrics |= {
            "groups/no_signal": mean(float(np.ptp(scores[rows]) == 0) for rows in several),
            "groups/all_right": mean(float(right[rows].all()) for rows in several),
            "groups/all_wrong": mean(float(not right[rows].any()) for rows in several),
            "groups/reward_mean/min": min(means),
            "groups/reward_mean/max": max(means),
            "groups/reward_mean/std": sample_deviation(means),
            "groups/reward_std/max": max(sample_deviation(scores[rows]) for rows in several),
        }
    return {**metrics, "groups/count": float(len(groups)), "right/mean": mean(right)}


def _token_metrics(fields: Fields) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in ("advantages", "returns", "values"):
        column = fields.column(name)
        if isinstance(column, EveryTokenColumn):
            metrics |= _repeated(f"critic/{name}", column)
        elif column is not None and (mask := _mask(fields)).any():
            metrics |= _mean_max_min(f"critic/{name}", as_numpy(fields.raw(name), np.float64)[mask])
    return metrics | _explained_variance(fields)


def _repeated(name: str, column: EveryTokenColumn) -> dict[str, float]:
    """Of a number that all tokens of a response share: what its tokens one by one would give, bit for bit."""
    has_tokens = column.response_B > 0
    if not has_tokens.any():
        return {}
    values = column.values_B.astype(np.float64)[has_tokens]
    # A float32 times a count is exact in float64, so the sum is rounded once, as that of all tokens is.
    total = math.fsum(values * column.response_B[has_tokens])
    return {
        f"{name}/mean": total / int(column.response_B.sum()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _mask(fields: Fields) -> np.ndarray:
    return as_numpy(fields.raw("response_mask"), np.float64) > 0


def _explained_variance(fields: Fields) -> dict[str, float]:
    # 1 - variance(returns - values) / variance(returns): 1 is a perfect critic, 0 one that knows the mean alone.
    if fields.column("returns") is None or fields.column("values") is None or not (mask := _mask(fields)).any():
        return {}
    returns, values = fields.numbers("returns"), fields.numbers("values")
    assert returns is not None and values is not None
    wanted, rest = returns[mask], (returns - values)[mask]
    variance = _variance(wanted)
    if variance <= ROUNDING * mean(wanted**2):  # equal returns: what is left of them is rounding
        return {}
    return {"critic/vf_explained_var": 1.0 - _variance(rest) / variance}


def _variance(values: np.ndarray) -> float:
    centre = mean(values)
    return mean((values - centre) ** 2)


def _length_metrics(fields: Fields, lengths: np.ndarray, right: np.ndarray, limit: int | None) -> dict[str, float]:
    metrics = {"response_length": mean(lengths), **_mean_max_min("response_length", lengths)}
    reasons = fields.objects("finish_reason")
    if reasons is not None:
        metrics["response_length/clip_ratio"] = mean(float(reason == "length") for reason in reasons)
    elif limit is not None:
        metrics["response_length/clip_ratio"] = mean(float(length >= limit) for length in lengths)
    prompt_lengths = _prompt_lengths(fields)
    if prompt_lengths is not None:
        metrics |= _mean_max_min("prompt_length", prompt_lengths)
    for name, chosen in (("right", lengths[right]), ("wrong", lengths[~right])):
        if len(chosen):
            metrics[f"response_length/{name}/mean"] = mean(chosen)
    return metrics


_TOOL_LIMITS = {"tools/time_limit": "tool_time", "tools/cost_limit": "tool_cost"}


def _turn_metrics(fields: Fields) -> dict[str, float]:
    turns, calls = fields.objects("num_turns"), fields.objects("tool_calls")
    if turns is None or calls is None:
        return {}
    all_calls = [call for row in calls for call in row]
    reasons, seconds = fields.objects("finish_reason") or [], fields.objects("call_seconds") or [[]]
    metrics = {
        **_mean_max_min("num_turns", np.asarray(turns, np.float64)),
        "num_turns/limit": mean(float(reason == "turns") for reason in reasons),
        **{name: mean(float(reason == ended) for reason in reasons) for name, ended in _TOOL_LIMITS.items()},
        "tools/calls": len(all_calls) / len(calls),
        "tools/cost": mean(sum(call.get("cost", 0.0) for call in row) for row in calls),
        "tools/seconds": mean(sum(row) for row in seconds),
    }
    if all_calls:
        metrics["tools/errors"] = mean(float(call["error"] is not None) for call in all_calls)
        metrics["tools/failing"] = float(len(failing_tools(calls)))
    return metrics


def _source_metrics(fields: Fields, scores: np.ndarray) -> dict[str, float]:
    sources = fields.objects("data_source")
    if sources is None:
        return {}
    return {
        f"data_source/{source}/reward_mean": mean(scores[[row for row, own in enumerate(sources) if own == source]])
        for source in sorted(set(sources), key=str)
    }


def _part_metrics(fields: Fields, parts: list[Mapping[str, Any]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in sorted({name for part in parts for name in part}):
        numbers = [part[name] for part in parts if isinstance(part.get(name), bool | int | float)]
        if numbers:
            metrics[f"reward/{name}/mean"] = mean(numbers)
    errors = fields.objects("reward_error")
    if errors is not None:
        metrics["reward/failures"] = float(sum(error is not None for error in errors))
    truncated = fields.objects("rm_truncated")
    if truncated is not None:
        metrics |= _reward_model_metrics([part["reward_model"] for part in parts if "reward_model" in part], truncated)
    return metrics


def _reward_model_metrics(scores: list[float], truncated: Sequence[Any]) -> dict[str, float]:
    # `scores` has only the rows that the reward model could score.
    metrics = {
        "reward_model/failures": float(len(truncated) - len(scores)),
        "reward_model/truncated": float(sum(map(bool, truncated))),
    }
    if scores:
        metrics |= {**_mean_max_min("reward_model", np.asarray(scores)), "reward_model/std": sample_deviation(scores)}
    return metrics


def _update_metrics(update: Mapping[str, float | Sequence[float]]) -> dict[str, float]:
    metrics = {name: float(v) if np.ndim(v) == 0 else mean(v) for name, v in update.items()}  # type: ignore[arg-type]
    for plain, spellings in (("policy_loss", ("actor/policy_loss", "actor/pg_loss")), ("kl_loss", ("actor/kl_loss",))):
        found = [metrics[name] for name in spellings if name in metrics]
        if found:
            metrics.setdefault(plain, found[0])
    return metrics


def _time_metrics(
    fields: Fields, lengths: np.ndarray, timing: Mapping[str, float], n_devices: int, generated_s: float | None
) -> dict[str, float]:
    metrics = {f"timing_s/{stage}": float(seconds) for stage, seconds in timing.items()}
    attention = fields.sums("attention_mask")
    tokens = float(lengths.sum() if attention is None else attention.sum())
    metrics["perf/total_num_tokens"] = tokens
    seconds = timing.get("step", math.fsum(timing.values()))
    if seconds > 0:
        metrics["perf/time_per_step"] = float(seconds)
        metrics["perf/throughput"] = tokens / seconds / n_devices
    generating = generated_s or timing.get("gen", 0)
    if generating > 0:
        metrics["perf/generated_tokens_per_s"] = float(lengths.sum()) / generating
    return metrics


def _prompt_lengths(fields: Fields) -> np.ndarray | None:
    column = fields.column("attention_mask")
    if isinstance(column, MaskColumn) and column.prompt_B is not None:
        return column.prompt_B.astype(np.float64)
    attention, responses = fields.numbers("attention_mask"), fields.raw("responses", "response_mask")
    if attention is None or responses is None:
        return None
    return attention[:, : attention.shape[1] - responses.shape[1]].sum(axis=1)


def _row_sums(values_BT: np.ndarray) -> np.ndarray:
    return values_BT.sum(axis=1) if values_BT.ndim == 2 else values_BT


def _mean_max_min(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name}/mean": mean(values), f"{name}/max": float(np.max(values)), f"{name}/min": float(np.min(values))}


ANSWER_PARTS = ("pred", "answer", "extracted")


def validation_metrics(
    *,
    data_sources: Sequence[str],
    uids: Sequence[Hashable],
    scores: Sequence[float],
    parts: Sequence[Mapping[str, Any]] | None = None,
    answers: Sequence[str | None] | None = None,
) -> dict[str, float]:
    """`val/<data_source>/mean@k` and so on, from one entry per response.

    Responses of one prompt share a `uid`. `answers` are what responses answered, for maj@k; unset they are taken from
    the reward's part `pred` (or `answer`, `extracted`), and without any there is no maj@k.
    """
    parts = parts if parts is not None else [{}] * len(scores)
    values = np.asarray(scores, dtype=np.float64)
    right = right_answers(values, parts)
    answered = list(answers) if answers is not None else [answer_of(part) for part in parts]
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(data_sources):
        rows = np.asarray([row for row, own in enumerate(data_sources) if own == source])
        groups = [rows[members] for members in groups_of(uids[row] for row in rows)]
        named = _validation_of_source(groups, values, right, parts, answered)
        metrics |= {f"val/{source}/{name}": value for name, value in named}
    return metrics


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that at least one of `k` responses, drawn from `n` of which `right` are right, is right."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} responses; there are {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_row(answers: Sequence[str | None]) -> int:
    """Position of the first response that gave the most frequent answer; responses without one do not vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0
    most = max(votes.values())
    return next(row for row, answer in enumerate(answers) if answer is not None and votes[answer] == most)


def _validation_of_source(
    groups: list[np.ndarray],
    scores: np.ndarray,
    right: np.ndarray,
    parts: Sequence[Mapping[str, Any]],
    answers: list[str | None],
) -> Iterator[tuple[str, float]]:
    n = min(len(rows) for rows in groups)
    yield f"mean@{n}", mean(mean(scores[rows]) for rows in groups)
    if n > 1:
        yield f"std@{n}", mean(sample_deviation(scores[rows]) for rows in groups)
    for k in (*(2**power for power in range(n.bit_length()) if 2**power < n), n):
        yield f"pass@{k}", mean(pass_at_k(len(rows), int(right[rows].sum()), k) for rows in groups)
    if n > 1 and any(answers[row] is not None for rows in groups for row in rows):
        chosen = [rows[majority_row([answers[row] for row in rows])] for rows in groups]
        yield f"maj@{n}", mean(scores[chosen])
    members = [row for rows in groups for row in rows]
    for name in sorted({name for row in members for name in parts[row]}):
        numbers = [parts[row][name] for row in members if isinstance(parts[row].get(name), bool | int | float)]
        if numbers:
            yield f"{name}/mean@{n}", mean(numbers)


def has_answer(part: Mapping[str, Any]) -> bool:
    """Whether a reward's parts say what was read, be it nothing."""
    return any(part.get(name) is not None for name in ANSWER_PARTS)


def answer_of(part: Mapping[str, Any]) -> str | None:
    """What a response answered by its reward's parts; a reward that read nothing gives an empty text."""
    found = next((part[name] for name in ANSWER_PARTS if part.get(name) is not None), None)
    return None if found is None or found == "" else str(found)

"""Metrics of a batch, of its times, and of a validation, under verl's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from verl.utils.metric import reduce_metrics

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "process_validation_metrics",
    "reduce_metrics",
]
_WHOLE_ROWS = ("ref", "values", "adv", "update_critic", "update_actor")
"""Stages that compute prompts and responses."""


def _summary(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, largest and smallest; NaN where there is nothing."""
    found = [values.float().mean(), values.max(), values.min()] if values.numel() else [torch.tensor(torch.nan)] * 3
    return {f"{name}/{how}": float(value) for how, value in zip(("mean", "max", "min"), found, strict=True)}


def _lengths(name: str, lengths: torch.Tensor, width: int) -> dict[str, float]:
    """The summary of lengths, and the share of those that fill the whole width."""
    full = float((lengths == width).float().mean()) if lengths.numel() else float("nan")
    return _summary(name, lengths) | {f"{name}/clip_ratio": full}


def _compute_response_info(batch: Any) -> dict[str, Any]:
    mask = batch.batch["attention_mask"]
    width = batch.batch["responses"].shape[-1]
    response = mask[:, -width:]
    lengths = {"prompt_length": mask[:, :-width].sum(-1).float(), "response_length": response.sum(-1).float()}
    return {"response_mask": response, **lengths}


def compute_data_metrics(batch: Any, use_critic: bool = True) -> dict[str, Any]:
    """Scores, rewards, advantages, returns, values and lengths. Rows without a response count in the lengths only."""
    tensors = batch.batch
    mask, info = tensors["response_mask"].bool(), _compute_response_info(batch)
    prompt, response = info["prompt_length"], info["response_length"]
    there = response > 0
    returns = tensors["returns"][mask]
    metrics = _summary("critic/score", tensors["token_level_scores"].sum(-1)[there])
    metrics |= _summary("critic/rewards", tensors["token_level_rewards"].sum(-1)[there])
    metrics |= _summary("critic/advantages", tensors["advantages"][mask]) | _summary("critic/returns", returns)
    if use_critic:
        values = tensors["values"][mask]
        unexplained = torch.var(returns - values) / (torch.var(returns) + 1e-5)
        metrics |= _summary("critic/values", values) | {"critic/vf_explained_var": float(1 - unexplained)}
    width = tensors["responses"].shape[-1]
    metrics |= _lengths("response_length", response, width)
    metrics |= _lengths("response_length_non_aborted", response[there], width)
    metrics["response/aborted_ratio"] = float((~there).float().mean())
    metrics |= _lengths("prompt_length", prompt, tensors["prompts"].shape[-1])
    for field, name in (("__num_turns__", "num_turns"), ("tool_call_counts", "tool_call_counts")):
        if field in batch.non_tensor_batch:
            counts = batch.non_tensor_batch[field]
            metrics |= {f"{name}/min": counts.min(), f"{name}/max": counts.max(), f"{name}/mean": counts.mean()}
    return metrics


def compute_timing_metrics(batch: Any, timing_raw: dict[str, float]) -> dict[str, Any]:
    """Seconds of every stage, and milliseconds per token of those that compute tokens."""
    info = _compute_response_info(batch)
    generated = float(info["response_length"].sum())
    tokens = {"gen": generated, **dict.fromkeys(_WHOLE_ROWS, generated + float(info["prompt_length"].sum()))}
    per_token = {
        name: seconds * 1000 / tokens[name] if tokens[name] else 0.0
        for name, seconds in timing_raw.items()
        if name in tokens
    }
    return {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()} | {
        f"timing_per_token_ms/{name}": value for name, value in per_token.items()
    }


def compute_throughout_metrics(batch: Any, timing_raw: dict[str, float], n_gpus: int) -> dict[str, Any]:
    """Tokens of the batch (`meta_info["global_token_num"]`), the step's seconds, tokens per second and device."""
    tokens, seconds = sum(batch.meta_info["global_token_num"]), timing_raw["step"]
    rates = {"perf/time_per_step": seconds, "perf/throughput": tokens / (seconds * n_gpus)}
    return {"perf/total_num_tokens": tokens, **rates}


# -- validation --------------------------------------------------------------------------------------------------------


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[Any], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """(mean, deviation) of each function over random subsets, drawn with replacement."""
    values = np.array(data, dtype=object)
    drawn = np.random.RandomState(seed).choice(len(values), size=(n_bootstrap, subset_size), replace=True)
    found = [[float(reduce(values[rows])) for rows in drawn] for reduce in reduce_fns]
    return [(float(np.mean(results)), float(np.std(results))) for results in found]


def calc_maj_val(data: Sequence[dict[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the first among those that give the most frequent answer."""
    winner = Counter(row[vote_key] for row in data).most_common(1)[0][0]
    return next(row[val_key] for row in data if row[vote_key] == winner)


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: dict[str, Sequence[Any]],
    seed: int = 42,
    expected_acc_counts: dict[tuple[str, str], int] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Source -> variable -> metric: mean@n and std@n of a prompt's n responses, best@k, worst@k and (with a column
    `pred`) maj@k for k = 2, 4, ..., n by resampling; each the mean over prompts.

    `expected_acc_counts` is the number of responses that each (source, prompt) should have: the `acc` of those that
    are missing is 0, and `acc_success_only` leaves them out.
    """
    if expected_acc_counts and "acc" in infos_dict:
        data_sources, sample_uids, infos_dict = _with_missing(
            data_sources, sample_uids, infos_dict, expected_acc_counts
        )
    rows: dict[str, dict[str, list[int]]] = {}
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows.setdefault(source, {}).setdefault(uid, []).append(row)
    made: dict[str, dict[str, dict[str, float]]] = {}
    for source, prompts in rows.items():
        for name, column in infos_dict.items():
            if name == "pred" or any(isinstance(column[row], str) for own in prompts.values() for row in own):
                continue
            found: dict[str, list[float]] = {}
            for own in prompts.values():
                for metric, value in _of_prompt(name, own, infos_dict, seed).items():
                    found.setdefault(metric, []).append(value)
            if found:
                made.setdefault(source, {})[name] = {metric: float(np.mean(values)) for metric, values in found.items()}
    return made


def _with_missing(
    sources: Sequence[str], uids: Sequence[str], infos: dict[str, Sequence[Any]], expected: dict[tuple[str, str], int]
) -> tuple[list[str], list[str], dict[str, Sequence[Any]]]:
    """A row more for each response that is missing, of sources that have an `acc` at all."""
    keys, right = list(zip(sources, uids, strict=True)), infos["acc"]
    present = [key for key, value in zip(keys, right, strict=True) if value is not None]
    scored = {source for source, _ in present}
    added = [key for key, count in expected.items() if key[0] in scored for _ in range(count - present.count(key))]
    made: dict[str, Sequence[Any]] = {name: [*column, *[None] * len(added)] for name, column in infos.items()}
    made |= {"acc": [*right, *[0.0] * len(added)], "acc_success_only": [*right, *[None] * len(added)]}
    return [one for one, _ in keys + added], [one for _, one in keys + added], made


def _of_prompt(name: str, rows: list[int], infos: dict[str, Sequence[Any]], seed: int) -> dict[str, float]:
    present = [row for row in rows if infos[name][row] is not None]
    values = [infos[name][row] for row in present]
    count = len(values)
    if not count:
        return {}
    metrics = {f"mean@{count}": float(np.mean(values))}
    if count < 2:
        return metrics
    metrics[f"std@{count}"] = float(np.std(values))
    preds = infos.get("pred")
    for size in _sizes(count):
        best, worst = bootstrap_metric(values, size, [np.max, np.min], seed=seed)
        metrics |= {f"best@{size}/mean": best[0], f"best@{size}/std": best[1]}
        metrics |= {f"worst@{size}/mean": worst[0], f"worst@{size}/std": worst[1]}
        if preds is not None:
            votes = [{"val": infos[name][row], "pred": preds[row]} for row in present]
            [(mean, deviation)] = bootstrap_metric(
                votes, size, [lambda some: calc_maj_val(some, "pred", "val")], seed=seed
            )
            metrics |= {f"maj@{size}/mean": mean, f"maj@{size}/std": deviation}
    return metrics


def _sizes(count: int) -> list[int]:
    """2, 4, 8, ... below the count, and the count."""
    return [*(2**power for power in range(1, count.bit_length()) if 2**power < count), count]

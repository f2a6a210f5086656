"""The rows of a sample: a conversation with several branches is one sample with several rows (docs/contracts.md).

Rows with the same `uid` and `sample` belong together. Batches without the field `branch` have one row per sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BRANCH_FIELDS: dict[str, Any] = {"branch": 0, "parent": None, "fork": 0, "turn_ends": ()}
"""The fields of a row, with their values for a sample of a single row:

    branch     number of the branch
    parent     number of the branch that it was forked from
    fork       how many of its first tokens it shares with the parent
    turn_ends  (number of the turn, its end in the response) for each turn that was sampled in this branch
"""


def sample_of_rows(data: Any) -> np.ndarray:
    """(B,) the number of each row's sample; `data` is a DataProto."""
    fields = data.non_tensor_batch
    if "branch" not in fields:
        return np.arange(len(data))
    numbers: dict[Any, int] = {}
    keys = zip(fields["uid"], fields["sample"], strict=True)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def rows_of_samples(data: Any) -> list[np.ndarray]:
    """The rows of each sample, samples in the order of their first rows."""
    numbers = sample_of_rows(data)
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []


def last_rows(data: Any) -> np.ndarray:
    """(B,) for each row the last one of its sample: where the conversation ended, and which has its score."""
    numbers = sample_of_rows(data)
    last = np.zeros(numbers.max(initial=-1) + 1, np.int64)
    np.maximum.at(last, numbers, np.arange(len(numbers)))
    return last[numbers]


def has_several_rows(data: Any) -> bool:
    """Whether any sample of the batch has more than one row."""
    return "branch" in data.non_tensor_batch and sample_of_rows(data).max(initial=-1) + 1 < len(data)

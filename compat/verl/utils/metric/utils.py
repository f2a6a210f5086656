"""Metrics of several steps or ranks as one number: by how they were made, or by a word in their name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np


class AggregationType(Enum):
    """How the values of a metric become one."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


_REDUCERS: dict[AggregationType, Callable[[Any], Any]] = {
    AggregationType.MEAN: np.mean,
    AggregationType.SUM: np.sum,
    AggregationType.MIN: np.min,
    AggregationType.MAX: np.max,
}


class Metric:
    """Values that know how they are reduced. Example: `Metric("max", [1.0, 3.0]).aggregate()` is 3.0."""

    def __init__(self, aggregation: str | AggregationType, value: Any = None) -> None:
        self.aggregation = AggregationType(aggregation)
        self.values: list[float] = []
        if isinstance(value, list | tuple):
            self.extend(value)
        elif value is not None:
            self.append(value)

    def append(self, value: Any) -> None:
        """Adds a number, a tensor of one number, or all values of another Metric."""
        if isinstance(value, Metric):
            return self.extend(value)
        if hasattr(value, "numel"):
            if value.numel() != 1:
                raise ValueError(f"a metric takes numbers, not a tensor of shape {tuple(value.shape)}")
            value = value.detach().item()
        if not isinstance(value, int | float | np.ndarray | np.number):
            raise ValueError(f"a metric takes numbers, not a {type(value)}")
        self.values.append(value)  # pyright: ignore

    def extend(self, values: Metric | Iterable[Any]) -> None:
        if isinstance(values, Metric):
            if values.aggregation is not self.aggregation:
                raise ValueError(f"a {self.aggregation.value} cannot take the values of a {values.aggregation.value}")
            values = values.values
        for value in values:
            self.append(value)

    def aggregate(self) -> Any:
        return _REDUCERS[self.aggregation](self.values)

    @classmethod
    def aggregate_dp(cls, metric_lists: list[Metric]) -> Any:
        """Over ranks: sums and means by the ranks' mean of each value first."""
        if not metric_lists:
            raise ValueError("no metrics to reduce")
        counts = {len(metric.values) for metric in metric_lists}
        if len(counts) > 1:
            raise ValueError(f"ranks gave different numbers of values: {sorted(counts)}")
        how = metric_lists[0].aggregation
        values = np.array([metric.values for metric in metric_lists])
        return _REDUCERS[how](values.mean(axis=0) if how.value in ("sum", "mean") else values)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], aggregation: str | AggregationType) -> dict[str, Metric]:
        return {name: cls(aggregation, value) for name, value in data.items()}

    def init_list(self) -> Metric:
        """An empty one that is reduced in the same way."""
        return Metric(self.aggregation)


def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Each list as one number, in place: the largest or smallest where the name has `max` or `min` in it, else the
    mean; a `Metric` as it says itself."""
    for name, values in metrics.items():
        if isinstance(values, Metric):
            metrics[name] = values.aggregate()
        else:
            how = next((word for word in ("max", "min") if word in name), "mean")
            metrics[name] = _REDUCERS[AggregationType(how)](values)
    return metrics

"""Metrics of steps and ranks, and how they become one number."""

from verl._missing import not_given
from verl.utils.metric.utils import AggregationType, Metric, reduce_metrics

__all__ = ["AggregationType", "Metric", "reduce_metrics"]
__getattr__ = not_given(__name__)

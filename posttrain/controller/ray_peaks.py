"""The memory of workers in Ray actors by stage: they measure themselves, and are asked once a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.controller.peaks import StagePeaks, as_metrics
from posttrain.controller.ray_ranks import RankWatch


class RayPeaks(StagePeaks):
    """Of `hosts`, and of those that only generate under a name of their own. Nobody is waited for at the bounds of a
    stage: a worker hears of them between the calls that it is asked for."""

    def __init__(self, hosts: Sequence[Any], rollout_hosts: Sequence[Any], watch: RankWatch) -> None:
        self.hosts, self.rollout_hosts, self.watch = hosts, rollout_hosts, watch

    def begin(self) -> None:
        for host in (*self.hosts, *self.rollout_hosts):
            host.begin_stage.remote()

    def end(self, stage: str) -> None:
        for host in (*self.hosts, *self.rollout_hosts):
            host.end_stage.remote(stage)

    def take(self) -> dict[str, float]:
        asked = [[host.take_peaks.remote() for host in pool] for pool in (self.hosts, self.rollout_hosts)]
        training, rollout = (self.watch.gathered(refs) for refs in asked)
        return as_metrics(training) | as_metrics(rollout, "perf/rollout_memory_gb")

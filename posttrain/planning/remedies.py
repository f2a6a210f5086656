"""Settings that would lower the planned peak. Each is tried by planning again with it, because their effects depend on
each other: with LoRA, say, offloading the optimizer saves little."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from posttrain.config.schema import Section, assign, lookup
from posttrain.planning.memory_plan import Plan, Planner, shown


@dataclass(frozen=True)
class Remedy:
    """One setting, its present value, and what another value would do to a stage."""

    key: str
    present: Any
    value: Any
    stage: str
    saves: int

    def words(self) -> str:
        if self.saves <= 0:
            return f"{self.key}={self.present}: changes nothing here"
        return f"{self.key}={self.present}: with {self.value}, {self.stage} takes {shown(self.saves)} less"


def find_remedies(config: Section, plan: Plan, planner: Planner, stage: str | None = None) -> list[Remedy]:
    """What lowers this stage (or the worst) first, then what lowers others; settings without effect are left out."""
    first = stage or plan.worst
    found = list(_try_all(config, plan, planner, first))
    return sorted(found, key=lambda remedy: (remedy.stage != first, -remedy.saves))


def _try_all(config: Section, plan: Plan, planner: Planner, first: str) -> Iterator[Remedy]:
    for key, lower in planner.lower.items():
        present = lookup(config, key)
        value = lower(present, plan)
        saves: dict[str, int] = {}
        if value is not None and value != present:
            changed = copy.deepcopy(config)
            assign(changed, key, value)
            other = planner.plan(changed, plan.device)
            saves = {stage: plan.peak(stage) - other.peak(stage) for stage in plan.stages}
        helped = {stage: saved for stage, saved in saves.items() if saved > 0}
        if helped or key in planner.always_named:
            stage = first if first in helped or not helped else max(helped, key=lambda name: helped[name])
            yield Remedy(key, present, value, stage, helped.get(stage, 0))

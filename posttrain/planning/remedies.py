"""Settings that would lower the planned peak: each is tried by planning again with it, not assumed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.config.base import Section
from posttrain.config.schema import assign, lookup
from posttrain.planning.memory_plan import Device, ModelCounter, Plan, shown
from posttrain.planning.rl import plan_memory

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ALWAYS_NAMED = (f"{_ROLLOUT}.gpu_memory_utilization", f"{_ROLLOUT}.n", f"{_MODEL}.enable_gradient_checkpointing")
"""The usual three: named with their values even where they change nothing."""

Next = Callable[[Any, Plan], Any]


def _half(value: Any, plan: Plan) -> Any:
    return None if value is None or value < 2 else max(1, value // 2)


_LOWER: dict[str, Next] = {
    f"{_MODEL}.enable_gradient_checkpointing": lambda value, plan: True,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": lambda value, plan: max(plan.shape.longest, value // 2),
    f"{_MODEL}.lora_rank": lambda value, plan: value or 16,
    f"{_ACTOR}.fsdp_config.optimizer_offload": lambda value, plan: True,
    "actor_rollout_ref.ref.fsdp_config.param_offload": lambda value, plan: True,
    f"{_ROLLOUT}.n": lambda value, plan: max(2, value // 2) if value > 1 else None,
    f"{_ROLLOUT}.max_num_seqs": lambda value, plan: max(1, plan.shape.wave // 2),
    f"{_ROLLOUT}.kv_cache_gb": lambda value, plan: None if value is None else round(value / 2, 2),
    f"{_ROLLOUT}.gpu_memory_utilization": lambda value, plan: None if value is None else round(value * 0.75, 3),
    "data.max_response_length": _half,
    "reward_model.fsdp_config.param_offload": lambda value, plan: True,
    "reward_model.forward_max_token_len_per_gpu": lambda value, plan: max(plan.shape.longest, value // 2),
    "critic.ppo_max_token_len_per_gpu": lambda value, plan: max(plan.shape.longest, value // 2),
    "critic.fsdp_config.param_offload": lambda value, plan: True,
    "critic.fsdp_config.optimizer_offload": lambda value, plan: True,
}
"""Key -> the next lower value, or None where there is none."""


@dataclass(frozen=True)
class Levers:
    """The settings of a kind of run that memory depends on."""

    lower: Mapping[str, Next]
    always: Sequence[str]
    """Named with their values even where they change nothing."""
    plan: Callable[[Any, Device, Any], Plan]


RL = Levers(_LOWER, ALWAYS_NAMED, plan_memory)


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


def find_remedies(
    config: Section, plan: Plan, counter: ModelCounter, levers: Levers = RL, stage: str | None = None
) -> list[Remedy]:
    """What lowers this stage (or the worst) first, then what lowers others; settings without effect are left out."""
    first = stage or plan.worst
    found = list(_try_all(config, plan, counter, levers, first))
    return sorted(found, key=lambda remedy: (remedy.stage != first, -remedy.saves))


def _try_all(config: Section, plan: Plan, counter: ModelCounter, levers: Levers, first: str) -> Iterator[Remedy]:
    for key, lower in levers.lower.items():
        present = lookup(config, key)
        value = lower(present, plan)
        saves: dict[str, int] = {}
        if value is not None and value != present:
            changed = copy.deepcopy(config)
            assign(changed, key, value)
            other = levers.plan(changed, plan.device, counter)
            saves = {stage: plan.peak(stage) - other.peak(stage) for stage in plan.stages}
        helped = {stage: saved for stage, saved in saves.items() if saved > 0}
        if helped or key in levers.always:
            stage = first if first in helped or not helped else max(helped, key=lambda name: helped[name])
            yield Remedy(key, present, value, stage, helped.get(stage, 0))

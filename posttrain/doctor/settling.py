"""What the memory plan decides of a run on a CUDA device: how large its key/value cache may grow, and how many tokens
meet in one pass, where nobody has set them.

Both follow from the settings and from the memory that the device has, never from what is free at the moment: the same
command is cut in the same way each time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from posttrain.algorithms import get_adv_estimator
from posttrain.config import PPOConfig
from posttrain.config.base import Section
from posttrain.config.schema import assign, lookup
from posttrain.doctor.memory import GIB, USABLE, Device, ModelCounter, Plan, shown
from posttrain.doctor.remedies import Levers

TOKENS = (12288, 8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512)
"""Budgets of a pass that are tried, below the default."""
KV_KEY = "actor_rollout_ref.rollout.kv_cache_gb"


def settle(config: Section, device: Device, explicit: set[str], levers: Levers, counter: ModelCounter) -> list[str]:
    """Set in `config` what the plan decides; gives a sentence on each."""
    if device.kind != "cuda":
        return []
    said = _settle_cache(config, device, levers, counter) if isinstance(config, PPOConfig) else []
    for key, stages in _budgets(config).items():
        if key not in explicit:
            said += _settle_tokens(config, key, stages, device, levers, counter)
    return said


def _settle_cache(config: PPOConfig, device: Device, levers: Levers, counter: ModelCounter) -> list[str]:
    """The native engine's cache may take what is left of the device while responses are generated."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "native" or rollout.kv_cache_gb is not None or rollout.gpu_memory_utilization is not None:
        return []
    plan = levers.plan(config, device, counter)
    left = USABLE * device.bytes - plan.peak("generate") + plan.stages["generate"]["KV cache"]
    if left <= 0:
        return []  # whatever it is, it does not fit: that is said below and by `posttrain plan`
    rollout.kv_cache_gb = int(100 * left / GIB) / 100
    if rollout.kv_cache_gb == 0:
        rollout.kv_cache_gb = left / GIB
    return [
        f"The key/value cache may take {shown(int(rollout.kv_cache_gb * GIB))} ({KV_KEY}; chosen by the memory plan)."
    ]


def _budgets(config: Any) -> dict[str, Sequence[str]]:
    """The settings of how many tokens meet in a pass, and the stages whose memory follows from each."""
    if not isinstance(config, PPOConfig):
        return {"data.max_token_len_per_gpu": ("validation", "update")}
    found: dict[str, Sequence[str]] = {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": ("log-probs", "update")}
    if get_adv_estimator(config.algorithm.adv_estimator).needs_critic:
        found["critic.ppo_max_token_len_per_gpu"] = ("log-probs", "critic update")
    return found


def _settle_tokens(
    config: Section, key: str, stages: Sequence[str], device: Device, levers: Levers, counter: ModelCounter
) -> list[str]:
    """The default where it fits, or else the most that do; a row is never cut: less than one changes nothing."""
    default = lookup(config, key)
    plan = levers.plan(config, device, counter)
    if _fit(plan, stages):
        return []
    least = plan.shape.longest * getattr(plan.shape, "together", 1)
    tried = [tokens for tokens in (*TOKENS, least) if least <= tokens < default]
    for tokens in sorted(set(tried), reverse=True):
        changed = copy.deepcopy(config)
        assign(changed, key, tokens)
        plan = levers.plan(changed, device, counter)
        if _fit(plan, stages):
            assign(config, key, tokens)
            return [f"{key} was not set: by the memory plan {tokens} tokens at once fit here, not the usual {default}."]
    worst = max((stage for stage in stages if stage in plan.stages), key=plan.peak)
    return [
        f"By the memory plan this run does not fit: {worst} would take {shown(plan.peak(worst))} of "
        f"{shown(int(USABLE * device.bytes))} usable even with one row at a time."
    ]


def _fit(plan: Plan, stages: Sequence[str]) -> bool:
    return all(plan.peak(stage) <= USABLE * plan.device.bytes for stage in stages if stage in plan.stages)

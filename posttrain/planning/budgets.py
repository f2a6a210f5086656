"""What the memory plan decides of a run on a CUDA device: how large its key/value cache may grow, and how many tokens
meet in one pass, where nobody has set them.

Both follow from the settings and from the memory that the device has, never from what is free at the moment: the same
command is cut in the same way each time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.algorithms import get_adv_estimator
from posttrain.config import PPOConfig
from posttrain.config.base import Section
from posttrain.config.engine_kwargs import OUTSIDE
from posttrain.config.schema import assign, lookup
from posttrain.engine.facts import joining_cost
from posttrain.planning import cuda_bytes
from posttrain.planning.memory_plan import GIB, USABLE, Device, Plan, Planner, shown
from posttrain.planning.rl import RLPlanner
from posttrain.planning.supervised import SupervisedPlanner

TOKENS = (12288, 8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512)
"""Budgets of a pass that are tried, below the default."""
KV_KEY, SHARE_KEY = (f"actor_rollout_ref.rollout.{name}" for name in ("kv_cache_gb", "gpu_memory_utilization"))
DOES_NOT_FIT = "By the memory plan this run does not fit"


def planner_for(config: Section) -> Planner:
    """A new planner for this kind of run."""
    return RLPlanner() if isinstance(config, PPOConfig) else SupervisedPlanner()


def apply_plan(config: Section, device: Device, explicit: set[str], planner: Planner) -> list[str]:
    """Set in `config` what the plan decides; gives a sentence on each."""
    if device.kind != "cuda":
        return []
    said = set_cache_size(config, device, planner.plan) if isinstance(config, PPOConfig) else []
    budgets = [([key for key in keys if key not in explicit], stages) for keys, stages in _budgets(config)]
    usual = {key: lookup(config, key) for keys, _ in budgets for key in keys}
    too_large = [_lower(config, keys, stages, device, planner) for keys, stages in budgets if keys]
    for key, default in usual.items():
        if (tokens := lookup(config, key)) != default:
            fitting = f"by the memory plan {tokens} tokens at once fit here, not the usual {default}"
            said.append(f"{key} was not set: {fitting}.")
    return [*said, *[sentence for sentence in too_large if sentence][:1]]


def set_cache_size(config: PPOConfig, device: Device, make_plan: Callable[[PPOConfig, Device], Plan]) -> list[str]:
    """The native engine's cache may take what is left of the device while responses are generated; vLLM and SGLang
    take it with their weights and passes."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.kv_cache_gb is not None or rollout.gpu_memory_utilization is not None:
        return []
    if rollout.name != "native" and rollout.name not in OUTSIDE:
        return []
    plan = make_plan(config, device)
    left = USABLE * device.bytes - plan.peak("generate") + plan.stages["generate"]["KV cache"]
    if left <= 0:
        return []  # whatever it is, it does not fit: that is said below and by `posttrain plan`
    if rollout.name in OUTSIDE:
        share = (left + plan.stages["generate"]["rollout weights"]) / device.bytes
        rollout.gpu_memory_utilization = max(int(100 * share), 1) / 100
        percent = f"{100 * rollout.gpu_memory_utilization:.0f}%"
        return [
            f"{OUTSIDE[rollout.name].title} may take {percent} of the device ({SHARE_KEY}; chosen by the memory plan)."
        ]
    rollout.kv_cache_gb = int(100 * left / GIB) / 100
    if rollout.kv_cache_gb == 0:
        rollout.kv_cache_gb = left / GIB
    return [
        f"The key/value cache may take {shown(int(rollout.kv_cache_gb * GIB))} ({KV_KEY}; chosen by the memory plan)."
    ]


def _budgets(config: Any) -> list[tuple[Sequence[str], Sequence[str]]]:
    """Settings of how many tokens meet in a pass, and the stages whose memory follows from them."""
    if not isinstance(config, PPOConfig):
        return [(("data.max_token_len_per_gpu",), ("validation", "update"))]
    actor, critic = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"
    if not get_adv_estimator(config.algorithm.adv_estimator).needs_critic:
        return [((actor,), ("log-probs", "update"))]
    return [((actor,), ("update",)), ((critic,), ("critic update",)), ((actor, critic), ("log-probs",))]


def _lower(config: Section, keys: Sequence[str], stages: Sequence[str], device: Device, planner: Planner) -> str:
    """Leave these budgets where the stages fit, or else lower them to the most that do; a row is never cut: less than
    one changes nothing. Gives the words for stages that do not fit whatever they are."""
    plan = planner.plan(config, device)
    if _fit(plan, stages, config, planner):
        return ""
    least, most = plan.shape.longest * getattr(plan.shape, "together", 1), max(lookup(config, key) for key in keys)
    for tokens in sorted({tokens for tokens in (*TOKENS, least) if least <= tokens < most}, reverse=True):
        changed = {key: min(tokens, lookup(config, key)) for key in keys}
        tried = copy.deepcopy(config)
        for key, value in changed.items():
            assign(tried, key, value)
        plan = planner.plan(tried, device)
        if _fit(plan, stages, tried, planner):
            for key, value in changed.items():
                assign(config, key, value)
            return ""
    worst = max((stage for stage in stages if stage in plan.stages), key=plan.peak)
    return (
        f"{DOES_NOT_FIT}: {worst} would take {shown(plan.peak(worst))} of "
        f"{shown(int(USABLE * device.bytes))} usable even with one row at a time."
    )


def _fit(plan: Plan, stages: Sequence[str], config: Any, planner: Planner) -> bool:
    """With passes that are as full as the budget allows: longest rows that share prompts leave a part of it empty,
    which shorter ones fill, and the trial before the first update shares none."""
    more = _fuller(config, plan, planner) - 1.0
    parts = [plan.stages[stage] for stage in stages if stage in plan.stages]
    needed = [sum(one.values()) + more * one.get("actor activations", 0) for one in parts]
    return all(size <= USABLE * plan.device.bytes for size in needed)


def _fuller(config: Any, plan: Plan, planner: Planner) -> float:
    """Tokens of the fullest pass of the actor over those that the plan counts."""
    sizes = planner.count(config, plan.device, "actor", cuda_bytes.sizes_of) if isinstance(config, PPOConfig) else None
    if sizes is None:
        return 1.0
    shape, actor = plan.shape, config.actor_rollout_ref.actor
    counted, _ = shape.packed_pass(actor, config.actor_rollout_ref.rollout.n, joining_cost(sizes.width))
    most = min(actor.ppo_max_token_len_per_gpu, shape.mini_rows * (shape.longest - 1))
    return max(1.0, most / counted)

"""What the memory plan decides of a run on a CUDA device, where it was left unset: the size of its KV cache, and the
tokens of a pass.

Both follow from the settings and from the device's memory, never from what is free at the moment: the same command must
be cut into the same passes each time, or its numbers would differ in their last bits.

Also the sizes of a step: prompts, responses and optimizer steps, fitted to the data, and as a sentence for the user.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.algorithms import get_adv_estimator
from posttrain.config.root import PPOConfig
from posttrain.config.schema import Section, assign, lookup
from posttrain.config.trainer import own_workers_of
from posttrain.engine.facts import joining_cost
from posttrain.errors import UserError
from posttrain.planning import cuda_bytes
from posttrain.planning.memory_plan import GIB, USABLE, Device, Plan, Planner, shown
from posttrain.planning.rl import RLPlanner
from posttrain.planning.supervised import SupervisedPlanner
from posttrain.rollout.engine_kwargs import OUTSIDE

# Token budgets that are tried, below the default. Few, because each costs a plan.
TOKENS = (12288, 8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512)
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
    """Give the native engine's KV cache what is left of the device while responses are generated. vLLM and SGLang get
    one share for cache, weights and working memory."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.kv_cache_gb is not None or rollout.gpu_memory_utilization is not None:
        return []
    if rollout.name != "native" and rollout.name not in OUTSIDE:
        return []
    plan = make_plan(config, device)
    left = USABLE * device.bytes - plan.peak("generate") + plan.stages["generate"]["KV cache"]
    if left <= 0:
        return []  # nothing fits: `_lower` and `posttrain plan` say so
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
    """(token budgets, the stages whose memory follows from them)."""
    if not isinstance(config, PPOConfig):
        return [(("data.max_token_len_per_gpu",), ("validation", "update"))]
    actor, critic = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"
    if not get_adv_estimator(config.algorithm.adv_estimator).needs_critic:
        return [((actor,), ("log-probs", "ref", "update"))]
    if "critic" in own_workers_of(config):
        return [((actor,), ("log-probs", "ref", "update")), ((critic,), ("values", "critic update"))]
    # Both models score in log-probs, so that its budgets are lowered together, after each fits its own update.
    return [
        ((actor,), ("ref", "update")),
        ((critic,), ("critic update",)),
        ((actor, critic), ("log-probs",)),
    ]


def _lower(config: Section, keys: Sequence[str], stages: Sequence[str], device: Device, planner: Planner) -> str:
    """Lower these budgets to the largest with which the stages fit. Gives the sentence for stages that never fit."""
    plan = planner.plan(config, device)
    if _fit(plan, stages, config, planner):
        return ""
    # A sequence is never cut: a budget below the longest one changes nothing.
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
    # The plan counts sequences of full length with shared prompts, which leave a part of the budget empty. Shorter
    # sequences fill it, and the trial before the first update shares nothing: so count a pass that is full.
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


class SizeError(UserError):
    """The sizes asked for do not fit the data."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of one run. `updates_per_step` are optimizer steps of the actor on one batch."""

    prompts: int
    responses: int
    mini_batch_prompts: int
    updates_per_step: int
    total_steps: int
    critic_warmup: int = 0  # steps at the start in which the actor is not updated

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the actor in the whole run."""
        return self.updates_per_step * max(0, self.total_steps - self.critic_warmup)

    def words(self) -> str:
        n = self.responses // self.prompts
        return (
            f"{self.total_steps} step{'s' * (self.total_steps != 1)}; each generates {self.prompts} prompts x {n} = "
            f"{self.responses} responses and "
            f"makes {self.updates_per_step} optimizer step{'s' * (self.updates_per_step != 1)} on mini-batches of "
            f"{self.mini_batch_words()}." + self._warmup_words()
        )

    def mini_batch_words(self) -> str:
        """Say how large a mini-batch is: `50 prompts (250 responses; the last has 22 prompts)`."""
        mini, last = self.mini_batch_prompts, self.prompts % self.mini_batch_prompts
        rest = f"; the last has {last} prompt{'s' * (last != 1)}" if last else ""
        return f"{mini} prompts ({mini * self.responses // self.prompts} responses{rest})"

    def _warmup_words(self) -> str:
        if not self.critic_warmup:
            return ""
        if self.critic_warmup >= self.total_steps:
            return f" The warm-up of the critic covers all {self.total_steps} steps: the actor never changes."
        first = "The first step trains" if self.critic_warmup == 1 else f"The first {self.critic_warmup} steps train"
        return f" {first} the critic only."


def fit_sizes(config: PPOConfig, explicit: set[str], rows: int, *, critic: bool = False) -> tuple[Sizes, list[str]]:
    """The sizes for `rows` training prompts; defaults that are too large are lowered in `config`, with a note.

    Only a run with a critic has a warm-up of it.
    """
    notes = []
    if config.data.train_batch_size > rows:
        if "data.train_batch_size" in explicit:
            raise SizeError(
                f"data.train_batch_size={config.data.train_batch_size}, but the training data has {rows} prompts; "
                f"set it to {rows} or less"
            )
        notes.append(
            f"data.train_batch_size was not set; its default {config.data.train_batch_size} is lowered to the {rows} "
            "prompts that there are."
        )
        config.data.train_batch_size = rows
    actor, prompts = config.actor_rollout_ref.actor, config.data.train_batch_size
    if actor.ppo_mini_batch_size > prompts:
        notes.append(f"ppo_mini_batch_size {actor.ppo_mini_batch_size} is lowered to the batch of {prompts} prompts.")
        actor.ppo_mini_batch_size = prompts
    per_epoch = rows // prompts
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * per_epoch
    updates = math.ceil(prompts / actor.ppo_mini_batch_size) * actor.ppo_epochs
    responses = prompts * config.actor_rollout_ref.rollout.n
    warmup = config.trainer.critic_warmup if critic else 0
    return Sizes(prompts, responses, actor.ppo_mini_batch_size, updates, total_steps, warmup), notes


def check_group_size(config: PPOConfig, explicit: set[str]) -> None:
    """A user's own estimator that compares a group needs one; the built-in ones are checked with the configuration."""
    if config.actor_rollout_ref.rollout.n == 1:
        where = "was set to 1" if "actor_rollout_ref.rollout.n" in explicit else "is 1 by default"
        raise SizeError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares the responses to one prompt, but "
            f"actor_rollout_ref.rollout.n {where}; set actor_rollout_ref.rollout.n=5 (5 to 8 is usual)"
        )


def count_steps(config: Any, rows: int) -> tuple[int, int]:
    """Of a supervised run: (rows per step, steps); the last batch of an epoch holds the rows that are left."""
    batch = min(config.data.train_batch_size, rows)
    return batch, config.trainer.total_training_steps or config.trainer.total_epochs * -(-rows // batch)


def critic_updates(config: PPOConfig, sizes: Sizes) -> int:
    """Optimizer steps of the critic in the whole run."""
    mini = config.critic.ppo_mini_batch_size or sizes.mini_batch_prompts
    epochs = config.critic.ppo_epochs or config.actor_rollout_ref.actor.ppo_epochs
    return math.ceil(sizes.prompts / mini) * epochs * sizes.total_steps

"""The memory plan in a run: what it decides before models are loaded, and what it knows when memory ran out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.controller.incidents import WorkerDied
from posttrain.controller.pool import Workers
from posttrain.errors import first_line
from posttrain.tracking.progress import say

# Stages of a run -> those of the plan.
PLANNED = {
    "load": "load",
    **dict.fromkeys(("gen", "greedy", "validation", "sync"), "generate"),
    "reward_model": "reward model",
    **dict.fromkeys(("old_log_prob", "ref", "values", "sum_pi_squared"), "log-probs"),
    "check": "update",
    "update_actor": "update",
    "update": "update",
    "update_critic": "critic update",
}
TENANTS, REMEDIES = 4, 4  # named when memory ran out
# Of a run on a GPU, whose memory alone the plan counts.
HOST = (
    "This is the host's memory, not the GPU's (`free -g` shows it). There lie what settings move off the GPU "
    "(param_offload, optimizer_offload), reward workers (reward.num_workers), and the model while it is read; "
    "each worker of a machine (trainer.n_gpus_per_node) has its own."
)
_STAGE = "stage_of_the_run"  # of an error
_stages: list[str] = []  # that the run's main thread is in, the innermost last


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device, or of the host: torch has no error of its own for that."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
    )


@contextmanager
def named_stage(name: str) -> Iterator[None]:
    """Inside, errors of memory and lost workers are noted to have happened in this stage; the innermost name counts."""
    _stages.append(name)
    try:
        yield
    except (MemoryError, RuntimeError, WorkerDied) as error:
        if is_out_of_memory(error) or isinstance(error, WorkerDied):
            note_stage(error)
        raise
    finally:
        _stages.pop()


def note_stage(error: BaseException) -> None:
    """The error happened in the stage that the run is in, unless it is noted already."""
    if stage_of(error) is None and _stages:
        setattr(error, _STAGE, _stages[-1])


def stage_of(error: BaseException) -> str | None:
    """The stage that `named_stage` has noted."""
    return getattr(error, _STAGE, None)


def explain_out_of_memory(config: Any, error: BaseException) -> str:
    """The stage, its largest consumers of memory by the plan, and the settings that lower it."""
    stage = stage_of(error)
    lines = [f"Out of memory{f' in the stage {stage}' if stage else ''}: {first_line(error)}"]
    try:
        lines += _advice_by_plan(config, stage, of_host=not isinstance(error, torch.OutOfMemoryError))
    except Exception as failed:  # what ended the run matters more
        lines.append(f"No memory plan could be made ({first_line(failed)}); `posttrain plan` takes the same settings.")
    return "\n  ".join(lines)


def _advice_by_plan(config: Any, stage: str | None, *, of_host: bool) -> list[str]:
    from posttrain.planning.budgets import planner_for
    from posttrain.planning.memory_plan import find_device, find_remedies, shown

    device = find_device(config)
    if of_host and device.kind == "cuda":
        return [HOST]
    planner = planner_for(config)
    plan = planner.plan(config, device)
    # Stages of a supervised run have the plan's own names; those of RL are translated.
    planned = stage if stage in plan.stages else PLANNED.get(stage or "")
    stage = planned if planned in plan.stages else plan.worst
    parts = sorted(plan.stages[stage].items(), key=lambda part: -part[1])[:TENANTS]
    named = ", ".join(f"{part} {shown(size)}" for part, size in parts if size)
    lines = [f"The largest in {stage} by the memory plan: {named}; all together {shown(plan.peak(stage))}."]
    if plan.peak(stage) < plan.device.bytes / 2:
        lines.append(f"That is little of {plan.device.words}: does another process hold the rest?")
    remedies = [r for r in find_remedies(config, plan, planner, stage) if r.stage == stage and r.saves > 0]
    if not remedies:
        return [*lines, "No setting lowers it: take a smaller model, or more workers (trainer.n_gpus_per_node)."]
    return [*lines, "What lowers it, with the present values:", *(f"  {r.words()}" for r in remedies[:REMEDIES])]


def plan_memory(config: Any, device: torch.device, explicit: set[str], workers: Workers | None = None) -> None:
    """On a CUDA device: set the cache's size and the tokens of a pass as the plan says, where they were left unset.
    A driver without GPUs plans for those of its `workers`."""
    if device.type != "cuda":
        return
    from posttrain.planning.budgets import DOES_NOT_FIT, apply_plan, planner_for
    from posttrain.planning.memory_plan import find_device, gpu_elsewhere

    try:
        there = None if workers is None or torch.cuda.is_available() else workers.gpu()
        found = gpu_elsewhere(*there) if there else find_device(config)
        sentences = apply_plan(config, found, explicit, planner_for(config))
    except Exception as error:  # a model whose code cannot be counted is no reason not to train it
        say(f"note: No memory plan could be made, so that defaults stay as they are: {first_line(error)}")
        return
    for sentence in sentences:
        say(sentence)
    if any(sentence.startswith(DOES_NOT_FIT) for sentence in sentences):
        say("It is tried nevertheless; `posttrain plan` with the same settings says what lowers it.")

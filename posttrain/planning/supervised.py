"""Memory of a supervised run (SFT, reward model) by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from posttrain.config.supervised import RewardTrainerConfig, SFTConfig
from posttrain.models.loading import resolve_dtype
from posttrain.planning import counting, cuda_bytes, megatron_ranks, meta_models
from posttrain.planning.counting import ModelBytes
from posttrain.planning.memory_plan import (
    Device,
    Plan,
    Planner,
    add_workspaces,
    backward_parts,
    place,
    settings_of_weights,
    step_parts,
)

SupervisedConfig = SFTConfig | RewardTrainerConfig
ROLE = "model"


@dataclass(frozen=True)
class RowShape:
    """Sequences ("rows" of a batch) and tokens that meet in one worker's memory."""

    workers: int
    longest: int
    together: int  # sequences that are always computed in one pass: the two of a pair
    batch_rows: int  # of an optimizer step
    pass_rows: int  # sequences of full length in the largest pass

    @classmethod
    def of(cls, config: SupervisedConfig, sharing: int = 1) -> RowShape:
        """`sharing` workers compute the same rows."""
        data, together = config.data, 2 if isinstance(config, RewardTrainerConfig) else 1
        workers = config.trainer.n_gpus_per_node * config.trainer.nnodes
        units = math.ceil(data.train_batch_size / max(1, workers // sharing))
        most = min(units, data.micro_batch_size_per_gpu or units)
        in_budget = data.max_token_len_per_gpu // (together * data.max_length)
        passed = max(1, min(most, in_budget))
        return cls(workers, data.max_length, together, units * together, passed * together)


def _fewer_tokens(value: int, plan: Plan) -> int:
    """Half of the tokens that a pass really has, which may be fewer than the budget; one sequence (or pair) stays."""
    shape: RowShape = plan.shape
    used = min(value, shape.pass_rows * shape.longest)
    return max(shape.together * shape.longest, used // 2)


class SupervisedPlanner(Planner):
    """Of `posttrain sft` and `posttrain reward-model`: one model."""

    lower: ClassVar = {
        "model.enable_gradient_checkpointing": lambda value, plan: True,
        "data.max_token_len_per_gpu": _fewer_tokens,
        "model.lora_rank": lambda value, plan: value or 16,
        "data.max_length": lambda value, plan: None if value < 2 else value // 2,
    }
    always_named = ("model.enable_gradient_checkpointing", "data.max_token_len_per_gpu", "model.lora_rank")

    def identity(self, config: SupervisedConfig) -> tuple[Any, ...]:
        return (type(config), settings_of_weights(config.model))

    def build(self, config: SupervisedConfig, device: Device, role: str) -> torch.nn.Module:
        dtype = resolve_dtype(config.model.dtype, torch.device(device.kind))
        make = meta_models.pair_model if isinstance(config, RewardTrainerConfig) else meta_models.actor_model
        return make(config.model, dtype)

    def plan(self, config: SupervisedConfig, device: Device) -> Plan:
        cuts, count = self.cuts(config, ROLE), partial(self.count, config, device, ROLE)
        shape = RowShape.of(config, cuts.together if cuts else 1)
        plan = Plan(device, shape, {"load": {}})
        held, whole = self.held(config, device, ROLE, shape.workers), count(ModelBytes.of)
        plan.saved = 3 * held.gradients
        unpacked = count(counting.unpacked_bytes)  # a pass holds one 4-bit matrix in model.dtype
        size, tokens = (shape.pass_rows, shape.longest), shape.pass_rows * shape.longest
        sizes = count(cuda_bytes.sizes_of) if device.kind == "cuda" else None
        memory = device.bytes if device.kind == "cuda" else None
        if config.data.val_files is not None:
            if cuts is not None:
                peak = count(megatron_ranks.scoring_bytes, cuts, tokens, tokens, memory)
            elif sizes is not None:
                peak = cuda_bytes.scoring_bytes(sizes, tokens, tokens, device.bytes)
            else:
                peak = count(counting.scoring_peak, *size, device.kind)
            plan.stages["validation"] = {"temporary tensors": peak + unpacked}
        checkpointing = config.model.enable_gradient_checkpointing
        if cuts is not None:
            passes = math.ceil(shape.batch_rows / shape.pass_rows)
            counted = count(megatron_ranks.update_bytes, cuts, tokens, tokens, passes, bool(checkpointing), memory)
        elif sizes is not None:
            alone = shape.workers == 1
            counted = cuda_bytes.update_bytes(sizes, tokens, tokens, bool(checkpointing), device.bytes, alone=alone)
        else:
            counted = count(counting.training_bytes, *size, checkpointing, device.kind)
        single = shape.pass_rows == shape.batch_rows
        plan.stages["update"] = backward_parts(ROLE, counted, held, device, single=single, workers=shape.workers)
        plan.stages["update"]["temporary tensors"] += unpacked
        plan.stages["step"] = step_parts(ROLE, device, held)
        place(plan, f"{ROLE} weights", held.weights, None)
        place(plan, f"{ROLE} optimizer", held.optimizer, None)
        joined = 0 if cuts else max(0, count(counting.joined_bytes) - whole.masters)
        plan.stages["load"] |= {f"{ROLE} optimizer": held.masters, "temporary tensors": joined}
        add_workspaces(plan)
        return plan

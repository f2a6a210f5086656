"""`posttrain plan`: memory of an RL run by role and stage, before it starts and without its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.algorithms import get_adv_estimator
from posttrain.config import PPOConfig, needs_reference
from posttrain.config.engine_kwargs import OUTSIDE, longest_row
from posttrain.config.parallel import rollout_workers_of, workers_of
from posttrain.doctor import counting, meta_models, on_cuda
from posttrain.doctor.counting import ModelBytes
from posttrain.doctor.memory import (
    Device,
    ModelCounter,
    Parts,
    Plan,
    add_workspaces,
    backward_parts,
    place,
    step_parts,
    without_passes,
)
from posttrain.engine.facts import joining_cost
from posttrain.kernels.decode import BLOCK
from posttrain.models.loading import resolve_dtype
from posttrain.rollout.base import Sampling
from posttrain.rollout.native.build import cache_limit, step_limit
from posttrain.rollout.native.engine import MANY
from posttrain.rollout.native.pool import KEPT_SHARE, blocks_for, with_slack
from posttrain.rollout.outside import allowed_cache

CAPTURED = "captured steps"
OF_THE_ROLLOUT = ("rollout weights", "KV cache", CAPTURED)


@dataclass(frozen=True)
class Shape:
    """Rows and tokens that meet in one worker's memory."""

    workers: int
    longest: int
    prompt: int
    batch_rows: int
    mini_rows: int
    wave: int
    """Responses decoded side by side."""
    prefill: int
    """Prompts computed at once: the distinct ones of a wave."""
    generating: int = 0
    """Workers that only generate; 0 where the others do."""

    @classmethod
    def of(cls, config: PPOConfig) -> Shape:
        data, rollout = config.data, config.actor_rollout_ref.rollout
        workers, generating = workers_of(config), rollout_workers_of(config)
        mini = min(config.actor_rollout_ref.actor.ppo_mini_batch_size, data.train_batch_size)
        batch_rows = math.ceil(data.train_batch_size * rollout.n / workers)
        engines = max(1, (generating or workers) // rollout.tensor_model_parallel_size)
        wave = min(rollout.max_num_seqs, math.ceil(data.train_batch_size * rollout.n / engines))
        longest = data.max_prompt_length + data.max_response_length
        mini_rows = math.ceil(mini * rollout.n / workers)
        prefill = math.ceil(wave / rollout.n)
        return cls(workers, longest, data.max_prompt_length, batch_rows, mini_rows, wave, prefill, generating)

    def micro_rows(self, role: Any) -> int:
        """Longest rows in one forward pass of the actor or the critic."""
        most = min(self.mini_rows, role.ppo_micro_batch_size_per_gpu or self.mini_rows)
        return max(1, min(most, role.ppo_max_token_len_per_gpu // self.longest))

    def packed_pass(self, role: Any, n: int, joining: float) -> tuple[int, int]:
        """(tokens, log-probs) of the largest packed pass over longest rows: as many as the budget holds, `n` responses
        with their prompt once where that pays (`engine/pass_plan.py`). The last token of a row predicts nothing."""
        response, most = self.longest - self.prompt, role.ppo_micro_batch_size_per_gpu or self.mini_rows
        fitting = (role.ppo_max_token_len_per_gpu - self.prompt) // max(1, response - 1)
        group = max(1, min(n, most, self.mini_rows, fitting))
        together, apart = self.prompt + group * (response - 1), self.longest - 1
        shared = group > 1 and together * (1 + joining) <= group * apart
        unit, rows = (together, group) if shared else (apart, 1)
        count = max(1, min(role.ppo_max_token_len_per_gpu // unit, min(most, self.mini_rows) // rows))
        return count * unit, count * rows * response


class Counter(ModelCounter):
    """The models of an RL run."""

    model_section = "actor_rollout_ref.model"

    def identity(self, config: PPOConfig) -> tuple[Any, ...]:
        others = (repr(config.critic.model.to_dict()), repr(config.reward_model.model))
        return (without_passes(config.actor_rollout_ref.model), *others)

    def build(self, config: PPOConfig, device: Device, role: str) -> torch.nn.Module:
        settings = config.actor_rollout_ref.model
        dtype = resolve_dtype(settings.dtype, torch.device(device.kind))
        if role == "actor":
            return meta_models.actor_model(settings, dtype)
        if role == "reference":
            return meta_models.meta_model(settings, dtype)
        if role == "reward model":
            own = config.reward_model.model
            return meta_models.meta_scorer(own, resolve_dtype(own.dtype, torch.device(device.kind)))
        return meta_models.critic_model(config, dtype)


def plan_memory(config: PPOConfig, device: Device, counter: Counter | None = None) -> Plan:
    """The plan of this configuration on that device."""
    counter = counter or Counter()
    plan = Plan(device, Shape.of(config))
    critic = get_adv_estimator(config.algorithm.adv_estimator).needs_critic
    roles = {"actor": config.actor_rollout_ref.actor} | ({"critic": config.critic} if critic else {})
    held = {role: counter(config, device, role, ModelBytes.of) for role in roles}
    plan.stages["load"] = {}
    plan.stages["generate"] = _generate(config, device, plan.shape, counter, held["actor"])
    if config.reward_model.enable:
        plan.stages["reward model"] = {"temporary tensors": _rewarding(config, device, plan.shape, counter)}
    plan.stages["log-probs"] = {"temporary tensors": _scoring(config, device, plan.shape, counter, roles)}
    for role in reversed(roles):  # the critic is updated first
        name = "update" if role == "actor" else "critic update"
        plan.stages[name] = _backward(config, device, plan.shape, counter, role, roles[role], held[role])
        plan.stages[f"{name.removesuffix('update')}step".strip()] = step_parts(
            role, device, held[role], workers=plan.shape.workers
        )
    _stay(plan, config.actor_rollout_ref.rollout.name)
    _add_unpacked(plan, {role: counter(config, device, role, counting.unpacked_bytes) for role in roles})
    for role, settings in roles.items():
        offload, bytes_ = settings.fsdp_config, held[role]
        # The actor's weights are used in every stage: they generate, score and are updated.
        moves = offload.param_offload and role == "critic"
        own = ("log-probs", "critic update", "critic step") if role == "critic" else ("update", "step")
        place(plan, f"{role} weights", bytes_.weights, own if moves else None)
        place(plan, f"{role} optimizer", bytes_.optimizer, own[-2:] if offload.optimizer_offload else None)
    if needs_reference(config) and config.actor_rollout_ref.model.lora_rank == 0:
        moves = config.actor_rollout_ref.ref.fsdp_config.param_offload
        weights = counter(config, device, "reference", ModelBytes.of).weights
        place(plan, "reference weights", weights, ("log-probs",) if moves else None)
    if config.reward_model.enable:
        moves = config.reward_model.fsdp_config.param_offload
        weights = counter(config, device, "reward model", ModelBytes.of).weights
        place(plan, "reward model weights", weights, ("reward model",) if moves else None)
    _before_the_first_step(plan, held, counter(config, device, "actor", counting.joined_bytes))
    if plan.shape.generating:
        size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        _part_devices(plan, math.ceil(held["actor"].weights / size))
    add_workspaces(plan)
    return plan


def plan_generation(config: PPOConfig, device: Device, counter: Counter | None = None) -> Plan:
    """Of a model that only generates, with nothing beside it: `posttrain generate` and `posttrain eval`."""
    counter = counter or Counter()
    held = counter(config, device, "actor", ModelBytes.of)
    plan = Plan(device, Shape.of(config))
    plan.stages["generate"] = _generate(config, device, plan.shape, counter, held)
    _add_unpacked(plan, {"actor": counter(config, device, "actor", counting.unpacked_bytes)})
    place(plan, "actor weights", held.weights, None)
    add_workspaces(plan)
    return plan


def _part_devices(plan: Plan, weights: int) -> None:
    """Other workers generate than train: the stage `generate` is of their device, all others of those that train."""
    for name, parts in plan.stages.items():
        for part in [part for part in parts if (part in OF_THE_ROLLOUT) != (name == "generate")]:
            if part != "temporary tensors":
                del parts[part]
    plan.stages["generate"]["rollout weights"] += weights


def _before_the_first_step(plan: Plan, held: dict[str, ModelBytes], joined: int) -> None:
    """While models are loaded: all weights and masters are made on the device, also those that are moved away then.
    Before the actor's masters are made its matrices are joined; moments come with the first step."""
    weights = {part: plan.largest(part) for part in plan.stages["update"] if part.endswith(" weights")}
    masters = {f"{role} optimizer": math.ceil(one.masters / plan.shape.workers) for role, one in held.items()}
    room = {"temporary tensors": max(0, joined - held["actor"].masters)}
    plan.stages["load"] = {**weights, "rollout weights": plan.largest("rollout weights"), **masters, **room}


def _add_unpacked(plan: Plan, by_role: dict[str, int]) -> None:
    """The passes over a 4-bit base hold one of its matrices unpacked."""
    users = {"generate": ["actor"], "log-probs": list(by_role), "update": ["actor"], "critic update": ["critic"]}
    for name in plan.stages.keys() & users.keys():
        plan.stages[name]["temporary tensors"] += max(by_role[role] for role in users[name])


def _generate(config: PPOConfig, device: Device, shape: Shape, counter: Counter, actor: ModelBytes) -> Parts:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "native":
        return _generate_native(config, device, shape, counter, actor)
    serving = rollout.name != "hf"
    copies = (serving or shape.workers > 1) and not shape.generating
    copy = math.ceil(actor.weights / rollout.tensor_model_parallel_size) if copies else 0
    per_token = counter(config, device, "actor", counting.cache_bytes_per_token)
    cache = shape.wave * shape.longest * per_token
    if serving:  # the engine takes its share of the device at once, working memory included
        if rollout.name in OUTSIDE and (rollout.kv_cache_gb is not None or device.kind == "cpu"):
            longest = longest_row(rollout.name, rollout.engine_kwargs, shape.longest) + 1
            cache = allowed_cache(rollout, device.kind, device.bytes, longest, per_token)
            temporary = _step_peak(config, device, shape, counter)
            return {"rollout weights": copy, "KV cache": cache, "temporary tensors": temporary}
        if rollout.gpu_memory_utilization is not None:
            held = copy or actor.weights  # workers that only generate have none but these
            cache = max(0, int(rollout.gpu_memory_utilization * device.bytes) - held)
        return {"rollout weights": copy, "KV cache": cache, "temporary tensors": 0}
    prefill = counter(config, device, "actor", counting.prefill_peak, shape.prefill, shape.prompt)
    decode = counter(config, device, "actor", counting.decode_peak, shape.wave, shape.longest, _sampling(config))
    # In the prefill most of the cache is not there yet.
    return {"rollout weights": copy, "KV cache": cache, "temporary tensors": max(prefill - cache, decode)}


def _generate_native(config: PPOConfig, device: Device, shape: Shape, counter: Counter, actor: ModelBytes) -> Parts:
    """The cache in whole blocks: a prompt's once, a response's for each. One worker's weights are the trainer's own; of
    those that hold an engine together each has its part of weights and cache."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    per_token = counter(config, device, "actor", counting.cache_bytes_per_token, size)
    blocks = shape.prefill * blocks_for(shape.prompt) + shape.wave * blocks_for(data.max_response_length)
    cache = min(with_slack(blocks) * BLOCK * per_token, cache_limit(rollout, device.kind, device.bytes))
    tokens = _step_tokens(config, device, shape)
    temporary = _step_peak(config, device, shape, counter)
    captured = 0
    if device.kind == "cuda":
        sizes = counter(config, device, "actor", on_cuda.sizes_of)
        if sizes is not None:
            if size == 1:
                captured = on_cuda.captured_bytes(sizes, shape.wave, shape.longest, hopper=device.hopper)
            temporary = on_cuda.prefill_bytes(sizes, tokens, shape.prefill)
        else:  # without a kernel of its own a layer's keys and values are gathered for each step
            layers = counter(config, device, "actor", counting.layer_count)
            temporary += 2 * shape.wave * shape.longest * per_token // layers
    copies = math.ceil(actor.weights / size) if shape.workers > 1 and not shape.generating else 0
    if size == 1 and device.kind == "cpu" and data.max_response_length >= MANY:
        copies = counter(config, device, "actor", counting.packed_bytes)
    made = {"rollout weights": copies, "KV cache": cache, "temporary tensors": temporary}
    return made | ({CAPTURED: captured} if captured else {})


def _step_tokens(config: PPOConfig, device: Device, shape: Shape) -> int:
    """Tokens that meet in one step of an engine."""
    limit = step_limit(config.actor_rollout_ref.rollout, device.kind)
    return max(shape.wave, min(limit, shape.prefill * shape.prompt))


def _step_peak(config: PPOConfig, device: Device, shape: Shape, counter: Counter) -> int:
    sizes = (_step_tokens(config, device, shape), shape.wave)
    return counter(config, device, "actor", counting.native_step_peak, *sizes, _sampling(config))


def _stay(plan: Plan, engine: str) -> None:
    """What the engine keeps while it sleeps: one of another package its weights on a CPU; `native` on a CUDA
    device captured steps, and a cache of up to an eighth of it."""
    generate = plan.stages["generate"]
    if engine in OUTSIDE and plan.device.kind == "cpu":
        for parts in plan.stages.values():
            parts["rollout weights"] = generate["rollout weights"]
    if CAPTURED not in generate:
        return
    staying = {CAPTURED: generate[CAPTURED]}
    if generate["KV cache"] <= plan.device.bytes * KEPT_SHARE:
        staying["KV cache"] = generate["KV cache"]
    for name, parts in plan.stages.items():
        if name != "generate":
            parts |= staying


def _sampling(config: PPOConfig) -> Sampling:
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        max_tokens=config.data.max_response_length,
        temperature=rollout.temperature or 1.0,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
    )


def _scoring(config: PPOConfig, device: Device, shape: Shape, counter: Counter, roles: dict[str, Any]) -> int:
    n = config.actor_rollout_ref.rollout.n

    def peak(role: str, rows: int) -> int:
        sizes = counter(config, device, role, on_cuda.sizes_of) if device.kind == "cuda" else None
        if sizes is not None:
            passed = shape.packed_pass(roles[role], n, joining_cost(sizes.width))
            return on_cuda.scoring_bytes(sizes, *passed, device.bytes)
        return counter(config, device, role, counting.scoring_peak, rows, shape.longest, device.kind)

    return max(peak(role, shape.micro_rows(settings)) for role, settings in roles.items())


def _rewarding(config: PPOConfig, device: Device, shape: Shape, counter: Counter) -> int:
    """The largest pass of the reward model; its tokenizer is taken to need as many tokens as the policy's."""
    settings = config.reward_model
    longest = min(shape.longest, settings.max_length or shape.longest)
    rows = min(shape.batch_rows, settings.micro_batch_size_per_gpu or shape.batch_rows)
    rows = max(1, min(rows, settings.forward_max_token_len_per_gpu // longest))
    return counter(config, device, "reward model", counting.rewarding_peak, rows, longest)


def _backward(
    config: PPOConfig, device: Device, shape: Shape, counter: Counter, role: str, settings: Any, held: ModelBytes
) -> Parts:
    rows, checkpointing = shape.micro_rows(settings), config.actor_rollout_ref.model.enable_gradient_checkpointing
    if role == "critic" and config.critic.model.enable_gradient_checkpointing is not None:
        checkpointing = config.critic.model.enable_gradient_checkpointing
    sizes = counter(config, device, role, on_cuda.sizes_of) if device.kind == "cuda" else None
    if sizes is not None:
        passed = shape.packed_pass(settings, config.actor_rollout_ref.rollout.n, joining_cost(sizes.width))
        alone = shape.workers == 1
        counted = on_cuda.update_bytes(sizes, *passed, bool(checkpointing), device.bytes, alone=alone)
    else:
        how = (rows, shape.longest, checkpointing, device.kind)
        counted = counter(config, device, role, counting.training_bytes, *how)
    return backward_parts(role, counted, held, device, single=rows == shape.mini_rows, workers=shape.workers)

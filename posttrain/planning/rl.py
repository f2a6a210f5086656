"""Memory of an RL run by role and stage, before it starts and without its weights.

Everything is planned for the worst case: prompts and responses of full length, and as many of them as the settings
allow at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.algorithms import get_adv_estimator
from posttrain.config import PPOConfig, needs_reference
from posttrain.config.trainer import ROLES, generating_workers_of, own_workers_of, rollout_workers_of, workers_of
from posttrain.engine.facts import joining_cost
from posttrain.kernels.decode import BLOCK
from posttrain.models.loading import resolve_dtype
from posttrain.models.recurrent import state_bytes
from posttrain.planning import counting, cuda_bytes, megatron_ranks, meta_models
from posttrain.planning.counting import ModelBytes
from posttrain.planning.memory_plan import (
    Device,
    Parts,
    Plan,
    Planner,
    add_workspaces,
    backward_parts,
    place,
    settings_of_weights,
    step_parts,
)
from posttrain.rollout.base import Sampling
from posttrain.rollout.engine_kwargs import OUTSIDE, longest_row
from posttrain.rollout.native.build import bytes_per_token, cache_limit, step_limit
from posttrain.rollout.native.engine import MANY
from posttrain.rollout.native.pool import KEPT_SHARE, blocks_for, with_slack
from posttrain.rollout.outside import allowed_cache

CAPTURED = "captured steps"
OF_THE_ROLLOUT = ("rollout weights", "KV cache", CAPTURED)
# Stages of roles that have workers of their own -> the role; "values" and "ref" are parts of "log-probs" otherwise.
STAGES_APART = {
    "generate": "rollout",
    "reward model": "reward_model",
    "ref": "reference",
    "values": "critic",
    "critic update": "critic",
    "critic step": "critic",
}


@dataclass(frozen=True)
class Shape:
    """Sequences ("rows" of a batch) and tokens that meet in one worker's memory."""

    workers: int
    longest: int
    prompt: int
    batch_rows: int
    mini_rows: int
    wave: int  # responses decoded at once: `max_num_seqs`, or all of an engine's share of the batch
    prefill: int  # prompts computed at once: the distinct ones of a wave
    generating: int = 0  # workers that only generate; 0 where the others do

    @classmethod
    def of(cls, config: PPOConfig, together: int = 1, workers: int | None = None) -> Shape:
        """`together` workers compute the same rows; `workers` are those of a role that has its own."""
        data, rollout = config.data, config.actor_rollout_ref.rollout
        workers, generating = workers or workers_of(config), rollout_workers_of(config)
        copies = max(1, workers // together)
        mini = min(config.actor_rollout_ref.actor.ppo_mini_batch_size, data.train_batch_size)
        batch_rows = math.ceil(data.train_batch_size * rollout.n / copies)
        engines = max(1, generating_workers_of(config) // rollout.engine_size)
        wave = min(rollout.max_num_seqs, math.ceil(data.train_batch_size * rollout.n / engines))
        longest = data.max_prompt_length + data.max_response_length
        mini_rows = math.ceil(mini * rollout.n / copies)
        prefill = math.ceil(wave / rollout.n)
        return cls(workers, longest, data.max_prompt_length, batch_rows, mini_rows, wave, prefill, generating)

    def micro_rows(self, role: Any) -> int:
        """Sequences of full length in one forward pass of the actor or the critic."""
        most = min(self.mini_rows, role.ppo_micro_batch_size_per_gpu or self.mini_rows)
        return max(1, min(most, role.ppo_max_token_len_per_gpu // self.longest))

    def packed_pass(self, role: Any, n: int, joining: float) -> tuple[int, int]:
        """(tokens, log-probs) of the largest packed pass over sequences of full length: as many as the budget holds.

        `n` responses share one copy of their prompt where that pays, as in `engine/packing.py`.
        """
        response, most = self.longest - self.prompt, role.ppo_micro_batch_size_per_gpu or self.mini_rows
        fitting = (role.ppo_max_token_len_per_gpu - self.prompt) // max(1, response - 1)
        group = max(1, min(n, most, self.mini_rows, fitting))
        # The last token of a sequence predicts nothing, so it is not computed.
        together, apart = self.prompt + group * (response - 1), self.longest - 1
        # Attention over a shared prompt costs `joining` more per token: sharing must save more than that.
        shared = group > 1 and together * (1 + joining) <= group * apart
        unit, rows = (together, group) if shared else (apart, 1)
        count = max(1, min(role.ppo_max_token_len_per_gpu // unit, min(most, self.mini_rows) // rows))
        return count * unit, count * rows * response


_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def _fewer_tokens(value: int, plan: Plan) -> int:
    return max(plan.shape.longest, value // 2)  # one sequence always fits


def _on(value: bool, plan: Plan) -> bool:
    return True


_LOWER: dict[str, Callable[[Any, Plan], Any]] = {
    f"{_MODEL}.enable_gradient_checkpointing": _on,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": _fewer_tokens,
    f"{_MODEL}.lora_rank": lambda value, plan: value or 16,
    f"{_ACTOR}.fsdp_config.optimizer_offload": _on,
    "actor_rollout_ref.ref.fsdp_config.param_offload": _on,
    f"{_ROLLOUT}.n": lambda value, plan: max(2, value // 2) if value > 1 else None,
    f"{_ROLLOUT}.max_num_seqs": lambda value, plan: max(1, plan.shape.wave // 2),
    f"{_ROLLOUT}.kv_cache_gb": lambda value, plan: None if value is None else round(value / 2, 2),
    f"{_ROLLOUT}.gpu_memory_utilization": lambda value, plan: None if value is None else round(value * 0.75, 3),
    "data.max_response_length": lambda value, plan: None if value < 2 else value // 2,
    "reward_model.fsdp_config.param_offload": _on,
    "reward_model.forward_max_token_len_per_gpu": _fewer_tokens,
    "critic.ppo_max_token_len_per_gpu": _fewer_tokens,
    "critic.fsdp_config.param_offload": _on,
    "critic.fsdp_config.optimizer_offload": _on,
}


class RLPlanner(Planner):
    """Of PPO, GRPO and their family."""

    lower = _LOWER
    always_named = (f"{_ROLLOUT}.gpu_memory_utilization", f"{_ROLLOUT}.n", f"{_MODEL}.enable_gradient_checkpointing")

    def plan(self, config: PPOConfig, device: Device) -> Plan:
        run, own = _Run(config, device, self), own_workers_of(config)
        # Of a role with workers of its own the sizes of its passes, and its share of a model, follow from their number.
        apart = {role: _Run(config, device, self, workers) for role, workers in own.items() if role != "rollout"}
        plan = Plan(device, run.shape)
        critic = get_adv_estimator(config.algorithm.adv_estimator).needs_critic
        roles = {"actor": config.actor_rollout_ref.actor} | ({"critic": config.critic} if critic else {})
        held = {role: apart.get(role, run).held(role) for role in roles}
        saved = [3 * one.gradients for one in held.values()]
        plan.saved = max(saved) if "critic" in apart else sum(saved)
        whole = run.count("actor", ModelBytes.of)
        plan.stages["load"] = {}
        plan.stages["generate"] = run.generate(whole)
        if config.reward_model.enable:
            peak = apart.get("reward_model", run).reward_model_peak()
            plan.stages["reward model"] = {"temporary tensors": peak}
        scoring = max(run.log_probs_peak(role, settings) for role, settings in roles.items() if role not in apart)
        plan.stages["log-probs"] = {"temporary tensors": scoring}
        if "reference" in apart:
            peak = apart["reference"].log_probs_peak("actor", roles["actor"])
            plan.stages["ref"] = {"temporary tensors": peak}
        if "critic" in apart:
            plan.stages["values"] = {"temporary tensors": apart["critic"].log_probs_peak("critic", roles["critic"])}
        for role in reversed(roles):  # the critic is updated first
            prefix = "" if role == "actor" else "critic "
            plan.stages[f"{prefix}update"] = apart.get(role, run).update(role, roles[role], held[role])
            plan.stages[f"{prefix}step"] = step_parts(role, device, held[role])
        if (copies := run.fp8_base()) > 0:
            place(plan, "actor fp8 copies", copies, None)
        _keep_while_asleep(plan, config.actor_rollout_ref.rollout.name, run.fp8_copies())
        _add_unpacked(plan, {role: run.count(role, counting.unpacked_bytes) for role in roles})
        self._place_models(plan, apart.get("reference", run), roles, held)
        joined = 0 if run.sizes else run.count("actor", counting.joined_bytes) - whole.masters
        _plan_loading(plan, held, max(0, joined))
        _separate_devices(plan, own)
        if run.shape.generating:
            plan.stages["generate"]["rollout weights"] += run.engine_part(whole)
        add_workspaces(plan)
        return plan

    @staticmethod
    def _place_models(plan: Plan, run: _Run, roles: dict[str, Any], held: dict[str, ModelBytes]) -> None:
        """Weights and optimizer state, in every stage or only where offloading brings them to the device."""
        for role, settings in roles.items():
            offload = settings.fsdp_config
            # The actor's weights are used in every stage: they generate, score and are updated.
            moves = offload.param_offload and role == "critic"
            own = ("log-probs", "values", "critic update", "critic step") if role == "critic" else ("update", "step")
            place(plan, f"{role} weights", held[role].weights, own if moves else None)
            place(plan, f"{role} optimizer", held[role].optimizer, own[-2:] if offload.optimizer_offload else None)
        config = run.config
        # With LoRA the base without adapters is the reference.
        if needs_reference(config) and config.actor_rollout_ref.model.lora_rank == 0:
            moves = config.actor_rollout_ref.ref.fsdp_config.param_offload
            weights = run.held("reference").weights
            place(plan, "reference weights", weights, ("log-probs", "ref") if moves else None)
        if config.reward_model.enable:
            moves = config.reward_model.fsdp_config.param_offload
            weights = run.count("reward model", ModelBytes.of).weights  # every worker holds all of them
            place(plan, "reward model weights", weights, ("reward model",) if moves else None)

    def plan_generation(self, config: PPOConfig, device: Device) -> Plan:
        """Of a model that only generates, with nothing beside it: `posttrain generate` and `posttrain eval`."""
        run = _Run(config, device, self)
        held = run.count("actor", ModelBytes.of)
        plan = Plan(device, run.shape, {"generate": run.generate(held)})
        _add_unpacked(plan, {"actor": run.count("actor", counting.unpacked_bytes)})
        place(plan, "actor weights", held.weights, None)
        add_workspaces(plan)
        return plan

    def identity(self, config: PPOConfig) -> tuple[Any, ...]:
        others = (repr(config.critic.model.to_dict()), repr(config.reward_model.model))
        return (settings_of_weights(config.actor_rollout_ref.model), *others)

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


class _Run:
    """One configuration on one device: the bytes of its largest passes."""

    def __init__(self, config: PPOConfig, device: Device, planner: RLPlanner, workers: int | None = None) -> None:
        """On the workers that train, or on so many `workers` of a role's own."""
        self.config, self.device, self.planner = config, device, planner
        self.rollout = config.actor_rollout_ref.rollout
        self.sizes = planner.cuts(config, "actor")
        self.shape = Shape.of(config, self.sizes.together if self.sizes else 1, workers)

    def count(self, role: str, what: Callable[..., Any], *args: Any) -> Any:
        return self.planner.count(self.config, self.device, role, what, *args)

    def held(self, role: str) -> ModelBytes:
        return self.planner.held(self.config, self.device, role, self.shape.workers)

    def cuda_sizes(self, role: str) -> cuda_bytes.Sizes | None:
        """None where the passes are counted on the meta device: on a CPU, and for models without CUDA kernels."""
        return self.count(role, cuda_bytes.sizes_of) if self.device.kind == "cuda" else None

    def generate(self, actor: ModelBytes) -> Parts:
        if self.rollout.name == "native":
            return self._generate_native(actor)
        if self.rollout.name == "server":  # its memory is that of other processes
            return {"rollout weights": 0, "KV cache": 0, "temporary tensors": 0}
        rollout, shape, device = self.rollout, self.shape, self.device
        serving = rollout.name != "hf"
        copies = (serving or shape.workers > 1) and not shape.generating
        copy = self.engine_part(actor) if copies else 0
        per_token = self.count("actor", counting.cache_bytes_per_token)
        cache = shape.wave * shape.longest * per_token
        if serving:  # the engine takes its share of the device at once, working memory included
            if rollout.name in OUTSIDE and (rollout.kv_cache_gb is not None or device.kind == "cpu"):
                longest = longest_row(rollout.name, rollout.engine_kwargs, shape.longest) + 1
                cache = allowed_cache(rollout, device.kind, device.bytes, longest, per_token)
                return {"rollout weights": copy, "KV cache": cache, "temporary tensors": self._step_peak()}
            if rollout.gpu_memory_utilization is not None:
                # Workers that only generate have none but their part of these.
                held = copy or self.engine_part(actor)
                cache = max(0, int(rollout.gpu_memory_utilization * device.bytes) - held)
            return {"rollout weights": copy, "KV cache": cache, "temporary tensors": 0}
        prefill = self.count("actor", counting.prefill_peak, shape.prefill, shape.prompt)
        decode = self.count("actor", counting.decode_peak, shape.wave, shape.longest, self._sampling())
        # In the prefill most of the cache is not there yet.
        return {"rollout weights": copy, "KV cache": cache, "temporary tensors": max(prefill - cache, decode)}

    def engine_part(self, actor: ModelBytes) -> int:
        """Bytes of an engine's weights that a worker holds; with several stages, one of the largest."""
        tensor, stages = self.rollout.tensor_model_parallel_size, self.rollout.pipeline_model_parallel_size
        share = self.count("actor", counting.largest_stage, stages) if stages > 1 else 1.0
        return math.ceil(actor.weights * share / tensor)

    def _generate_native(self, actor: ModelBytes) -> Parts:
        rollout, shape, device = self.rollout, self.shape, self.device
        size, response = rollout.tensor_model_parallel_size, self.config.data.max_response_length
        # The cache has whole blocks: those of a prompt once, shared by its responses, those of each response. The ranks
        # of a tensor-parallel engine hold a part of weights and cache each.
        per_token = self.count("actor", bytes_per_token, size, True)
        blocks = shape.prefill * blocks_for(shape.prompt) + shape.wave * blocks_for(response)
        states = shape.wave * self.count("actor", state_bytes)  # the last response to a prompt takes over the prompt's
        cache = with_slack(blocks) * BLOCK * per_token + states
        cache = min(cache, cache_limit(rollout, device.kind, device.bytes))
        temporary, captured = self._step_peak(), 0
        if device.kind == "cuda":
            sizes = self.cuda_sizes("actor")
            if sizes is not None:
                if size == 1:
                    captured = cuda_bytes.captured_bytes(sizes, shape.wave, shape.longest, hopper=device.hopper)
                temporary = cuda_bytes.prefill_bytes(sizes, self._step_tokens(), shape.prefill)
            else:  # without a kernel of its own a layer's keys and values are gathered for each step
                layers = self.count("actor", counting.layer_count)
                temporary += 2 * shape.wave * shape.longest * per_token // layers
        # On one worker the engine reads the trainer's own weights; on a CPU it makes packed copies for long responses.
        copies = math.ceil(actor.weights / size) if shape.workers > 1 and not shape.generating else 0
        if size == 1 and device.kind == "cpu" and response >= MANY:
            copies = self.count("actor", counting.packed_bytes)
        copies += self.fp8_copies()
        made = {"rollout weights": copies, "KV cache": cache, "temporary tensors": temporary}
        return made | ({CAPTURED: captured} if captured else {})

    def fp8_copies(self) -> int:
        if self.rollout.quantization != "fp8":
            return 0
        return math.ceil(self.count("actor", counting.fp8_bytes) / self.rollout.tensor_model_parallel_size)

    def fp8_base(self) -> int:
        """Copies of the actor's frozen base, which stay from its first pass on."""
        if self.config.actor_rollout_ref.actor.quantization != "fp8":
            return 0
        shared = self.fp8_copies() > 0 and not self.shape.generating
        return self.count("actor", counting.fp8_base_bytes, self.device.kind, shared)

    def _rounding(self, role: str, tokens: int, *, back: bool) -> int:
        if role != "actor" or self.config.actor_rollout_ref.actor.quantization != "fp8":
            return 0
        return self.count(role, counting.rounding_bytes, tokens, self.device.kind, back)

    def _step_tokens(self) -> int:
        """Tokens that meet in one step of an engine: a decode step of all responses, or a chunk of prefill."""
        limit = step_limit(self.rollout, self.device.kind)
        return max(self.shape.wave, min(limit, self.shape.prefill * self.shape.prompt))

    def _step_peak(self) -> int:
        sizes = (self._step_tokens(), self.shape.wave)
        return self.count("actor", counting.native_step_peak, *sizes, self._sampling())

    def _sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.config.data.max_response_length,
            temperature=self.rollout.temperature or 1.0,
            top_p=self.rollout.top_p,
            top_k=self.rollout.top_k,
            min_p=self.rollout.min_p,
            repetition_penalty=self.rollout.repetition_penalty,
        )

    def log_probs_peak(self, role: str, settings: Any) -> int:
        shape, sizes = self.shape, self.cuda_sizes(role)
        if self.sizes is not None:
            passed = self._megatron_pass(role, settings)
            return self.count(role, megatron_ranks.scoring_bytes, self.sizes, *passed, self._memory())
        if sizes is not None:
            passed = shape.packed_pass(settings, self.rollout.n, joining_cost(sizes.width))
            rounding = self._rounding(role, passed[0], back=False)
            return cuda_bytes.scoring_bytes(sizes, *passed, self.device.bytes) + rounding
        rows = shape.micro_rows(settings)
        rounding = self._rounding(role, rows * shape.longest, back=False)
        return self.count(role, counting.scoring_peak, rows, shape.longest, self.device.kind) + rounding

    def _megatron_pass(self, role: str, settings: Any) -> tuple[int, int]:
        width = self.count(role, counting.width_of)
        return self.shape.packed_pass(settings, self.rollout.n, joining_cost(width))

    def _memory(self) -> int | None:
        return self.device.bytes if self.device.kind == "cuda" else None

    def reward_model_peak(self) -> int:
        """The largest pass of the reward model; its tokenizer is taken to need as many tokens as the policy's."""
        settings, shape = self.config.reward_model, self.shape
        longest = min(shape.longest, settings.max_length or shape.longest)
        rows = min(shape.batch_rows, settings.micro_batch_size_per_gpu or shape.batch_rows)
        rows = max(1, min(rows, settings.forward_max_token_len_per_gpu // longest))
        return self.count("reward model", counting.rewarding_peak, rows, longest)

    def update(self, role: str, settings: Any, held: ModelBytes) -> Parts:
        """The backward pass of the largest micro-batch."""
        shape, device = self.shape, self.device
        rows, checkpointing = (
            shape.micro_rows(settings),
            self.config.actor_rollout_ref.model.enable_gradient_checkpointing,
        )
        if role == "critic" and self.config.critic.model.enable_gradient_checkpointing is not None:
            checkpointing = self.config.critic.model.enable_gradient_checkpointing
        sizes, tokens = self.cuda_sizes(role), rows * shape.longest
        if self.sizes is not None:
            passed = (*self._megatron_pass(role, settings), math.ceil(shape.mini_rows / rows))
            how = (self.sizes, *passed, bool(checkpointing), self._memory())
            counted = self.count(role, megatron_ranks.update_bytes, *how)
        elif sizes is not None:
            passed = shape.packed_pass(settings, self.rollout.n, joining_cost(sizes.width))
            alone, tokens = shape.workers == 1, passed[0]
            counted = cuda_bytes.update_bytes(sizes, *passed, bool(checkpointing), device.bytes, alone=alone)
        else:
            how = (rows, shape.longest, checkpointing, device.kind)
            counted = self.count(role, counting.training_bytes, *how)
        counted = counted[0], counted[1] + self._rounding(role, tokens, back=True)
        return backward_parts(role, counted, held, device, single=rows == shape.mini_rows, workers=shape.workers)


def _separate_devices(plan: Plan, own: Mapping[str, int]) -> None:
    """A stage of a role with workers of its own is of their device, and has the parts of that role; all others are of
    the device of a worker that trains."""
    for name, parts in plan.stages.items():
        here = STAGES_APART.get(name)
        for part in [part for part in parts if part != "temporary tensors"]:
            there = _role_of_part(part)
            if (here if here in own else None) != (there if there in own else None):
                del parts[part]


def _role_of_part(part: str) -> str:
    if part in OF_THE_ROLLOUT:
        return "rollout"
    return next((role for role in ROLES if part.startswith(role.replace("_", " "))), "")


def _plan_loading(plan: Plan, held: dict[str, ModelBytes], joined: int) -> None:
    # While models are loaded, all weights and float32 masters are on the device, also those that are offloaded later.
    # The matrices of a layer are joined before the masters are made. AdamW's moments come with the first step.
    weights = {part: plan.largest(part) for part in plan.stages["update"] if part.endswith(" weights")}
    masters = {f"{role} optimizer": one.masters for role, one in held.items()}
    room = {"temporary tensors": joined}
    plan.stages["load"] = {**weights, "rollout weights": plan.largest("rollout weights"), **masters, **room}


def _add_unpacked(plan: Plan, by_role: dict[str, int]) -> None:
    # A pass over a 4-bit base holds one of its matrices unpacked at a time.
    users = {"generate": ["actor"], "log-probs": list(by_role), "update": ["actor"]}
    users |= {"critic update": ["critic"], "values": ["critic"]}
    for name in plan.stages.keys() & users.keys():
        plan.stages[name]["temporary tensors"] += max(by_role[role] for role in users[name])


def _keep_while_asleep(plan: Plan, engine: str, fp8_copies: int) -> None:
    # What an engine keeps in the other stages: vLLM and SGLang their weights on a CPU; `native` its fp8 copies, whose
    # addresses captured steps hold, and on a CUDA device these steps and a cache of up to an eighth of the device.
    generate = plan.stages["generate"]
    if fp8_copies:
        for name, parts in plan.stages.items():
            if name != "generate":
                parts["rollout weights"] = fp8_copies
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

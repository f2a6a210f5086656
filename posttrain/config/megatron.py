"""`actor_rollout_ref.actor.megatron_config`: how the engine `megatron` cuts a model over ranks.

The engine owns these settings as one free dict, and checks them here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.checked import Checked, Finding
from posttrain.config.free_dict import Fault, settings_of, typed_entry
from posttrain.config.model_files import model_type_of
from posttrain.config.parallel import workers_of
from posttrain.config.problem import Problem
from posttrain.config.resolved import Resolved

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
KEY, STRATEGY = f"{_ACTOR}.megatron_config", f"{_ACTOR}.strategy"
NAME = "megatron"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""`model_type` in the config.json of models that the engine trains; those of `engine/megatron/shapes.py`."""
INSTALL = 'pip install "posttrain[megatron]" brings it; or set actor_rollout_ref.actor.strategy=fsdp2'


@dataclass(frozen=True)
class MegatronSettings:
    """Sizes also have `model_` in their names (`tensor_model_parallel_size`)."""

    tensor_parallel_size: int = 1
    """Ranks that share every matrix of a layer."""
    pipeline_parallel_size: int = 1
    """Stages, each on ranks of its own, that share the layers."""
    expert_parallel_size: int = 1
    """Ranks that share the experts of a layer of a mixture of experts."""


def megatron_settings(given: Mapping[str, Any]) -> MegatronSettings:
    """The settings of a checked dict."""
    return settings_of(MegatronSettings, given)


def is_installed() -> bool:
    """Whether there is a megatron-core to import; nothing is imported to find out."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except (ImportError, ValueError):
        return False


def check_megatron(checked: Checked) -> Iterator[Finding]:
    """Names, types and sizes; and that they are this engine's run's."""
    actor = checked.config.actor_rollout_ref.actor
    chosen, given = actor.strategy == NAME, actor.megatron_config
    if given and not chosen:
        idle = f"{KEY}: {', '.join(given)}: only the engine megatron cuts a model so, and {STRATEGY}={actor.strategy}"
        if STRATEGY in checked.explicit:
            yield f"{idle}: they have no effect."
        else:
            yield checked.problem(f"{idle}.", f"set {STRATEGY}=megatron, or remove them", KEY)
        return
    wrong = False
    for name, value in given.items():
        for what, do in _faults(name, value):
            wrong = True
            yield checked.problem(what, do, KEY)
    if chosen and not wrong:
        yield from _sizes(checked, megatron_settings(given))
        yield from _not_together(checked)


def _faults(name: str, value: Any) -> Iterator[Fault]:
    typed = yield from typed_entry(KEY, name, value, MegatronSettings)
    if typed is not None and typed < 1:
        yield f"`{KEY}.{name}={typed}` must be 1 or more.", "give the number of ranks, or leave it out"


def _sizes(checked: Checked, settings: MegatronSettings) -> Iterator[Finding]:
    """Sizes that do not divide the workers."""
    workers = workers_of(checked.config)
    tensor, pipeline, expert = (
        settings.tensor_parallel_size,
        settings.pipeline_parallel_size,
        settings.expert_parallel_size,
    )
    whole = "trainer.n_gpus_per_node x trainer.nnodes"
    if workers % (tensor * pipeline):
        what = (
            f"{KEY}: tensor_parallel_size={tensor} x pipeline_parallel_size={pipeline} = {tensor * pipeline} workers "
            f"hold one copy of the model, which does not divide the {workers} worker(s) of the run ({whole})."
        )
        yield checked.problem(what, f"set sizes whose product divides {workers}, or another number of workers", KEY)
    elif (workers // pipeline) % expert:
        what = (
            f"`{KEY}.expert_parallel_size={expert}` does not divide the {workers // pipeline} worker(s) of a stage "
            f"({workers} workers / pipeline_parallel_size={pipeline})."
        )
        yield checked.problem(what, f"set a size that divides {workers // pipeline}", KEY)


def _not_together(checked: Checked) -> Iterator[Finding]:
    """Settings that this engine cannot follow."""
    config, own = checked.config, checked.config.actor_rollout_ref
    sharded = "it cuts weights by tensor_parallel_size and pipeline_parallel_size"
    odd = {
        f"{_MODEL}.lora_rank": (own.model.lora_rank > 0, "adapters are not built for it"),
        f"{_MODEL}.quantization": (own.model.quantization is not None, "weights of 4 bits are not built for it"),
        f"{_MODEL}.use_remove_padding": (not own.model.use_remove_padding, "it computes packed rows only"),
        f"{_ACTOR}.ulysses_sequence_parallel_size": (own.actor.ulysses_sequence_parallel_size != 1, sharded),
        f"{_ACTOR}.fsdp_config.fsdp_size": (own.actor.fsdp_config.fsdp_size not in (-1, 1), sharded),
        "critic.model.lora_rank": (config.critic.model.lora_rank > 0, "adapters are not built for it"),
        "critic.model.use_remove_padding": (not config.critic.model.use_remove_padding, "it computes packed rows only"),
        "critic.ulysses_sequence_parallel_size": (config.critic.ulysses_sequence_parallel_size != 1, sharded),
        "critic.fsdp_config.fsdp_size": (config.critic.fsdp_config.fsdp_size not in (-1, 1), sharded),
    }
    for key, (is_so, why) in odd.items():
        if is_so:
            what = f"`{key}` cannot be used with {STRATEGY}=megatron: {why}."
            yield checked.problem(what, f"remove {key}, or set {STRATEGY}=fsdp2", key)


def missing_megatron(resolved: Resolved) -> Iterator[Problem]:
    """The package of a run that needs it."""
    if resolved.value(STRATEGY) == NAME and not is_installed():
        what = f"`{STRATEGY}=megatron`: the package megatron-core is not installed in this environment."
        yield Problem(what, resolved.where(STRATEGY), INSTALL)


def untrainable_models(resolved: Resolved, cwd: Path) -> Iterator[Problem]:
    """Models of a kind that the engine does not train, told from their config.json alone: the weights of a large one
    take an hour to load."""
    if resolved.value(STRATEGY) != NAME:
        return
    for key in (f"{_MODEL}.path", "critic.model.path"):
        name = resolved.value(key)
        kind = None if name in (None, "embedded") else model_type_of(str(name), cwd)
        if kind is not None and kind not in MODEL_TYPES:
            what = f"`{key}={name}`: models of type {kind} cannot be trained with {STRATEGY}=megatron; it trains "
            what += f"{', '.join(MODEL_TYPES)}."
            yield Problem(what, resolved.where(key), f"give another model, or set {STRATEGY}=fsdp2", (key,))

"""`megatron_config`, beside the strategy: how the engine `megatron` cuts a model over ranks.

The engine owns these settings as one free dict, and checks them here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.config.checked import Checked, Finding, check_dict, settings_of
from posttrain.config.schema import lookup
from posttrain.config.trainer import ROLES, own_workers_of, workers_of
from posttrain.engine.settings import EngineKeys
from posttrain.settings import ONE_OR_MORE, setting

NAME, SECTION = "megatron", "megatron_config"
LATENT = ("deepseek_v2", "deepseek_v3")
DENSE, EXPERTS = ("llama", "mistral", "qwen2", "qwen3"), ("mixtral", "qwen3_moe", "glm4_moe", *LATENT)
MODEL_TYPES = (*DENSE, *EXPERTS)
"""`model_type` in the config.json of models that the engine trains."""
ATTENTION_BIASES = ("glm4_moe",)
"""Models whose `attention_bias` adds to queries, keys and values alone."""


def install_words(strategy: str) -> str:
    """What to do without the package."""
    return f'pip install "posttrain[megatron]" brings it; or set {strategy}=fsdp2'


@dataclass(frozen=True)
class MegatronSettings:
    """Sizes also have `model_` in their names (`tensor_model_parallel_size`)."""

    tensor_parallel_size: int = setting(1, range=ONE_OR_MORE)
    """Ranks that share every matrix of a layer."""
    pipeline_parallel_size: int = setting(1, range=ONE_OR_MORE)
    """Stages, each on ranks of its own, that share the layers."""
    virtual_pipeline_parallel_size: int | None = setting(None, range=ONE_OR_MORE)
    """Chunks of layers of each stage, which a pass goes through one at a time: stages wait less for each other, and
    hold the activations of more passes; null is one chunk."""
    expert_parallel_size: int = setting(1, range=ONE_OR_MORE)
    """Ranks that share the experts of a layer of a mixture of experts."""
    context_parallel_size: int = setting(1, range=ONE_OR_MORE)
    """Ranks that share the tokens of a pass: each computes a stretch of them, and a part of the heads in attention."""
    sequence_parallel: bool = setting(True)
    """Whether tensor ranks share the tokens between the matrices of a layer instead of all holding all of them."""
    num_layers_in_first_pipeline_stage: int | None = setting(None, range=ONE_OR_MORE)
    """Layers of the first stage, which has the embedding too; null gives all stages equally many, give or take one."""
    num_layers_in_last_pipeline_stage: int | None = setting(None, range=ONE_OR_MORE)
    """Layers of the last stage, which has the head and the loss too."""
    use_distributed_optimizer: bool = setting(True)
    """Whether ranks with copies of the same weights share their moments and float32 masters instead of holding all."""


def product(tensor: int, pipeline: int, context: int) -> tuple[str, int]:
    """The ranks that compute the same rows together, in words and as a number."""
    together = tensor * pipeline * context
    by_tokens = f" x context_parallel_size={context}" if context > 1 else ""
    return f"tensor_parallel_size={tensor} x pipeline_parallel_size={pipeline}{by_tokens} = {together}", together


def megatron_settings(given: Mapping[str, Any]) -> MegatronSettings:
    """The settings of a checked dict."""
    return settings_of(MegatronSettings, given)


def is_installed() -> bool:
    """Whether there is a megatron-core to import; nothing is imported to find out."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except (ImportError, ValueError):
        return False


def check_megatron(checked: Checked, keys: EngineKeys) -> Iterator[Finding]:
    """Names, types and sizes; and that they are this engine's run's."""
    section = lookup(checked.config, keys.section)
    chosen, given, key = section.strategy == NAME, section.megatron_config, f"{keys.section}.{SECTION}"
    if given and not chosen:
        so = f"only the engine megatron cuts a model so, and {keys.strategy}={section.strategy}"
        idle = f"{key}: {', '.join(given)}: {so}"
        if keys.strategy in checked.explicit:
            yield f"{idle}: they have no effect."
        else:
            yield checked.problem(f"{idle}.", f"set {keys.strategy}=megatron, or remove them", key)
        return
    settings = yield from check_dict(checked, key, MegatronSettings, "give the number of ranks, or leave it out")
    if chosen and settings is not None:
        yield from _sizes(checked, key, settings)
        yield from _not_together(checked, keys)


def _sizes(checked: Checked, key: str, settings: MegatronSettings) -> Iterator[Finding]:
    """Sizes that do not divide the workers."""
    workers = workers_of(checked.config)
    pipeline, expert = settings.pipeline_parallel_size, settings.expert_parallel_size
    if pipeline == 1 and (settings.virtual_pipeline_parallel_size or 1) > 1:
        what = f"`{key}.virtual_pipeline_parallel_size={settings.virtual_pipeline_parallel_size}` cuts the layers of "
        what += "pipeline stages into chunks, and there is one stage (pipeline_parallel_size=1)."
        yield checked.problem(what, "remove it, or set pipeline_parallel_size", key)
    for place in ("first", "last"):
        name = f"num_layers_in_{place}_pipeline_stage"
        if pipeline == 1 and (layers := getattr(settings, name)) is not None:
            what = f"`{key}.{name}={layers}` sets the layers of a stage, and there is one stage that has all "
            yield checked.problem(f"{what}(pipeline_parallel_size=1).", "remove it, or set pipeline_parallel_size", key)
    words, together = product(settings.tensor_parallel_size, pipeline, settings.context_parallel_size)
    if workers % together:
        what = (
            f"{key}: {words} workers compute the same rows, which does not divide the {workers} worker(s) of the run "
            "(trainer.n_gpus_per_node x trainer.nnodes)."
        )
        yield checked.problem(what, f"set sizes whose product divides {workers}, or another number of workers", key)
    elif (workers // pipeline) % expert:
        what = (
            f"`{key}.expert_parallel_size={expert}` does not divide the {workers // pipeline} worker(s) of a stage "
            f"({workers} workers / pipeline_parallel_size={pipeline})."
        )
        yield checked.problem(what, f"set a size that divides {workers // pipeline}", key)


def _not_together(checked: Checked, keys: EngineKeys) -> Iterator[Finding]:
    """Settings that this engine cannot follow."""
    sharded = "it cuts weights by tensor_parallel_size and pipeline_parallel_size"
    for role in keys.roles.values():
        model = lookup(checked.config, role.model)
        odd = {
            f"{role.model}.quantization": (
                getattr(model, "quantization", None) is not None,
                "weights of 4 bits are not built for it",
            ),
            f"{role.model}.use_remove_padding": (not model.use_remove_padding, "it computes packed rows only"),
            f"{role.model}.target_modules": (
                _adapts_ends(model),
                "adapters on the embedding or the head are not built for it",
            ),
            role.sequence_size: (lookup(checked.config, role.sequence_size) != 1, sharded),
            role.fsdp_size: (lookup(checked.config, role.fsdp_size) not in (-1, 1), sharded),
        }
        for key, (is_so, why) in odd.items():
            if is_so:
                what = f"`{key}` cannot be used with {keys.strategy}=megatron: {why}."
                yield checked.problem(what, f"remove {key}, or set {keys.strategy}=fsdp2", key)
    for name, count in own_workers_of(checked.config).items():
        key = ROLES[name].key
        if ROLES[name].shards:
            what = f"`{key}={count}` with {keys.strategy}=megatron, which cuts all models over the workers that train."
            yield checked.problem(what, f"set {keys.strategy}=fsdp2, or {key}=0", key, keys.strategy)


def _adapts_ends(model: Any) -> bool:
    """Whether the embedding or the head is named among the modules with adapters; expressions meet the model itself."""
    names = getattr(model, "target_modules", None)
    rank = getattr(model, "lora_rank", 0)
    return bool(rank) and isinstance(names, list) and bool({"embed_tokens", "lm_head"} & {*map(str, names)})

"""An engine of vLLM from a model: which arguments vLLM gets, and who decides each of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError
from posttrain.kernels.tensor_parallel import Team
from posttrain.models.lora import has_adapters
from posttrain.rollout.native.build import bytes_per_token, device_memory, step_limit
from posttrain.rollout.outside import (
    SHARE,
    CopiedModel,
    allowed_cache,
    check_arguments,
    check_installed,
    engine_words,
    is_trained,
    longest_row,
    weights_of,
)
from posttrain.rollout.vllm.adapters import (
    RANKS,
    HeldAdapters,
    base_and_adapters,
    has_experts,
    largest_rank,
    why_folded,
)
from posttrain.rollout.vllm.engine import VLLMEngine
from posttrain.rollout.vllm.inside import executor_over, prepare_stages
from posttrain.rollout.vllm.settings import ADAPTERS, VLLM

VARIABLES = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first, and gives no log-probs
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # these threads are the trainer's, too
}
"""Of the environment, where the user has not set them."""


def build_vllm(
    module: torch.nn.Module,
    config: RolloutConfig,
    *,
    decode: Callable[[list[int]], str] | None,
    device: torch.device | None = None,
    longest: int | None = None,
    team: Team | None = None,
) -> tuple[VLLMEngine, str] | str:
    """(engine, its name), with the model's weights in it; or why vLLM does not know this model. Rows of the engine have
    at most `longest` tokens, or as many as the model has positions. The ranks of a `team` hold one engine together."""
    check_installed("vllm")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its model and its memory are reached from here
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    if (stages := config.pipeline_model_parallel_size) > 1:
        # What the last stage made is known to the others by the names of requests, of which each would make its own.
        os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
    from vllm import EngineArgs, LLMEngine, ModelRegistry  # pyright: ignore

    check_arguments(VLLM, config, [one.name for one in dataclasses.fields(EngineArgs)])
    model = CopiedModel.of(module, device)
    if isinstance(model, str):
        return model
    base, kind, place = model.base, model.kind, model.place
    if kind not in ModelRegistry.get_supported_archs():
        return f"it does not know {kind}"
    if place.type == "cpu" and has_experts(base.config):
        return "its CPU build does not take new weights for experts"
    beside, adapters_note = _adapters_beside(module, kind, config)
    keep_groups = dist.is_initialized()  # by those who train here, and go on with it when the engine is closed
    with model.starting(VLLM) as folder:
        given = arguments(config, base, place, longest, team)
        if beside:
            rank = next(rank for rank in RANKS if rank >= largest_rank(module))
            given |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        llm = LLMEngine.from_engine_args(EngineArgs(model=folder, dtype=model.dtype, **given))
    if stages > 1:
        prepare_stages(llm)
    weights = base_and_adapters if beside else weights_of
    engine = VLLMEngine(
        llm,
        decode=decode,
        source=(lambda: weights(module)) if is_trained(module) else None,
        tied=tied_names(base),
        keep_groups=keep_groups,
        adapters=HeldAdapters.of(llm, module) if beside else None,
        ranks=team.size if team else 1,
    )
    engine.load_weights(weights(module), 0)
    held = [f"held by {team.size} workers"] if team else []
    held += [f"in {stages} stages"] if stages > 1 else []
    copied = "adapters" if beside else "weights"
    return engine, engine_words(VLLM, *held, f"{copied} copied at every sync") + adapters_note


def _adapters_beside(module: Any, kind: str, config: RolloutConfig) -> tuple[bool, str]:
    """(whether vLLM computes adapters beside the base, what the engine's name says where it does not)."""
    wanted = VLLM.given(config.engine_kwargs).get(ADAPTERS)
    if not has_adapters(module) or wanted is False:
        return False, ""
    reason = why_folded(module, kind)
    if reason is not None and wanted:
        raise UserError(f"{VLLM.key}.{ADAPTERS}=true: {reason}; remove it, and adapters are folded into the base")
    return reason is None, "" if reason is None else f"; adapters are folded into the base: {reason}"


def tied_names(module: Any) -> dict[str, str]:
    """Embedding -> head, where they are one weight. Syncs send it once, under the embedding's name."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or has_adapters(head) or has_adapters(embedding) or head.weight is not embedding.weight:
        return {}
    names = {id(part): name for name, part in module.named_modules()}
    return {f"{names[id(embedding)]}.weight": f"{names[id(head)]}.weight"}


def arguments(
    config: RolloutConfig, module: Any, device: torch.device, longest: int | None, team: Team | None = None
) -> dict[str, Any]:
    """What vLLM is asked for besides the model."""
    on_cuda, given = device.type == "cuda", VLLM.given(config.engine_kwargs)
    given.pop(ADAPTERS, None)
    most, is_long = longest_row(module, given.pop(VLLM.length, None), longest)
    if is_long:
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # whether that is right has been said already
    settings: dict[str, Any] = {
        "max_model_len": most,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(step_limit(config, device.type), config.max_num_seqs),
    }
    if not on_cuda:  # prompts are not cut into pieces there
        settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], most)
    if config.kv_cache_gb is not None or not on_cuda:
        memory, ranks = device_memory(device), team.size if team else 1
        per_token = -(-bytes_per_token(module) // ranks)  # each rank has its heads' part of the cache
        settings["kv_cache_memory_bytes"] = allowed_cache(config, device.type, memory, most, per_token)
    else:
        settings["gpu_memory_utilization"] = config.gpu_memory_utilization or SHARE
    if team is not None:
        settings |= {
            "tensor_parallel_size": team.size // config.pipeline_model_parallel_size,
            "pipeline_parallel_size": config.pipeline_model_parallel_size,
            "distributed_executor_backend": executor_over(team, device),
        }
    return given | settings | {**VLLM.fixed} | ({"enable_sleep_mode": True} if on_cuda else {**VLLM.on_cpu})

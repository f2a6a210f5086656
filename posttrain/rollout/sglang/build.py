"""An engine of SGLang from a model: which arguments SGLang gets, and which setting decides each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from posttrain.config.rollout import RolloutConfig
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
from posttrain.rollout.sglang.engine import SGLangEngine
from posttrain.rollout.sglang.link import Link
from posttrain.rollout.sglang.settings import SGLANG


def build_sglang(
    module: torch.nn.Module,
    config: RolloutConfig,
    *,
    decode: Callable[[list[int]], str] | None,
    device: torch.device | None = None,
    longest: int | None = None,
) -> tuple[SGLangEngine, str] | str:
    """(engine, its name), with the model's weights in it; or why SGLang does not serve this model. Rows of the engine
    have at most `longest` tokens, or as many as the model has positions."""
    check_installed("sglang")
    check_arguments(SGLANG, config, SGLANG.installed_arguments() or SGLANG.given(config.engine_kwargs))
    model = CopiedModel.of(module, device)
    if isinstance(model, str):
        return model
    base, place = model.base, model.place
    if place.type not in ("cuda", "cpu"):
        return f"it does not run on {place.type}"
    if place.type == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # A row ends where its request says it, and nowhere else.
    with model.starting(SGLANG, eos_token_id=None) as folder:
        given = arguments(config, base, place, longest)
        keep = place.type == "cuda" and not is_trained(module)  # there is no other copy of the weights while it sleeps
        link = Link(given | {"model_path": folder, "dtype": model.dtype, "enable_weights_cpu_backup": keep})
    engine = SGLangEngine(
        link,
        longest=given["context_length"] - 1,
        max_num_seqs=config.max_num_seqs,
        held=link.do(link.engine.get_server_info)["max_total_num_tokens"] * bytes_per_token(base),
        on_cuda=place.type == "cuda",
        decode=decode,
        source=(lambda: weights_of(module)) if is_trained(module) else None,
    )
    engine.load_weights(weights_of(module), 0)
    return engine, engine_words(SGLANG, "weights copied at every sync")


def arguments(config: RolloutConfig, module: Any, device: torch.device, longest: int | None) -> dict[str, Any]:
    """What SGLang is asked for besides the model."""
    on_cuda, given = device.type == "cuda", SGLANG.given(config.engine_kwargs)
    most, is_long = longest_row(module, given.pop(SGLANG.length, None), longest)
    if is_long:
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # whether that is right has been said already
    tokens = step_limit(config, device.type)
    settings: dict[str, Any] = {
        "context_length": most,
        "max_running_requests": config.max_num_seqs,
        "chunked_prefill_size": tokens,
        "max_prefill_tokens": tokens,
        "device": device.type,
        "base_gpu_id": device.index or 0,
        "enable_memory_saver": on_cuda,
    }
    if config.kv_cache_gb is not None or not on_cuda:
        per_token = bytes_per_token(module)
        cache = allowed_cache(config, device.type, device_memory(device), most, per_token)
        settings["max_total_tokens"] = max(cache // per_token, most)
    if on_cuda:
        settings["mem_fraction_static"] = config.gpu_memory_utilization or SHARE
    elif "attention_backend" not in given:
        settings["attention_backend"] = "torch_native"  # the one that every CPU has
    return {"log_level": "error"} | given | settings | {**SGLANG.fixed}

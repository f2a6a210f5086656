"""An engine of vLLM from a model: which arguments vLLM gets, and who decides each of them."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from posttrain.config.engine_kwargs import FIXED, LENGTH, ON_CPU, faults, given_for, unknown
from posttrain.config.rollout import RolloutConfig
from posttrain.config.vllm import INSTALL, installed_version, is_installed
from posttrain.errors import UserError, first_line
from posttrain.models.forward import without_adapters
from posttrain.models.lora import has_adapters, merged_state
from posttrain.rollout.native.build import bytes_per_token, cache_limit, device_memory, step_limit
from posttrain.rollout.vllm.engine import VLLMEngine, Weights
from posttrain.rollout.vllm.inside import nothing_disturbed

NAME = "actor_rollout_ref.rollout.name=vllm"
LEAST = 32  # tokens of a row that vLLM is made for at least: what proves an engine and a sync must fit
SHARE = 0.5  # of a GPU's memory, where neither a user nor the memory plan has said it
BLOCK = 128  # tokens of a block of vLLM's cache on a CPU
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
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
) -> tuple[VLLMEngine, str] | str:
    """(engine, its name), with the model's weights in it; or why vLLM does not know this model. Rows of the engine have
    at most `longest` tokens, or as many as the model has positions."""
    check_installed()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its model and its memory are reached from here
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    from vllm import EngineArgs, LLMEngine, ModelRegistry  # pyright: ignore

    check_arguments(config, [one.name for one in dataclasses.fields(EngineArgs)])
    base: Any = without_adapters(module)
    kind, weight = type(base).__name__, next(base.parameters())
    place = device or weight.device
    if weight.dtype not in DTYPES:
        return f"it does not compute in {str(weight.dtype).removeprefix('torch.')}"
    if kind not in ModelRegistry.get_supported_archs():
        return f"it does not know {kind}"
    live = any(weight.requires_grad for weight in module.parameters())
    if not live and place.type == "cuda" and not getattr(base, "is_quantized", False):
        module.to("cpu")  # nobody trains it: once vLLM has its weights it only proves them (`make_vllm` knows of it)
        gc.collect()
        torch.cuda.empty_cache()  # vLLM looks at what is free
    with tempfile.TemporaryDirectory(prefix="posttrain-vllm-") as folder, nothing_disturbed():
        _written_config(base, kind).save_pretrained(folder)
        given = arguments(config, base, place, longest)
        try:
            llm = LLMEngine.from_engine_args(EngineArgs(model=folder, dtype=DTYPES[weight.dtype], **given))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UserError(f"{NAME}: vLLM does not start: {_words(error)}{_advice(str(error))}") from error
    engine = VLLMEngine(llm, decode=decode, source=(lambda: _weights(module)) if live else None)
    engine.load_weights(_weights(module), 0)
    return engine, f"vllm ({installed_version() or 'of unknown version'}, weights copied at every sync)"


def check_installed() -> None:
    if not is_installed():
        raise UserError(f"{NAME}: the package vllm is not installed in this environment. {INSTALL}")


def check_arguments(config: RolloutConfig, known: Sequence[str]) -> None:
    """What a user gives vLLM besides; a command has been told before anything was loaded."""
    given = given_for("vllm", config.engine_kwargs)
    for what, do in (*faults(given), *unknown(given, known)):
        raise UserError(f"{what} {do}")


def arguments(config: RolloutConfig, module: Any, device: torch.device, longest: int | None) -> dict[str, Any]:
    """What vLLM is asked for besides the model."""
    on_cuda, given = device.type == "cuda", given_for("vllm", config.engine_kwargs)
    positions = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    most = (
        max(given.pop(LENGTH, None) or longest or positions or 0, LEAST) + 1
    )  # a row that is scored gets a token more
    if positions and most > positions:
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # whether that is right has been said already
    settings: dict[str, Any] = {
        "max_model_len": most,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(step_limit(config, device.type), config.max_num_seqs),
    }
    if not on_cuda:  # prompts are not cut into pieces there
        settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], most)
    if config.kv_cache_gb is not None or not on_cuda:
        memory = device_memory(device)
        settings["kv_cache_memory_bytes"] = allowed_cache(config, device.type, memory, most, bytes_per_token(module))
    else:
        settings["gpu_memory_utilization"] = config.gpu_memory_utilization or SHARE
    return given | settings | FIXED | ({"enable_sleep_mode": True} if on_cuda else ON_CPU)


def allowed_cache(config: RolloutConfig, kind: str, memory: int, longest: int, per_token: int) -> int:
    """vLLM takes its cache at once: what is set, or what the most rows need of what is allowed."""
    limit = cache_limit(config, kind, memory)
    if config.kv_cache_gb is not None:
        return limit
    return min(limit, config.max_num_seqs * (longest + BLOCK) * per_token)


def _written_config(module: Any, kind: str) -> Any:
    """The model's settings as it is here: overridden, unpacked, and untied where adapters have made ends of ties."""
    config = copy.deepcopy(module.config)
    config.architectures = [kind]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    head = module.get_output_embeddings()
    if head is not None and has_adapters(head):
        config.tie_word_embeddings = False
    return config


def _weights(module: Any) -> Weights:
    state = merged_state(module) if has_adapters(module) else module.state_dict()
    return state.items()


def _words(error: BaseException) -> str:
    """Its first line; where that only counts what is wrong with an argument, what it is."""
    first = first_line(error)
    if "validation error" not in first:
        return first
    return " ".join(line.strip() for line in str(error).splitlines()[:3])


def _advice(text: str) -> str:
    if any(words in text.lower() for words in ("free memory", "out of memory", "available memory", "kv cache")):
        return (
            ". Its share of the device is actor_rollout_ref.rollout.gpu_memory_utilization, beside what the trainer "
            "holds there; `posttrain plan` shows both"
        )
    return ""

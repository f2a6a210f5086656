"""A native engine for a model: which decoder it gets, and how much memory its cache may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.cores import machine_memory
from posttrain.errors import UserError
from posttrain.kernels import cuda
from posttrain.kernels.compiled import why_not
from posttrain.kernels.cuda import MOST_STEPS, STEPS_UNSEEN
from posttrain.kernels.fp8 import OLDEST
from posttrain.kernels.quantized import FP8
from posttrain.kernels.tensor_parallel import Team
from posttrain.models.attention import latent_layers
from posttrain.models.decodable import KNOWN, can_decode_fast, check_exact
from posttrain.models.decoder import FastDecoder
from posttrain.models.expert_adapters import adapted_weights
from posttrain.models.feed_forward import MIXTURES
from posttrain.models.forward import forward_mode_of
from posttrain.models.lora import has_adapters
from posttrain.models.paged_decoder import PagedDecoder
from posttrain.models.recurrent import attending_layers, recurrent_layers, state_bytes
from posttrain.models.routing import RouteShape, check_routes, watch_routers
from posttrain.models.shards import KEY, own_key_heads
from posttrain.rollout.native.drafts import Drafts
from posttrain.rollout.native.engine import NativeEngine
from posttrain.rollout.native.pool import Pool
from posttrain.rollout.native.speculation import MOST_ROWS, WIDEST, PassCost, Speculation
from posttrain.rollout.native.states import StatePool

TOGETHER = 2**31  # parameters that are multiplied before a step comes back: large models answer token by token
MOST = 64  # tokens of a row in one step; on a CUDA device the kernels' own number
HOST_STEP = 4e6  # parameters that a row multiplies while Python finds drafts and reads what a round made of them
LEAST_STATES = 4  # slots of a prompt, its first response, a kept turn and its continuation
UNKNOWN_LONGEST = 4096  # tokens of a sequence, if no limit is given
CACHE_SHARE = 0.3  # of the device's memory, where nothing is set
TOKENS, TOKENS_ON_CUDA = 8192, 16384  # of one step, where nothing is set: a GPU must be at it longer than the host


def can_run_native(module: torch.nn.Module) -> bool:
    """Whether the model's attention can be answered from the engine's cache."""
    return can_decode_fast(module) or forward_mode_of(module).packed


def build_native(
    module: torch.nn.Module,
    config: RolloutConfig,
    *,
    decode: Callable[[list[int]], str] | None,
    device: torch.device | None = None,
    share: bool = True,
    team: Team | None = None,
    fp8: bool = False,
    exact: bool = False,
    captures: bool = True,
    longest: int | None = None,
) -> tuple[NativeEngine, str]:
    """(engine, its name). It decodes on `device`, where the weights are while it works (by default where they are now).
    Shared, the trainer's parameters become views into the engine's weights; ranks of a team copy their parts. `exact`:
    log-probs have the bits that a training pass gives them. `captures`: steps are captured on a CUDA device, which not
    every module allows. `longest`: the most tokens of a sequence, if known."""
    fast = can_decode_fast(module)
    weight = next(module.parameters())
    device = device or weight.device
    share = share and team is None
    routes = _recorded_routes(module, config)
    if team is not None:
        check_can_cut(module, fast, team.size)
    if exact:
        check_exact(module, device)
    if recurs := bool(recurrent_layers(module)):
        _check_recurrent(module, config)
    captured = captures and team is None and not recurs and _on_triton(weight.dtype, device)
    if fast and share and device.type == "cuda" and adapted_weights(module):
        fast = False  # the general decoder runs the trainer's own products, and its captured steps are proved
    if fast:
        decoder = FastDecoder(module, share=share, team=team, device=device, exact=exact)
    else:
        decoder = PagedDecoder(module, captures=captured)
    together = MOST_STEPS if captured else max(1, min(MOST, TOGETHER // sum(p.numel() for p in module.parameters())))
    if team is not None:
        together = 1
    engine = NativeEngine(
        decoder,
        _build_pool(module, config, device, team=team, routes=routes, longest=longest),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=step_limit(config, device.type),
        tokens_per_step=together,
        tokens_unseen=STEPS_UNSEEN if captured else None,
        decode=decode,
        shares_weights=share or not fast,
        ranks=1 if team is None else team.size,
        speculation=_speculation(module, config, captured=captured),
    )
    engine.takes_adapters = engine.shares_weights and has_adapters(module)
    cut = f", cut over {engine.ranks} workers" if engine.ranks > 1 else ""
    cut += ", exact" if exact else ""
    cut += "" if routes is None else ", routes recorded"
    cut += "" if config.speculation is None else ", speculation"
    name = f"native ({'fused decoder' if fast else 'general decoder'}, {_kernels(weight.dtype, device)}{cut})"
    return (engine, use_fp8(engine, name)) if fp8 else (engine, name)


def _build_pool(
    module: torch.nn.Module,
    config: RolloutConfig,
    device: torch.device,
    *,
    team: Team | None,
    routes: RouteShape | None,
    longest: int | None,
) -> Pool:
    """The KV cache, and the slots for recurrent states, within the limit that the settings give."""
    limit = cache_limit(config, device.type, device_memory(device))
    if team is not None:
        limit = team.smallest(limit)  # machines may differ, but all ranks must admit the same requests
    per_token = bytes_per_token(module, 1 if team is None else team.size, latents=True)
    per_token += 0 if routes is None else routes.bytes_per_token
    per_state = state_bytes(module)
    limit, slots = split_cache(limit, per_token, per_state, 2 * config.max_num_seqs, longest)
    states = StatePool(device, limit=slots, bytes_per_slot=per_state)
    kind = next(module.parameters()).dtype
    return Pool(kind, device, limit_bytes=limit, bytes_per_token=per_token, routes=routes, states=states)


def _speculation(module: torch.nn.Module, config: RolloutConfig, *, captured: bool) -> Speculation | None:
    if config.speculation is None:
        return None
    size = sum(weight.numel() for weight in module.parameters())
    if captured:
        # Drafted tokens are further rows of a captured step. On an H200 such a step reads all weights and launches its
        # kernels whatever its rows (0.7 ms), a row adds its products, and the host keeps it waiting (3 ms at 8 rows).
        row = 4e-15 * size
        cost = PassCost(tile=WIDEST * MOST_ROWS, block=(5e-13 * size + 7e-4) / row, token=1.0, host=3e-3 / row)
    else:
        cost = PassCost(tile=8, block=5, token=0.4, host=HOST_STEP / size)
    return Speculation(Drafts(keep_across_batches=config.speculation == "epochs"), cost)


def _check_recurrent(module: Any, config: RolloutConfig) -> None:
    if config.speculation is not None:
        raise UserError(
            f"actor_rollout_ref.rollout.speculation={config.speculation}: layers of this model "
            f"({module.config.model_type}) have recurrent states, which drafted tokens would change for good; remove it"
        )


def _recorded_routes(module: torch.nn.Module, config: RolloutConfig) -> RouteShape | None:
    if not config.enable_rollout_routing_replay:
        return None
    shape = check_routes(module, "actor_rollout_ref.rollout.enable_rollout_routing_replay=True")
    watch_routers(module)  # for the general decoder, which runs them
    return shape


def use_fp8(engine: NativeEngine, name: str) -> str:
    """Have an engine decode with fp8 products from now on; its new name. An error where model or device cannot."""
    decoder, key = engine.decoder, "actor_rollout_ref.rollout.quantization=fp8"
    if not isinstance(decoder, FastDecoder):
        kinds = ", ".join((*KNOWN, *MIXTURES))
        raise UserError(f"{key}: this model is not one of those that decode with fp8 products ({kinds}); remove it")
    device = engine.pool.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        found, least = (".".join(map(str, one)) for one in (torch.cuda.get_device_capability(device), OLDEST))
        raise UserError(
            f"{key}: {torch.cuda.get_device_name(device)} has compute capability {found}, and matrix units multiply "
            f"fp8 from {least} on; remove the setting"
        )
    if adapted_weights(decoder.module):
        raise UserError(
            f"{key}: it is not built for experts with adapters, which multiply unrounded inputs. Remove it, or leave "
            "the experts out of actor_rollout_ref.model.target_modules"
        )
    decoder.use_fp8()
    engine.rounding = FP8
    return f"{name.removesuffix(')')}, fp8 products)"


def check_can_cut(module: Any, fast: bool, size: int) -> None:
    kind = module.config.model_type
    if not fast or kind not in KNOWN:
        what, do = splitting_problem(kind, size)
        raise UserError(f"{what}; {do}")


def splitting_problem(kind: str, size: int) -> tuple[str, str]:
    """What is wrong where `size` workers should hold an engine with a model of another kind, and what to do."""
    return (
        f"{KEY}={size}: models of the kind {kind} cannot be cut over the workers of an engine `native` "
        f"({', '.join(KNOWN)} can)",
        f"set {KEY.rpartition('.')[0]}.name=vllm, which cuts them, or the size to 1: every worker then decodes with a "
        "model of its own",
    )


def _kernels(dtype: torch.dtype, device: torch.device) -> str:
    if _on_triton(dtype, device):
        return "Triton kernels"
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return "torch kernels"
    problem = why_not()
    return f"torch kernels: {problem}" if problem else "compiled kernels"


def _on_triton(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cuda" and cuda.runs_here(torch.empty(0, dtype=dtype, device=device))


def device_memory(device: torch.device) -> int:
    """All the memory that the device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return machine_memory()


def step_limit(config: RolloutConfig, kind: str) -> int:
    """Tokens that one step may compute."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    return TOKENS_ON_CUDA if kind == "cuda" else TOKENS


def cache_limit(config: RolloutConfig, kind: str, memory: int) -> int:
    """Bytes that the cache may grow to. A share of what the device has, never of what is free now: how requests are
    scheduled must not depend on the moment."""
    if config.kv_cache_gb is not None:
        return int(config.kv_cache_gb * 2**30)
    share = config.gpu_memory_utilization if kind == "cuda" else None
    return int(memory * (share or CACHE_SHARE))


def split_cache(limit: int, per_token: int, per_state: int, most: int, longest: int | None) -> tuple[int, int]:
    """(bytes for keys and values, slots for recurrent states, at most `most`): as many sequences fit with their
    states as with their tokens, if they are half as long as they may be."""
    if not per_state:
        return limit, 0
    slots = min(most, limit // (per_state + per_token * (longest or UNKNOWN_LONGEST) // 2))
    if slots < LEAST_STATES:
        slots = LEAST_STATES
        if slots * per_state > limit // 2:
            raise UserError(
                "actor_rollout_ref.rollout.kv_cache_gb: the recurrent states of a sequence have "
                f"{per_state / 2**20:.1f} MiB, and a cache of {limit / 2**20:.1f} MiB holds too few of them; raise it"
            )
    return limit - slots * per_state, slots


def bytes_per_token(module: Any, ranks: int = 1, latents: bool = False) -> int:
    """Keys and values of one token in all layers, or its latents, on each of the ranks that hold the model."""
    if not attending_layers(module):
        return 0
    heads, size = cached_heads(module.config.get_text_config())
    sizes = [layer.kv_lora_rank + layer.qk_rope_head_dim for layer in latent_layers(module) if latents]
    others = 2 * max(0, attending_layers(module) - len(sizes)) * own_key_heads(heads, ranks) * size
    return (sum(sizes) + others) * next(module.parameters()).element_size()


def cached_heads(config: Any) -> tuple[int, int]:
    """(heads of keys, their size) in the cache. Latent attention that expands its latents itself has keys for every
    head, larger than its values, and its `head_dim` is that of the rotated part alone."""
    queries = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None) and getattr(config, "qk_rope_head_dim", None):
        return queries, max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    heads = getattr(config, "num_key_value_heads", None) or queries
    return heads, getattr(config, "head_dim", None) or config.hidden_size // queries

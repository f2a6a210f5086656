"""What posttrain puts into SGLang's own process: a sampler, the scale of scores, and a cache that a CPU gives back.

SGLang's sampler takes seeds only where its deterministic mode is on, knows a repetition penalty for responses only, and
gives one of the two log-probs. Here every row is drawn as `native` draws it: by a hash of its own seed and place. Both
log-probs come from that one pass. Everything that is no public interface of SGLang is in this file.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain.rollout.base import Sampling
from posttrain.rollout.sampling import sample, sample_plain, uniforms
from posttrain.rollout.sglang.settings import SAMPLER

DRAWN = "drawn"
"""The name under which log-probs of what was sampled from come beside a row's tokens."""
DROP, TAKE = "posttrain_drop_cache", "posttrain_take_cache"
"""Calls that SGLang's scheduler answers for posttrain."""
_SCALE = [1.0]
_SENT = ("temperature", "greedy", "top_p", "top_k", "min_p", "repetition_penalty")


def sampler_params(sampling: Sampling, seed: int, place: int) -> dict[str, Any]:
    """How a row is to be sampled, as it is sent with its request; `place` is that of its next token."""
    return {"seed": seed, "place": place, "sampling": {name: getattr(sampling, name) for name in _SENT}}


def draw(logits_BV: torch.Tensor, rows: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, log-probs of the model, log-probs of what was sampled from) of SGLang's requests, each (B,)."""
    logits_BV = logits_BV.contiguous()  # SGLang pads its vocabulary, and cuts that off
    asked = [row.sampling_params.custom_params for row in rows]
    settings = [Sampling(max_tokens=1, **one["sampling"]) for one in asked]
    seed_B = np.array([one["seed"] for one in asked], dtype=np.uint64)
    place_B = np.array([one["place"] + len(row.output_ids) for one, row in zip(asked, rows, strict=True)], np.int64)
    plain = np.array([setting.plain for setting in settings])
    tokens_B, log_probs_B = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.float32)
    drawn_B = np.zeros(len(rows), np.float32)
    if (index := np.flatnonzero(plain)).size:
        temperature = np.array([1.0 if s.greedy else s.temperature for s in settings], np.float32)
        greedy = np.array([s.greedy for s in settings], np.uint8)
        made = sample_plain(
            logits_BV, index, *(np.ascontiguousarray(x[index]) for x in (temperature, greedy, seed_B, place_B))
        )
        tokens_B[index], log_probs_B[index] = made
        drawn_B[index] = log_probs_B[index]
    if (index := np.flatnonzero(~plain)).size:
        uniform = torch.from_numpy(uniforms(seed_B[index], place_B[index]))
        seen = [
            (row.origin_input_ids, row.output_ids) for row, is_plain in zip(rows, plain, strict=True) if not is_plain
        ]
        chosen = logits_BV[torch.from_numpy(index).to(logits_BV.device)]
        made = sample(chosen, [setting for setting in settings if not setting.plain], uniform, seen)
        tokens_B[index], log_probs_B[index], drawn_B[index] = (part.cpu().numpy() for part in made)
    parts = (tokens_B, log_probs_B, drawn_B)
    return tuple(torch.from_numpy(part).to(logits_BV.device) for part in parts)  # pyright: ignore


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """What SGLang starts as its scheduler's process."""
    from sglang.srt.managers.scheduler import run_scheduler_process  # pyright: ignore

    install()
    run_scheduler_process(*args, **kwargs)


def install() -> None:
    """SGLang in this process samples, scores and gives memory back as posttrain asks."""
    from sglang.srt.layers.logits_processor import LogitsProcessor  # pyright: ignore
    from sglang.srt.layers.sampler import Sampler, register_sampler_backend  # pyright: ignore
    from sglang.srt.managers.scheduler import Scheduler  # pyright: ignore
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch  # pyright: ignore

    register_sampler_backend(SAMPLER, lambda: own_sampler(Sampler)())
    _follow_rows(ForwardBatch)
    _divide_logits(LogitsProcessor)
    setattr(Scheduler, DROP, drop_cache)
    setattr(Scheduler, TAKE, take_cache)


def own_sampler(base: type) -> type:
    """SGLang's sampler, with posttrain's choice of tokens."""

    class OwnSampler(base):
        def forward(self, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            tokens_B, log_probs_B, drawn_B = draw(logits_output.next_token_logits, sampling_info.rows)
            logits_output.next_token_logprobs = log_probs_B
            logits_output.customized_info = {DRAWN: drawn_B.tolist()}
            return tokens_B

    return OwnSampler


def _follow_rows(batches: Any) -> None:
    """The requests of a batch are known where it is sampled, and the scale of their scores before."""
    init_new = batches.init_new.__func__

    def following(cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        made = init_new(cls, batch, *args, **kwargs)
        if made.sampling_info is not None:
            made.sampling_info.rows = [*batch.reqs]
            asked = [row.sampling_params.custom_params or {} for row in batch.reqs]
            _SCALE[0] = max((one.get("scale", 1.0) for one in asked), default=1.0)
        return made

    batches.init_new = classmethod(following)


def _divide_logits(processor: Any) -> None:
    """Log-probs of prompts are those of a temperature, too. Rows of other scales are not under way meanwhile."""
    get_logits = processor._get_logits

    def divided(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = get_logits(self, *args, **kwargs)
        return logits if _SCALE[0] == 1.0 else logits / _SCALE[0]

    processor._get_logits = divided


# -- the memory of a cache on a CPU -------------------------------------------------------------------------------
def drop_cache(scheduler: Any) -> None:
    """Nothing is in it."""
    for storage, _ in _storages(scheduler):
        storage.resize_(0)


def take_cache(scheduler: Any) -> None:
    for storage, size in _storages(scheduler):
        storage.resize_(size)
    for buffer in _buffers(scheduler):
        buffer.zero_()


def _buffers(scheduler: Any) -> list[torch.Tensor]:
    cache = scheduler.token_to_kv_pool_allocator.get_kvcache()
    return [*cache.k_buffer, *cache.v_buffer]


def _storages(scheduler: Any) -> list[tuple[Any, int]]:
    """Each once, with its size. All layers may lie in one."""
    found = {buffer.untyped_storage()._cdata: buffer for buffer in _buffers(scheduler)}
    sizes = scheduler.__dict__.setdefault(
        "posttrain_cache_sizes", {key: buffer.untyped_storage().nbytes() for key, buffer in found.items()}
    )
    return [(buffer.untyped_storage(), sizes[key]) for key, buffer in found.items()]

"""Batch generation above the engine contract: requests in, a DataProto of responses out.

Shapes: B rows, P prompt width, R response width.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from typing import Any

import numpy as np
import torch

from posttrain import pulse
from posttrain.batch.fields import ROUTES, object_array
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output, Request, RolloutEngine, Sampling
from posttrain.rollout.stored import columns_of_stored

# How long a request that is ready may wait for running rows, in seconds or in steps. Each return costs a call between
# processes (about a millisecond), so it is not done after every step.
JOIN_S, STEPS_TOGETHER = 0.03, 4


def advance(engine: RolloutEngine, until: Callable[[], bool] = lambda: False) -> list[Output]:
    """Step until some request has ended, none is left, or `until()` is true; returns what ended."""
    ended: list[Output] = []
    with no_garbage_collection(), pulse.work("responses", 0) as work:
        while not ended and engine.has_work() and not until():
            ended = engine.advance()
            work.advance(running_tokens=engine.running_tokens())
    return ended


def admission_deadline(engine: RolloutEngine) -> Callable[[], bool]:
    """For `advance`: ends it soon, between two steps, so that requests that are ready by then can be admitted."""
    if engine.ranks > 1:  # ranks that hold an engine together must make the same steps, whatever their clocks say
        steps = count()
        return lambda: next(steps) >= STEPS_TOGETHER
    end = time.monotonic() + JOIN_S

    def is_over() -> bool:
        # While the device is busy, requests that arrive can still join the next step.
        time.sleep(max(0.0, min(engine.ahead_s(), end - time.monotonic())))
        return time.monotonic() >= end

    return is_over


def generate(
    engine: RolloutEngine, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], seeds: Sequence[int]
) -> list[Output]:
    """One output per prompt, in order, with its number as `id`. A call that fails leaves no request in the engine."""
    outputs: dict[Any, Output] = {}
    longest = max((sampling.max_tokens for sampling in samplings), default=0)
    try:
        with no_garbage_collection(), pulse.work("responses", len(prompts), most_tokens=longest) as work:
            for row, (prompt, sampling, seed) in enumerate(zip(prompts, samplings, seeds, strict=True)):
                engine.submit(Request(row, prompt, sampling, seed))
            while engine.has_work():
                ended = advance(engine)
                work.advance(len(ended), sum(len(output.token_ids) for output in ended), work.running_tokens)
                outputs.update((output.id, output) for output in ended)
    except BaseException:
        with suppress(Exception):  # the first error is the one to raise
            engine.abort(range(len(prompts)))
        raise
    return [outputs[row] for row in range(len(prompts))]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Steps make no reference cycles, but so many objects that collections start, each of which scans all memory."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def to_batch(prompts: Sequence[Sequence[int]], outputs: Sequence[Output], pad_token_id: int) -> DataProto:
    """Prompts left-padded and responses right-padded to the batch's longest, with masks and rollout log-probs.

    `response_mask` marks sampled tokens; observation tokens are in `attention_mask` only. `sampling_log_probs` are
    there if filters or penalties changed the distribution that was sampled from. Responses that a worker keeps
    (`stored.py`) stay there: the batch names them.
    """
    facts = {
        "finish_reason": np.array([output.finish_reason for output in outputs], dtype=object),
        "policy_versions": object_array([output.versions for output in outputs]),
    }
    if (stored := columns_of_stored(prompts, outputs, pad_token_id)) is not None:
        return DataProto(stored[0], {**facts, **stored[1]})
    prompt_BP, prompt_mask_BP = _pad(prompts, pad_token_id, left=True)
    responses = [output.token_ids for output in outputs]
    response_BR, real_BR = _pad(responses, pad_token_id, left=False)
    log_probs_BR = _like([output.log_probs for output in outputs], real_BR)
    attention_mask = torch.cat([prompt_mask_BP, real_BR], -1)
    drawn: dict[str, torch.Tensor] = {}
    if any(output.sampling_log_probs is not None for output in outputs):
        rows = [x.log_probs if x.sampling_log_probs is None else x.sampling_log_probs for x in outputs]
        drawn["sampling_log_probs"] = _like(rows, real_BR)
    return DataProto.from_dict(
        tensors={
            **drawn,
            "prompts": prompt_BP,
            "responses": response_BR,
            "input_ids": torch.cat([prompt_BP, response_BR], -1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": _written(outputs, real_BR),
            "rollout_log_probs": log_probs_BR,
        },
        non_tensors={**facts, **_routes(prompts, outputs)},
    )


def _routes(prompts: Sequence[Sequence[int]], outputs: Sequence[Output]) -> dict[str, np.ndarray]:
    """`ROUTES`, where they were recorded: an array (tokens, layers, top_k) for each row, of its first tokens.

    The arrays are as long as what was computed: padded to one width they would be larger than all else in a batch.
    """
    known = next((output.routes for output in outputs if output.routes is not None), None)
    if known is None:
        return {}
    # All but the last token: nothing is predicted from it, so the trainer does not compute it either.
    ends = (len(prompt) + len(output.token_ids) - 1 for prompt, output in zip(prompts, outputs, strict=True))
    found = [known[:0] if x.routes is None else x.routes[:end] for x, end in zip(outputs, ends, strict=True)]
    return {ROUTES: object_array(found)}


def _written(outputs: Sequence[Output], real_BR: torch.Tensor) -> torch.Tensor:
    """1 where the policy sampled the token."""
    if all(output.written is None for output in outputs):
        return real_BR
    rows = [[True] * len(output.token_ids) if output.written is None else output.written for output in outputs]
    return _like(rows, real_BR).to(real_BR.dtype)


def _like(rows: Sequence[Any], mask_BR: torch.Tensor) -> torch.Tensor:
    """The numbers of each response at the places of its tokens, and 0 elsewhere."""
    padded = np.zeros(mask_BR.shape, np.float32)
    padded[mask_BR.numpy().astype(bool)] = np.concatenate([np.asarray(row, np.float32) for row in rows])
    return torch.from_numpy(padded)


def _pad(rows: Sequence[Sequence[int]], value: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    width = int(lengths.max())
    places = np.arange(width)
    real = places >= width - lengths[:, None] if left else places < lengths[:, None]
    padded = np.full(real.shape, value, np.int64)
    padded[real] = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    return torch.from_numpy(padded), torch.from_numpy(real.astype(np.int64))

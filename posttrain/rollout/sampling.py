"""Sampling of next tokens: its settings, exact filters, and randomness that belongs to the request alone.

The random number of a request's t-th token is a hash of (its seed, t). A sample therefore depends on its seed and on
its own logits, never on its neighbours in the batch, their order, or how often the engine was interrupted.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from posttrain.config.root import PPOConfig
from posttrain.kernels import cuda
from posttrain.kernels.compiled import kernel
from posttrain.kernels.ordered import token_log_probs
from posttrain.rollout.base import Sampling

Seen = tuple[Sequence[int], Sequence[int]]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row, from its seed (uint64) and the place of the token in its response."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + _GOLDEN) + _GOLDEN * (places.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def combine_seeds(*parts: int) -> int:
    """One 63-bit seed from several numbers (run seed, step, row, ...)."""
    return combine_state(*parts) & (2**63 - 1)


def combine_state(*parts: int) -> int:
    # `_mix` with Python's integers: each turn of a conversation needs one seed, for which NumPy takes 4 times as long.
    state, all_bits = 0, 2**64 - 1
    for part in parts:
        x = ((state + int(_GOLDEN)) ^ part) & all_bits
        x = ((x ^ (x >> 30)) * int(_MIX_1)) & all_bits
        x = ((x ^ (x >> 27)) * int(_MIX_2)) & all_bits
        state = x ^ (x >> 31)
    return state


def sample_seeds(serials: Sequence[int], samples: Sequence[int], *parts: int) -> list[int]:
    """`combine_seeds(*parts, serial, sample)` for each of the samples, all at once."""
    with np.errstate(over="ignore"):
        state = np.uint64(combine_state(*parts))
        for numbers in (serials, samples):
            state = _mix((state + _GOLDEN) ^ np.asarray(numbers, dtype=np.uint64))
    return (np.asarray(state) & np.uint64(2**63 - 1)).tolist()


def row_seeds(rows: int, *parts: int) -> list[int]:
    """`combine_seeds(*parts, row)` for each of the rows, all at once."""
    with np.errstate(over="ignore"):
        state = np.uint64(combine_state(*parts)) + _GOLDEN
        mixed = _mix(state ^ np.arange(rows, dtype=np.uint64))
    return [int(seed) & (2**63 - 1) for seed in mixed]


def sample(
    logits_BV: torch.Tensor, settings: Sequence[Sampling], uniform_B: torch.Tensor, seen: Sequence[Seen]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, log-probs of the model, log-probs of what was sampled from: after penalties and filters), each (B,).

    `seen` holds each row's prompt and response for the repetition penalty. A greedy row samples from nothing: its two
    log-probs are the same.
    """
    logits_BV = _wide(logits_BV)
    temperatures = [1.0 if s.greedy else s.temperature for s in settings]
    temperature_B = logits_BV.new_tensor(temperatures)
    log_p_BV = torch.log_softmax(logits_BV / temperature_B[:, None], -1)
    drawn_BV = _penalised(logits_BV, settings, seen)
    drawn_log_p = log_p_BV if drawn_BV is logits_BV else torch.log_softmax(drawn_BV / temperature_B[:, None], -1)
    p_BV = drawn_log_p.exp()
    if any(s.filtered for s in settings):
        p_BV = _filtered(p_BV, settings)
    tokens_B = _inverse_cdf(p_BV, uniform_B.to(p_BV.device))
    greedy_B = torch.tensor([s.greedy for s in settings], device=p_BV.device)
    tokens_B = torch.where(greedy_B, drawn_log_p.argmax(-1), tokens_B)
    log_probs_B = torch.empty_like(temperature_B)
    for temperature in set(temperatures):  # nearly always one
        rows = [row for row, one in enumerate(temperatures) if one == temperature]
        chosen = rows if len(rows) < len(temperatures) else slice(None)
        # With the same bits as rows without filters.
        log_probs_B[chosen] = _log_probs(logits_BV[chosen], tokens_B[chosen], temperature).to(log_probs_B.dtype)
    drawn_B = (p_BV.gather(1, tokens_B[:, None]).squeeze(1).double() / p_BV.double().sum(-1)).log()
    return tokens_B, log_probs_B, torch.where(greedy_B, log_probs_B, drawn_B.to(log_probs_B.dtype))


def sample_plain(
    logits_NV: torch.Tensor,
    source_B: np.ndarray,
    temperature_B: np.ndarray,
    greedy_B: np.ndarray,
    seed_B: np.ndarray,
    place_B: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, log-probs) without filters or penalties; row b samples from logits `source_B[b]` with the number of
    `uniforms(seed_B, place_B)`."""
    if cuda.runs_here(logits_NV):
        return _sample_cuda(logits_NV, source_B, temperature_B, greedy_B, seed_B, place_B)
    uniform_B = uniforms(seed_B, place_B)
    function = kernel("sample", logits_NV)
    if function is not None:
        rows, size = len(source_B), logits_NV.shape[1]
        tokens_B, log_probs_B = np.empty(rows, np.int64), np.empty(rows, np.float32)
        arrays = (source_B, temperature_B, greedy_B, uniform_B, tokens_B, log_probs_B)
        threads = torch.get_num_threads() if rows * size > 16384 else 1
        function(logits_NV.data_ptr(), *(array.ctypes.data for array in arrays), rows, size, threads)
        return tokens_B, log_probs_B
    device = logits_NV.device
    source, temperature, greedy, uniform = (
        torch.from_numpy(x).to(device) for x in (source_B, temperature_B, greedy_B.astype(bool), uniform_B)
    )
    log_p_BV = torch.log_softmax(_wide(logits_NV)[source] / temperature[:, None], -1)
    tokens = torch.where(greedy, log_p_BV.argmax(-1), _inverse_cdf(log_p_BV.exp(), uniform))
    return tokens.cpu().numpy(), log_p_BV.gather(1, tokens[:, None]).squeeze(1).cpu().numpy()


def _sample_cuda(logits_NV: torch.Tensor, source_B, temperature_B, greedy_B, seed_B, place_B):
    tokens_B, log_probs_B = sample_unread(logits_NV, source_B, temperature_B, greedy_B, seed_B, place_B)
    return tokens_B.cpu().numpy(), log_probs_B.cpu().numpy()


def sample_unread(
    logits_NV: torch.Tensor, source_B, temperature_B, greedy_B, seed_B, place_B
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `sample_plain` gives, left on the device: the call does not wait for the result."""
    from posttrain.kernels.cuda.sampling import sample_rows

    arrays = (source_B, temperature_B, greedy_B.astype(np.int32), seed_B.view(np.int64), place_B)
    return sample_rows(logits_NV, *(cuda.to_device(torch.from_numpy(array), logits_NV.device) for array in arrays))


def log_probs_of(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden_TE: torch.Tensor, labels_T: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Log-probs of labels, a chunk of tokens at a time: the logits of all of them are never held at once."""
    parts = []
    for hidden, labels in zip(hidden_TE.split(1024), labels_T.split(1024), strict=True):
        parts.append(_log_probs(logits(hidden), labels, temperature))
    return torch.cat(parts) if parts else hidden_TE.new_zeros(0)


def _log_probs(logits_TV: torch.Tensor, labels_T: torch.Tensor, temperature: float) -> torch.Tensor:
    if cuda.runs_here(logits_TV):
        from posttrain.kernels.cuda.ordered import label_log_probs

        return label_log_probs(logits_TV, labels_T, temperature)
    found = token_log_probs(logits_TV, labels_T, temperature)
    if found is not None:
        return found[0]
    return torch.log_softmax(_wide(logits_TV) / temperature, -1).gather(1, labels_T[:, None]).squeeze(1)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _inverse_cdf(p_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The first token at which the cumulative probability exceeds the uniform number; never one of probability 0."""
    cdf_BV = p_BV.double().cumsum(-1)
    target_B = uniform_B * cdf_BV[:, -1]
    index_B = torch.searchsorted(cdf_BV, target_B[:, None], right=True).squeeze(1)
    last_B = p_BV.shape[1] - 1 - (p_BV.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(index_B, last_B)


def _filtered(p_BV: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """Probabilities with everything outside top-k, then top-p, then min-p set to 0; ties go to the smaller id."""
    size = p_BV.shape[1]
    sorted_p, order = p_BV.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([s.top_k if s.top_k > 0 else size for s in settings], device=p_BV.device)
    sorted_p = sorted_p.masked_fill(torch.arange(size, device=p_BV.device) >= top_k[:, None], 0.0)
    sorted_p = sorted_p / sorted_p.sum(-1, keepdim=True)
    top_p = p_BV.new_tensor([s.top_p for s in settings])
    before = sorted_p.double().cumsum(-1) - sorted_p  # mass of the likelier tokens: below top_p, the token is needed
    sorted_p = sorted_p.masked_fill((before >= top_p[:, None]) & (top_p[:, None] < 1.0), 0.0)
    min_p = p_BV.new_tensor([s.min_p for s in settings])
    sorted_p = sorted_p.masked_fill(sorted_p < min_p[:, None] * sorted_p[:, :1], 0.0)
    return torch.zeros_like(p_BV).scatter(1, order, sorted_p)


def _penalised(logits_BV: torch.Tensor, settings: Sequence[Sampling], seen: Sequence[Seen]) -> torch.Tensor:
    """Logits of tokens seen before, divided (if positive) or multiplied (if negative) by the penalty."""
    if all(s.repetition_penalty == 1.0 for s in settings):
        return logits_BV
    out = logits_BV.clone()
    for row, (setting, (prompt, response)) in enumerate(zip(settings, seen, strict=True)):
        index = torch.tensor(sorted({*prompt, *response}), device=out.device)
        scores = out[row, index]
        penalty = setting.repetition_penalty
        out[row, index] = torch.where(scores > 0, scores / penalty, scores * penalty)
    return out


def sampling_for(config: PPOConfig, *, validate: bool = False, end_ids: tuple[int, ...] = ()) -> Sampling:
    """How training's responses are sampled, or validation's; `end_ids` end a response."""
    rollout = config.actor_rollout_ref.rollout
    chosen: Any = rollout.val_kwargs if validate else rollout
    return Sampling(
        max_tokens=config.data.max_response_length,
        temperature=chosen.temperature,
        greedy=(validate and not rollout.val_kwargs.do_sample) or chosen.temperature == 0,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=0.0 if validate else rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        stop_token_ids=() if rollout.ignore_eos else end_ids,
        stop=tuple(rollout.stop),
    )


def sampling_words(config: PPOConfig, *, validate: bool = False) -> dict[str, Any]:
    """The same for people: without the ids that end a response."""
    sampling = vars(sampling_for(config, validate=validate))
    return {name: value for name, value in sampling.items() if name != "stop_token_ids"}

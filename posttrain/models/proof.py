"""Proves, when a model has been loaded, which forward passes give transformers' own log-probs.

Two short sequences with a common prefix are computed one at a time by the model as transformers created it. Then
training's forward passes are tried on them: packed (with and without a shared prefix), padded, one at a time. Only what
agrees is used, and a note names those that do not. Models that let tokens see later ones are rejected. Sliding windows
are narrowed meanwhile, so that they affect short sequences.

In half precision three pairs of sequences are computed, and a pass must agree on two of them. On some tokens a trained
model is unstable: one of its first tokens may or may not become an attention sink, whose activations are thousands of
times larger. Rounding decides it, and moves that token's log-prob by several nats. A wrong pass may agree with one pair
by chance, but rarely with two.

Shapes: T packed tokens, N predicted tokens of one or of all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch

from posttrain.errors import UserError
from posttrain.kernels.packed_attention import PackedLayout, packed_rows
from posttrain.kernels.quantized import FP8
from posttrain.kernels.train import ends_of_responses
from posttrain.models.attention import ATTENTION, configurations, set_attention
from posttrain.models.forward import (
    ForwardMode,
    hidden_states,
    log_probs_of,
    own_logits,
    padding,
    token_log_probs,
    without_adapters,
)
from posttrain.models.recurrent import ATTENDING, STATEFUL, answer_recurrence, recurrent_layers

COMMON, TAILS = 4, (3, 5)  # tokens of the common prefix, and those that follow in each sequence
WINDOW = 3  # what sliding windows are narrowed to
SEEDS = (20240911, 20240912, 20240913)  # of the pairs of sequences; float32 and float64 need the first one only
ALLOWED = {torch.float64: (1e-6, 1e-4, 0.0, 0.0), torch.float32: (1e-4, 1e-3, 1e-5, 1e-4)}
HALF = (0.1, 2.0, 0.02, 0.1)
# Mean and largest difference of log-probs that rounding explains, and what is added per nat of the average log-prob: on
# tokens that a trained model finds unlikely (14 nats), its own bfloat16 pass is off by 0.1, and fp8 by 0.5. In half
# precision a router may choose other experts.
ALLOWED[FP8] = (0.3, 4.0, 0.06, 0.3)
PACKABLE = ATTENDING | STATEFUL | {"moe", "mlp"}  # layer types that are computed packed


class ProofError(UserError):
    """No forward pass of the model is right; the text says why."""


Compute = Callable[[Any, list[list[int]]], Sequence[torch.Tensor]]


@dataclass
class Plain:
    """What the model computed for a pair of rows before anything of ours was installed, by window width, and for the
    `others` among the pairs."""

    rows: list[list[int]]
    results: dict[int | None, Sequence[torch.Tensor]]
    others: list[Plain] = field(default_factory=list)


def proof_rows(config: Any, seed: int = SEEDS[0]) -> list[list[int]]:
    """Return two sequences of plain tokens, without ids that have a meaning (padding, images)."""
    settings = {**vars(config), **vars(config.get_text_config())}
    special = {value for name, value in settings.items() if name.endswith(("_token_id", "_token_index"))
               and isinstance(value, int)}  # fmt: skip
    size, generator = config.get_text_config().vocab_size, torch.Generator().manual_seed(seed)
    plain = [token for token in torch.randperm(size, generator=generator).tolist()[:4096] if token not in special]
    plain = (plain or [0]) * (COMMON + sum(TAILS))
    common, tails = plain[:COMMON], plain[COMMON : COMMON + sum(TAILS)]
    longest = max(COMMON + 1, getattr(config.get_text_config(), "max_position_embeddings", None) or size)
    return [row[:longest] for row in (common + tails[: TAILS[0]], common + tails[TAILS[0] :])]


@torch.no_grad()
def compute_plain(model: Any, what: str, compute: Compute) -> Plain:
    """Compute the proof rows as transformers does; `what` names the model in errors."""
    is_half = without_adapters(model).dtype not in (torch.float32, torch.float64)
    pairs = [Plain(proof_rows(model.config, seed), {}) for seed in (SEEDS if is_half else SEEDS[:1])]
    try:
        for pair in pairs:
            for window in windows(model):
                with narrow_window(model, window):
                    pair.results[window] = compute(model, pair.rows)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ProofError(f"{what}: transformers' own forward pass fails on plain tokens: {error}") from error
    first, *first.others = pairs
    return first


def plain_pass(model: Any, what: str) -> Plain:
    """Return log-probs as transformers computes them, one sequence at a time."""
    plain = compute_plain(model, what, _own_each)
    first, second = (log_probs[: COMMON - 1] for log_probs in plain.results[None])
    if not agree(first, second, model):
        raise ProofError(
            f"{what}: in this model ({model.config.model_type}) tokens see those that come after them, so it gives no "
            "log-probs of next tokens; give a decoder-only language model"
        )
    return plain


@torch.no_grad()
def find_forward_mode(model: Any, plain: Plain, what: str) -> ForwardMode:
    """Find the passes that agree with transformers'. If packed ones do, the model keeps our attention."""

    def why_not(compute: Compute) -> str | None:
        return disagreement(model, plain, compute, lambda ours_N, theirs_N: agree(ours_N, theirs_N, model))

    own, reason = model.config._attn_implementation, "it has layers that cannot be packed"
    if layer_kinds(model) <= PACKABLE:
        set_attention(model, ATTENTION)
        answer_recurrence(model)
        if (reason := why_not(_packed) or why_not(_padded)) is None:
            return ForwardMode(packed=True, padded=True)
        set_attention(model, own)
    split = why_not(_alone) is None
    if not split and (unsteady := why_not(_own_each)):
        raise ProofError(f"{what}: the model's own forward pass does not give the same twice: {unsteady}")
    padded = why_not(_padded if split else _own) is None
    return ForwardMode(padded=padded, split_head=split, note=_words(model, reason, padded, split))


def _words(model: Any, reason: str, padded: bool, split: bool) -> str:
    how = "padded rows" if padded else "one row at a time, which is slow"
    head = "" if split else ", all logits at once"
    return (
        f"{model.config.model_type}: packed rows do not give what transformers' own forward pass gives "
        f"({' '.join(reason.split())[:200]}); it is computed in {how}{head}."
    )


def disagreement(model: Any, plain: Plain, compute: Compute, near: Callable[..., bool]) -> str | None:
    """Return why a way to compute the rows cannot be used; None if it gives the plain results of most pairs."""

    def agrees_on(pair: Plain) -> bool:
        for window, expected in pair.results.items():
            with narrow_window(model, window):
                found = compute(model, pair.rows)
            # A packed pass computes the rows twice; others may leave out some of the results.
            if not all(map(near, found, cycle(expected))):
                return False
        return True

    pairs = [plain, *plain.others]
    missing, left = len(pairs) // 2 + 1, len(pairs)
    try:
        for pair in pairs:
            missing, left = missing - agrees_on(pair), left - 1
            if missing == 0:
                return None
            if missing > left:
                break
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model's own code may raise anything on inputs that it was not written for
        return f"{type(error).__name__}: {error}"
    return "the log-probs differ"


def agree(ours_N: torch.Tensor, theirs_N: torch.Tensor, model: Any) -> bool:
    """Whether log-probs are equal up to the rounding of the model's dtype."""
    return not beyond_rounding(ours_N, theirs_N, without_adapters(model).dtype)


def beyond_rounding(ours_N: torch.Tensor, theirs_N: torch.Tensor, dtype: torch.dtype) -> str:
    """Say by how much log-probs differ beyond the dtype's rounding; empty if they do not."""
    ours_N, theirs_N = ours_N.double(), theirs_N.double()
    gap_N, size = (ours_N - theirs_N).abs(), float(theirs_N.abs().mean())
    mean, most, mean_share, most_share = ALLOWED.get(dtype, HALF)
    mean, most = mean + mean_share * size, most + most_share * size
    if bool(gap_N.mean() <= mean) and bool(gap_N.max() <= most):
        return ""
    return (
        f"by {float(gap_N.mean()):.3g} on average and {float(gap_N.max()):.3g} at most, where {dtype} explains "
        f"{mean:.3g} and {most:.3g}"
    )


# -- forward passes to compare: log-probs of all tokens except the first, per sequence ------------------------------
def _own(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    ids_BS, mask_BS = padding(rows, model.device)
    logits = own_logits(model, ids_BS, mask_BS)
    return [log_probs_of(logits[at, : len(row) - 1], ids_BS[at, 1 : len(row)], 1.0)[0] for at, row in enumerate(rows)]


def _padded(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    ids_BS, mask_BS = padding(rows, model.device)
    hidden = hidden_states(model, ids_BS, None, mask_BS)
    return [
        token_log_probs(model, hidden[at, : len(row) - 1], ids_BS[at, 1 : len(row)], 1.0)[0]
        for at, row in enumerate(rows)
    ]


def _alone(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    return [_padded(model, [row])[0] for row in rows]


def _own_each(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    return [_own(model, [row])[0] for row in rows]


def _packed(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    # Both sequences with a shared prefix, then both again, each by itself.
    first, second = rows
    ids = [*first, *second[COMMON:], *first, *second]
    positions = [*range(len(first)), *range(COMMON, len(second)), *range(len(first)), *range(len(second))]
    own = [len(row) - COMMON for row in rows]
    segments = [0] * COMMON + [1] * own[0] + [2] * own[1] + [0] * (len(first) + len(second))
    ids_T, position_T = (torch.tensor(x, device=model.device) for x in (ids, positions))
    lengths = [COMMON + sum(own), len(first), len(second)]
    end_T = torch.from_numpy(ends_of_responses(lengths, np.array(segments)))
    layout = PackedLayout(lengths, model.device, end_T=end_T, position_T=position_T)
    hidden_TE = checked_hidden(model, ids_T, position_T, layout)
    places = [
        [*range(len(first) - 1)],
        [*range(COMMON), *range(len(first), lengths[0] - 1)],
        [*range(lengths[0], lengths[0] + len(first) - 1)],
        [*range(lengths[0] + len(first), len(ids) - 1)],
    ]
    return [
        token_log_probs(model, hidden_TE[place_N], torch.tensor(row[1:], device=model.device), 1.0)[0]
        for place_N, row in zip(places, [first, second, first, second], strict=True)
    ]


def checked_hidden(model: Any, ids_T: torch.Tensor, position_T: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    # Also checks that every layer used the layout: with small weights, ignoring it would hardly change the numbers.
    with packed_rows(layout):
        hidden_TE = hidden_states(model, ids_T[None], position_T[None])[0]
    if layout.answered < _layers_to_answer(model):
        raise NotImplementedError(
            "attention or recurrence does not go through transformers' attention and cache interfaces in every layer"
        )
    return hidden_TE


def _layers_to_answer(model: Any) -> int:
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    if kinds is None:
        return model.config.get_text_config().num_hidden_layers
    attending = sum(kind in ATTENDING for kind in kinds)
    return attending + max(len(recurrent_layers(model)), sum(kind in STATEFUL for kind in kinds))


# -- the model while it is tried ------------------------------------------------------------------------------------
def layer_kinds(model: Any) -> set[str]:
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])


def _holders(model: Any) -> list[Any]:
    parts = [*model.modules(), *configurations(model)]
    return [part for part in parts if type(vars(part).get("sliding_window")) is int]


def windows(model: Any) -> list[int | None]:
    return [None, WINDOW] if any(part.sliding_window > WINDOW for part in _holders(model)) else [None]


@contextmanager
def narrow_window(model: Any, window: int | None) -> Iterator[None]:
    held = [(part, part.sliding_window) for part in _holders(model)] if window is not None else []
    try:
        for part, _ in held:
            part.sliding_window = window
        yield
    finally:
        for part, width in held:
            part.sliding_window = width

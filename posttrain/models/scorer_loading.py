"""Loads reward models: folders that `AutoModelForSequenceClassification` loads with one label, and causal LMs with a
value head, which become such classifiers.

Value heads of other trainers are one linear layer, stored as `v_head.summary` (TRL, LLaMA-Factory), `v_head`,
`value_head`, `score` or `reward_head` in the model's safetensors files or in `value_head.safetensors`.

A loaded model is proven to give packed or padded sequences the scores that each gets alone. That works as in
`proof.py`, on the same two sequences. All scores of an untrained head are equal and prove nothing, so its inputs, the
hidden states, are compared too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from posttrain.config.model import SCORE_HEADS
from posttrain.errors import UserError
from posttrain.kernels.packed_attention import PackedLayout
from posttrain.models.attention import ATTENTION, set_attention
from posttrain.models.forward import ForwardMode, hidden_states
from posttrain.models.loading import (
    apply_overrides,
    check_finite,
    check_weights,
    explain_failure,
    fuse_and_prove,
    is_outside_decoder,
    local_or_hub,
    read_weights,
    silence_progress_bars,
)
from posttrain.models.model_files import ModelError
from posttrain.models.proof import (
    PACKABLE,
    Compute,
    Plain,
    ProofError,
    checked_hidden,
    compute_plain,
    disagreement,
    layer_kinds,
)
from posttrain.models.quantized import keep_one_layout, loading_options
from posttrain.models.recurrent import answer_recurrence
from posttrain.models.scorer import packed_scores, padded_scores

CLASSIFIER = "ForSequenceClassification"


def load_scorer(
    path: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    pad_token_id: int | None = None,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    new_head: bool = False,
    quantization: str | None = None,
    allow_other_weights: bool = False,
    setting: str = "model.path",
) -> Any:
    """Load the model of `path` (a folder or a hub id) for `score_rows`. Errors name `setting`.

    With `new_head=True`, a causal LM gets a score head of zeros, to be trained; otherwise a folder without a trained
    head is rejected. `pad_token_id` is for models whose own configuration has none. With `quantization`, the linear
    layers below the head hold 4 bits.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    silence_progress_bars()
    source, what = local_or_hub(path, setting), f"{setting}={path}"
    options = loading_options(quantization, dtype, device, SCORE_HEADS) if quantization else {}
    try:
        settings = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        apply_overrides(settings, override_config or {}, setting.rpartition(".")[0])
        value_head = None if new_head or _is_classifier(settings) else find_value_head(source)
        _one_label(settings, path, new_head or value_head is not None, setting)
        if settings.get_text_config().pad_token_id is None:
            settings.get_text_config().pad_token_id = pad_token_id
        options |= {"dtype": dtype, "trust_remote_code": trust_remote_code}
        model, report = read_weights(AutoModelForSequenceClassification, source, settings, options)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a wrong file can make the library raise anything
        raise explain_failure(error, source, "the reward model", setting) from error
    check_finite(model, what)
    gets_head = new_head or value_head is not None
    _check_head(model, sorted(report["missing_keys"]), path, gets_head, setting)
    if not allow_other_weights:
        key = f"{setting.rpartition('.')[0]}.allow_other_weights" if new_head else None
        check_weights(report, what, setting=key, ignore=is_outside_decoder(model) if gets_head else None)
    if value_head is not None:
        put_head(model, value_head)
    keep_one_layout(model)
    model = (model if quantization else model.to(device)).eval()
    return fuse_and_prove(model, what, (plain_scores, find_scorer_mode))


def _is_classifier(settings: Any) -> bool:
    return any(CLASSIFIER in str(name) for name in settings.architectures or [])


def _one_label(settings: Any, path: str, new_head: bool, setting: str) -> None:
    # Rejects folders that cannot give one score before weights are read; a new head gets one label.
    kinds = [str(name) for name in settings.architectures or []]
    if _is_classifier(settings):
        if settings.num_labels != 1:
            raise ModelError(
                f"{setting}={path}: this classifier has {settings.num_labels} labels; a reward model gives one score "
                "(num_labels=1)"
            )
    elif new_head:
        settings.num_labels = 1
    else:
        raise ModelError(
            f"{setting}={path}: this is {' / '.join(kinds) or 'a model of unknown kind'}, not a reward model; give "
            "a sequence-classification folder with one label, such as `posttrain reward-model` writes, or a causal LM "
            "with a value head (v_head, value_head or score) in its safetensors files"
        )


def _check_head(model: Any, missing: list[str], path: str, new_head: bool, setting: str) -> None:
    # A head that the folder does not hold becomes zero, so that all scores start equal.
    head = [name for name in missing if name.split(".")[0] in SCORE_HEADS]
    if head and not new_head:
        raise ModelError(f"{setting}={path}: the folder holds no trained score head ({', '.join(head)} missing)")
    for name, weight in model.named_parameters():
        if name in head:
            torch.nn.init.zeros_(weight)


_NAME = re.compile(r"(?:^|\.)(?:v_head\.summary|v_head|value_head|score|reward_head)\.(weight|bias)$")
_FILES = ("value_head.safetensors", "model.safetensors")
_INDEX = "model.safetensors.index.json"


def find_value_head(source: str) -> dict[str, torch.Tensor] | None:
    """Return the head in a folder or hub id: `weight` (1, E) and perhaps `bias` (1,); None if it has none."""
    index = _file(source, _INDEX)
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index is not None else set()
    found: dict[str, torch.Tensor] = {}
    for name in [*_FILES, *sorted(shards)]:
        path = _file(source, name)
        if path is not None:
            found |= {kind: tensor for kind, tensor in _head_in(path).items() if kind not in found}
    weight = found.get("weight")
    return found if weight is not None and weight.ndim == 2 and weight.shape[0] == 1 else None


def _head_in(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        matches = {name: _NAME.search(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        return {match[1]: file.get_tensor(name) for name, match in matches.items() if match}


def _file(source: str, name: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None


def put_head(model: Any, head: dict[str, torch.Tensor]) -> None:
    """Replace a sequence classifier's head, which has no bias, by this one."""
    old = model.score.weight
    new = torch.nn.Linear(old.shape[1], 1, bias="bias" in head, device=old.device, dtype=old.dtype)
    with torch.no_grad():
        for kind, tensor in head.items():
            getattr(new, kind).copy_(tensor)
    model.score = new


# Scores (2,) of the sequences, and the hidden states (2, E) at their ends.
Numbers = tuple[torch.Tensor, torch.Tensor]


def plain_scores(model: Any, what: str) -> Plain:
    """Return scores as transformers computes them, one sequence at a time; `what` names the model in errors."""
    return compute_plain(model, what, _alone)


@torch.no_grad()
def find_scorer_mode(model: Any, plain: Plain, what: str) -> ForwardMode:
    """Choose packing for a decoder with a linear head if it agrees, else padding, else one sequence at a time."""

    def holds(compute: Compute) -> bool:
        return disagreement(model, plain, compute, _near) is None

    own = model.config._attn_implementation
    if layer_kinds(model) <= PACKABLE and type(getattr(model, "score", None)) is torch.nn.Linear:
        set_attention(model, ATTENTION)
        answer_recurrence(model)
        if holds(_packed) and holds(_padded):
            return ForwardMode(packed=True, padded=True)
        set_attention(model, own)
    if not holds(_alone):
        raise ProofError(f"{what}: the model does not give a row the same score twice")
    if holds(_padded):
        return ForwardMode(padded=True)
    kind = model.config.model_type
    return ForwardMode(note=f"{kind}: a row's score depends on the padding beside it; rows are scored one at a time.")


def _near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    # Relative to the size of what is compared, because scores have no natural scale.
    share = 1e-3 if theirs.dtype in (torch.float32, torch.float64) else 0.1
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).norm() <= share * theirs.norm())


def _alone(model: Any, rows: list[list[int]]) -> Numbers:
    ids = [torch.tensor([row], device=model.device) for row in rows]
    ends = torch.stack([hidden_states(model, row)[0, -1] for row in ids])
    return torch.cat([padded_scores(model, [row]) for row in rows]).to(ends.dtype), ends


def _padded(model: Any, rows: list[list[int]]) -> tuple[torch.Tensor, ...]:
    return (padded_scores(model, rows).to(model.dtype),)


def _packed(model: Any, rows: list[list[int]]) -> Numbers:
    lengths = [len(row) for row in rows]
    ids_T, position_T = (
        torch.tensor([x for row in rows for x in f(row)], device=model.device) for f in (list, _places)
    )
    hidden_TE = checked_hidden(model, ids_T, position_T, PackedLayout(lengths, model.device, position_T=position_T))
    return packed_scores(model, rows).to(hidden_TE.dtype), hidden_TE[torch.tensor(lengths).cumsum(0) - 1]


def _places(row: list[int]) -> range:
    return range(len(row))

"""Reward models: any folder that `AutoModelForSequenceClassification` loads with one label, one score per row, and
causal LMs with a value head beside them (`value_heads.py`), which become such classifiers.

A decoder's score is read at the row's last token that is not padding, as transformers does it; rows are packed end to
end. Encoders, and decoders whose attention cannot be packed, go through their own forward pass on padded rows.

Shapes: B rows, T packed tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from posttrain.config.lora import SCORE_HEADS
from posttrain.errors import UserError
from posttrain.kernels.packed_attention import PackedLayout, packed_rows
from posttrain.models.completeness import check_weights, outside
from posttrain.models.finite import few, not_finite
from posttrain.models.forward import at_places, hidden_states, own_logits, without_adapters
from posttrain.models.loading import (
    ModelError,
    explain_failure,
    local_or_hub,
    no_report,
    own_attention,
    silence_progress_bars,
    without_dropout,
)
from posttrain.models.quantized import keep_one_layout, loading_options
from posttrain.models.value_heads import find_value_head, put_head
from posttrain.models.ways import way_of

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
    """The model of `path` (a folder or a hub id), ready for `score_rows`. `setting` is named by errors.

    `new_head=True` also takes a causal LM and gives it a score head of zeros, to be trained; otherwise a folder
    without a trained head is refused. `pad_token_id` serves models whose own configuration has none. With
    `quantization` the linear layers below the head hold 4 bits.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from posttrain.models.fused_layer import fuse_layers
    from posttrain.models.norms import fuse_norms
    from posttrain.models.scorer_proof import find_scorer_way, plain_scores

    silence_progress_bars()
    source = local_or_hub(path, setting)
    options = loading_options(quantization, dtype, device, SCORE_HEADS) if quantization else {}
    try:
        settings = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        _lay_over(settings, override_config or {}, setting)
        value_head = None if new_head or _is_classifier(settings) else find_value_head(source)
        _one_label(settings, path, new_head or value_head is not None, setting)
        if settings.get_text_config().pad_token_id is None:
            settings.get_text_config().pad_token_id = pad_token_id
        with no_report():
            model, report = AutoModelForSequenceClassification.from_pretrained(
                source,
                config=settings,
                dtype=dtype,
                **own_attention(settings),
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the library raises whatever a wrong file makes it stumble over
        raise explain_failure(error, source, "the reward model", setting) from error
    if wrong := not_finite(model.named_parameters()):
        raise ModelError(f"{setting}={path}: the weights hold NaN or infinity ({few(wrong)}). Give a sound model.")
    gets_head = new_head or value_head is not None
    _settle_head(model, sorted(report["missing_keys"]), path, gets_head, setting)
    if not allow_other_weights:
        key = f"{setting.rpartition('.')[0]}.allow_other_weights" if new_head else None
        check_weights(report, f"{setting}={path}", setting=key, beside=outside(model) if gets_head else None)
    if value_head is not None:
        put_head(model, value_head)
    keep_one_layout(model)
    model = (model if quantization else model.to(device)).eval()
    plain = plain_scores(model, f"{setting}={path}")
    fuse_norms(model)
    fuse_layers(model)
    without_dropout(model)
    model.way = find_scorer_way(model, plain, f"{setting}={path}")
    return model


def _lay_over(settings: Any, values: Mapping[str, Any], setting: str) -> None:
    section = setting.rpartition(".")[0]
    for key, value in values.items():
        if not hasattr(settings, key):
            raise ModelError(f"{section}.override_config.{key}: the model's config.json knows no such key")
        setattr(settings, key, value)


def _is_classifier(settings: Any) -> bool:
    return any(CLASSIFIER in str(name) for name in settings.architectures or [])


def _one_label(settings: Any, path: str, new_head: bool, setting: str) -> None:
    """Refuses folders that cannot give one score, before weights are read; a new head gets one label."""
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


def _settle_head(model: Any, missing: list[str], path: str, new_head: bool, setting: str) -> None:
    """A head that the folder did not hold becomes zero: all scores begin equal."""
    head = [name for name in missing if name.split(".")[0] in SCORE_HEADS]
    if head and not new_head:
        raise ModelError(f"{setting}={path}: the folder holds no trained score head ({', '.join(head)} missing)")
    for name, weight in model.named_parameters():
        if name in head:
            torch.nn.init.zeros_(weight)


def packs_rows(model: torch.nn.Module) -> bool:
    """Whether rows are packed: a causal decoder below a plain `score` head that was proved to give the same scores."""
    return way_of(model).packed


def head_scores(model: Any, hidden_BE: torch.Tensor) -> torch.Tensor:
    """(B,) scores of the rows' last hidden states, in float32 or better."""
    return widened(without_adapters(model).score(hidden_BE).squeeze(-1))


class ScorePass(torch.nn.Module):
    """From token ids to one score per row, as one module (see `models/forward.py`)."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, ends_B: torch.Tensor) -> torch.Tensor:
        """(B,) scores of packed rows that end at these places."""

        def head(hidden_NE: torch.Tensor, numbers: Any) -> dict[str, torch.Tensor]:
            return {"scores": head_scores(self.model, hidden_NE).clone()}

        return at_places(self.model, input_ids, position_ids, None, ends_B, head)["scores"]


class PaddedScorePass(ScorePass):
    """The same for models whose rows are not packed."""

    def forward(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(B,) scores of rows of token ids."""
        return own_scores(self.model, rows).clone()


def widened(scores: torch.Tensor) -> torch.Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def without_trailing_padding(ids: Sequence[int], pad_token_id: int | None) -> list[int]:
    """The row up to the token whose score counts. Where padding and end-of-text are one token, a row's own end goes
    too: transformers cannot tell them apart, and what follows does not change a decoder's score."""
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_token_id:
        end -= 1
    return list(ids[:end])


@torch.no_grad()
def score_rows(
    model: Any, rows: Sequence[Sequence[int]], *, token_budget: int = 16384, max_rows: int | None = None
) -> torch.Tensor:
    """(B,) scores of rows of token ids, on the CPU; passes hold up to `token_budget` tokens and `max_rows` rows."""
    assert all(len(row) > 0 for row in rows), "a row without tokens has no score"
    model.eval()
    packed = packs_rows(model)
    pad = without_adapters(model).config.get_text_config().pad_token_id
    kept = [without_trailing_padding(row, pad) if packed else list(row) for row in rows]
    scores_B = torch.zeros(len(rows))
    for chosen in _passes([len(row) for row in kept], packed, token_budget, max_rows):
        part = [kept[row] for row in chosen]
        scores_B[chosen] = (packed_scores(model, part) if packed else own_scores(model, part)).float().cpu()
    return scores_B


def _passes(lengths: list[int], packed: bool, token_budget: int, max_rows: int | None) -> Iterator[list[int]]:
    """Row numbers of each pass, long rows first; a padded row costs as much as the longest of its pass."""
    chosen: list[int] = []
    used = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        cost = lengths[row] if packed or not chosen else lengths[chosen[0]]
        if chosen and (used + cost > token_budget or len(chosen) == max_rows):
            yield chosen
            chosen, used, cost = [], 0, lengths[row]
        chosen.append(row)
        used += cost
    if chosen:
        yield chosen


def packed_scores(model: Any, rows: list[list[int]]) -> torch.Tensor:
    """(B,) scores of rows that are packed end to end."""
    device = model.device
    lengths = [len(row) for row in rows]
    ids_T = torch.tensor([token for row in rows for token in row], device=device)
    position_T = torch.cat([torch.arange(length, device=device) for length in lengths])
    with packed_rows(PackedLayout(lengths, device, position_T=position_T)):
        hidden_TE = hidden_states(model, ids_T[None], position_T[None])[0]
    return head_scores(model, hidden_TE[torch.tensor(lengths, device=device).cumsum(0) - 1])


def own_scores(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """(B,) scores by the model's own forward pass: of padded rows, or of one at a time where padding is felt."""
    parts = [rows] if way_of(model).padded else [[row] for row in rows]
    return torch.cat([padded_scores(model, part) for part in parts])


def padded_scores(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """(B,) scores by the model's own forward pass over rows padded on the right."""
    pad = without_adapters(model).config.get_text_config().pad_token_id
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad or 0)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
    # Without a cache: layers that are computed again for the gradient would find their own keys in it.
    return widened(own_logits(model, ids.to(model.device), mask.to(model.device)).squeeze(-1))

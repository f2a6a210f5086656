"""Reward models: any folder that `AutoModelForSequenceClassification` loads with one label, one score per row, and
causal LMs with a value head beside them (`value_heads.py`), which become such classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from posttrain.config.lora import SCORE_HEADS
from posttrain.errors import UserError
from posttrain.models.completeness import check_weights, outside
from posttrain.models.errors import ModelError
from posttrain.models.finite import few, not_finite
from posttrain.models.fused_layer import fuse_layers
from posttrain.models.loading import (
    explain_failure,
    local_or_hub,
    no_report,
    own_attention,
    silence_progress_bars,
    without_dropout,
)
from posttrain.models.norms import fuse_norms
from posttrain.models.quantized import keep_one_layout, loading_options
from posttrain.models.scorer_proof import find_scorer_way, plain_scores
from posttrain.models.value_heads import find_value_head, put_head

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

"""Questions about the installed transformers."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Any


@cache
def is_transformers_version_in_range(min_version: str | None = None, max_version: str | None = None) -> bool:
    """Whether the installed version lies between the two, both included; None is no bound."""
    from packaging.version import parse

    try:
        installed = parse(importlib.metadata.version("transformers"))
    except importlib.metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError("The `transformers` package is not installed.") from error
    return (min_version is None or parse(min_version) <= installed) and (
        max_version is None or installed <= parse(max_version)
    )


@cache
def get_auto_model_for_vision2seq() -> Any:
    """The class that loads models which read images and write text."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText


def flash_attn_supports_top_left_mask() -> bool:
    from transformers.modeling_flash_attention_utils import flash_attn_supports_top_left_mask as ask

    return ask()

"""Masks secrets in every text that is shown or kept: those of addresses (`https://user:pass@host/`) and of settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_USER = re.compile(r"(?<=://)[^/\s?#]+@")
_QUERY = re.compile(
    r"([?&;][\w.-]*(?:key|token|secret|password|passwd|credentials?|signature|sig|auth)=)[^&\s#;'\"]+", re.IGNORECASE
)


def mask_urls(text: str) -> str:
    """The text with users, passwords and secret parameters of its addresses replaced by `***`."""
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(f"{MASK}@", text)) if "://" in text else text


HIDDEN = "***"
_SECRET_NAME = re.compile(r"(^|[_.-])(api_?key|secret(_key)?|password|passwd|token|credentials?)$", re.IGNORECASE)


def redact(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """A copy of `value` in plain dicts and lists, with `***` for secrets.

    Secrets are values under a name like `api_key`, the values of environment variables with such a name
    (`WANDB_API_KEY`, `HF_TOKEN`) inside any text, and users and keys in URLs.
    """
    # Values of fewer than 8 characters are no keys, and replacing them would garble other text.
    values = {text for name, text in environ.items() if _SECRET_NAME.search(name) and len(text) >= 8}
    return _redact(value, values)


def _redact(value: Any, secrets: set[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(key, str) and item and _SECRET_NAME.search(key) else _redact(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact(item, secrets) for item in value]
    if isinstance(value, str):
        value = mask_urls(value)
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
    return value

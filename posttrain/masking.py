"""Secrets inside addresses, masked wherever a text is shown or kept: `https://user:pass@host/x?api_key=...`."""

from __future__ import annotations

import re

MASK = "***"
_USER = re.compile(r"(?<=://)[^/\s?#]+@")
_QUERY = re.compile(
    r"([?&;][\w.-]*(?:key|token|secret|password|passwd|credentials?|signature|sig|auth)=)[^&\s#;'\"]+", re.IGNORECASE
)


def mask_urls(text: str) -> str:
    """The text with users, passwords and secret parameters of its addresses replaced by `***`."""
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(f"{MASK}@", text)) if "://" in text else text

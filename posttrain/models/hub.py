"""Whether a model can come from the hub: without a connection that is known in a moment, not after retries."""

from __future__ import annotations

import functools
import os
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

PATIENCE_S = 5.0
_PROXIES = ("https_proxy", "http_proxy", "all_proxy")


def why_not_from_hub(name: str) -> str | None:
    """Why a model that is no local folder cannot be loaded, as the end of a sentence; None if it may well be."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    if folder.is_dir() and any(folder.iterdir()):
        return None
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE forbids to ask the hub"
    return None if _answers(constants.ENDPOINT) else f"the hub {constants.ENDPOINT} cannot be reached"


@functools.cache
def _answers(endpoint: str) -> bool:
    """Whether somebody listens at this address; behind a proxy only a download can tell."""
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return True
    url = urlsplit(endpoint)
    address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    reached = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=PATIENCE_S).close()
            reached.set()
        except OSError:
            pass

    asking = threading.Thread(target=connect, daemon=True)  # resolving a name knows no timeout of its own
    asking.start()
    asking.join(PATIENCE_S)
    return reached.is_set()

"""Checks of `actor_rollout_ref.rollout.server`, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from posttrain.config.checked import Checked, Finding
from posttrain.config.trainer import COLOCATED_WORKERS, generating_workers_of

_ROLLOUT = "actor_rollout_ref.rollout"
NAME, URL = f"{_ROLLOUT}.name", f"{_ROLLOUT}.server.url"


def check(checked: Checked) -> Iterator[Finding]:
    """Addresses, and the one worker that speaks with all servers."""
    if not hasattr(checked.config, "actor_rollout_ref"):  # supervised training has no rollout
        return
    rollout = checked.config.actor_rollout_ref.rollout
    if rollout.name != "server":
        return
    if not rollout.server.url:
        what = f"`{NAME}=server` generates in other processes, and there is no address."
        yield checked.problem(what, f"set {URL}=[http://HOST:PORT], one or several", NAME)
    for url in rollout.server.url:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            what = f"`{URL}={url}` is no address."
            yield checked.problem(what, "give one such as http://127.0.0.1:8000", URL)
    if (workers := generating_workers_of(checked.config)) > 1:
        what = f"`{NAME}=server`: one worker speaks with all servers, and here {workers} would."
        yield checked.problem(what, f"set {COLOCATED_WORKERS}=1 (all workers train nevertheless)", NAME)

"""Conditions under which an unsupported key does nothing in verl either."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from posttrain.other_systems.verl.rule import plain

if TYPE_CHECKING:
    from posttrain.config.merge import Merged

_ACTOR = "actor_rollout_ref.actor"
_ENGINES = ("fsdp", "fsdp2", "dp")
ON = ("true", "1", "yes", "on")


def given(merged: Merged, key: str) -> str:
    """What the user said under a key, as plain text; empty if nothing."""
    entry = merged.elsewhere.get(key) or merged.entries.get(key)
    return plain(entry.value) if entry is not None and entry.explicit else ""


def _fsdp(merged: Merged, key: str) -> bool:
    """The user chose FSDP, so that settings of other engines do nothing."""
    role = next((role for role in ("critic", "reward_model") if key.startswith(f"{role}.")), _ACTOR)
    named = [given(merged, name) for name in (f"{role}.strategy", f"{_ACTOR}.strategy", "model_engine", "engine")]
    return any(name in _ENGINES for name in named)


def _constant(merged: Merged, key: str) -> bool:
    """The learning rate stays where it is, so that the shape of its schedule does nothing."""
    section = key[: key.rindex("optim.") + len("optim")]
    entry = merged.entries.get(f"{section}.lr_scheduler_type")
    return entry is None or plain(entry.value) == "constant"


CONDITIONS: dict[str, Callable[[Merged, str], bool]] = {"fsdp": _fsdp, "constant": _constant}

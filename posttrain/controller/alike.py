"""Whether the machines of a run have the same programs: what differs would show as numbers, or as a hang."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path

from posttrain.errors import UserError

PLACE = "in"
"""Where posttrain lies: told, and free to differ."""


class UnlikeMachines(UserError):
    """A machine of the run has another Python, torch or posttrain."""


def programs() -> dict[str, str]:
    """What this process runs, by name."""
    import torch

    root = Path(__file__).parents[1]
    files = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        files.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    own = f"files {files.hexdigest()[:8]}"
    return {"Python": platform.python_version(), "torch": str(torch.__version__), "posttrain": own, PLACE: str(root)}


def check_alike(of_ranks: Sequence[dict[str, str]], addresses: Sequence[str]) -> None:
    """Refuse ranks that do not run what the command runs."""
    here = programs()
    for found, address in zip(of_ranks, addresses, strict=True):
        differ = [name for name in here if name != PLACE and found[name] != here[name]]
        if differ:
            there, own = (", ".join(f"{name} {of[name]}" for name in differ) for of in (found, here))
            raise UnlikeMachines(
                f"The machine {address} does not run the same programs as the command: {there} in {found[PLACE]}, and "
                f"{own} in {here[PLACE]} here. All machines of a run need the same environment and code: what "
                "`ray start`, or the command with trainer.node_rank, finds there."
            )

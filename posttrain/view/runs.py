"""Which runs a viewer shows, each under a name of its own. Requests name runs, never paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.tracking.find import ROOT, find_run, is_run, runs_under
from posttrain.tracking.status import age, read_status, stands


class Runs:
    """Runs that were named, and those below folders that were named; new ones of the latter appear by themselves."""

    def __init__(self, places: Sequence[str]) -> None:
        self._single: list[Path] = []
        self._roots: list[Path] = []
        for place in places or [ROOT]:
            path = Path(place)
            if not is_run(path) and path.is_dir() and (runs_under(path) or not places):
                self._roots.append(path)
            else:
                self._single.append(find_run(place))
        if not self.folders():
            raise UserError(
                f"There is no run in {', '.join(map(str, self._roots))}/: `posttrain view FOLDER` looks elsewhere."
            )

    def folders(self) -> dict[str, Path]:
        """By name, oldest first: the last part of the path, and as many more as tell it from others."""
        found = [folder for root in self._roots for folder in runs_under(root)] + self._single
        unique = list({folder.resolve(): folder.resolve() for folder in found}.values())
        return {_name(folder, unique): folder for folder in unique}

    def folder(self, name: str) -> Path | None:
        return self.folders().get(name)


def _name(folder: Path, others: Sequence[Path]) -> str:
    depth = 1
    while sum(other.parts[-depth:] == folder.parts[-depth:] for other in others) > 1:
        depth += 1
    return "/".join(folder.parts[-depth:])


def about(name: str, folder: Path) -> dict[str, Any]:
    """How a run stands."""
    known = read_status(folder)
    wanted = ("step", "total_steps", "stage", "stage_seconds", "unit", "done", "of", "tokens_per_s", "seconds_left")
    shown = {key: known.get(key) for key in (*wanted, "time", "pid", "host")}
    return {"name": name, "folder": str(folder), "status": stands(folder), "age_s": round(age(known), 1), **shown}

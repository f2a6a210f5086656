"""Tables as Markdown, put into a page between two markers, so that one command brings the page up to date."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.bench.learning.gains import HEAD, Gain, lines
from posttrain.errors import UserError
from posttrain.tracking.atomic import replace_file

BEGIN, END = "<!-- made: bench algorithms -->", "<!-- end -->"
_BETWEEN = re.compile(rf"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.S)


def check_page(path: Path | None) -> None:
    """Refuse a page without the markers before anything is measured."""
    if path is not None:
        _page(path)


def fill_page(path: Path, text: str) -> None:
    """Replace what stands between the markers."""
    replace_file(path, _BETWEEN.sub(lambda found: f"{found[1]}{text}{found[2]}", _page(path)).encode())


def between(text: str) -> str:
    """What stands between the markers of a page."""
    found = _BETWEEN.search(text)
    return found[0].removeprefix(found[1]).removesuffix(found[2]) if found else ""


def _page(path: Path) -> str:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not _BETWEEN.search(text):
        raise UserError(f"{path}: not a page with the lines `{BEGIN}` and `{END}`, between which the table belongs")
    return text


def markdown(found: Sequence[Gain], record: dict[str, Any]) -> str:
    """How it was made, the table, and what was set beside the presets."""
    parts = [_made(found, record), table(HEAD, lines(found))]
    tuned = [(gain.entry.name, *gain.entry.tuned) for gain in found if gain.entry.tuned[0]]
    if tuned:
        rows = [[name, " ".join(f"`{setting}`" for setting in settings), why] for name, settings, why in tuned]
        parts.append("Set beside the preset `embedded` and the algorithm's own:")
        parts.append(table(["algorithm", "settings", "why"], rows))
    return "\n\n".join(parts) + "\n"


def _made(found: Sequence[Gain], record: dict[str, Any]) -> str:
    """A sentence for each call of the command that made a run of the table."""
    runs = [run for gain in found for run in gain.runs]
    seeds = ", ".join(str(seed) for seed in sorted({run["seed"] for run in runs}))
    said = [f"{record['steps']} steps; seeds {seeds}. Made by"]
    for number in sorted({run["session"] for run in runs}):
        session = record["sessions"][number]
        versions = ", ".join(f"{name} {version}" for name, version in session["packages"].items())
        said.append(
            f"`{session['command']}`, {session['date'][:10]}: {session['cpu']}, "
            f"{session['cores']} cores, runs at a time: {session['jobs']}, threads of each: {session['threads']}; "
            f"Python {session['python']}, {versions}."
        )
    return "\n".join(said)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])

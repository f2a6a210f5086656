"""The picture of many algorithms: one small panel each, accuracy over steps, a thin line per seed and their mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path

from posttrain.bench.learning.gains import Gain
from posttrain.tracking.atomic import replace_file
from posttrain.tracking.svg import COLOURS

ACROSS, WIDE, HIGH, GAP, LEFT, TOP = 6, 126, 84, 30, 44, 62
INK, PALE = "#374151", "#e5e7eb"


def write_panels(path: Path, found: Sequence[Gain], title: str) -> None:
    """All panels share both axes, so that they compare at a glance."""
    last = max(point[0] for gain in found for run in gain.runs for point in run["curve"]) or 1
    across = min(ACROSS, len(found))
    width = LEFT + across * (WIDE + 10) + 10
    height = TOP + math.ceil(len(found) / across) * (HIGH + GAP) + 12
    parts = [_text(width / 2, 22, title, size=15, weight="bold")]
    for place, gain in enumerate(found):
        row, column = divmod(place, across)
        parts.append(_panel(LEFT + column * (WIDE + 10), TOP + row * (HIGH + GAP), gain, last, labelled=column == 0))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    sheet = '<rect width="100%" height="100%" fill="white"/>'
    text = "\n".join([f'{head} font-family="sans-serif" font-size="11">', sheet, *parts, "</svg>\n"])
    replace_file(path, text.encode())


def _panel(left: float, top: float, gain: Gain, last: float, *, labelled: bool) -> str:
    def at(step: float, accuracy: float) -> str:
        return f"{left + step / last * WIDE:.1f} {top + (1 - accuracy) * HIGH:.1f}"

    def line(points: Sequence[Sequence[float]], opacity: float, width: float) -> str:
        path = "M" + "L".join(at(*point) for point in points)
        look = f'stroke="{COLOURS[0]}" stroke-opacity="{opacity:g}" stroke-width="{width:g}"'
        return f'<path d="{path}" fill="none" {look}/>'

    name = gain.entry.name
    parts = [_text(left + WIDE / 2, top - 5, name, size=11 if len(name) <= 20 else 9)]
    for level in (0.0, 0.5, 1.0):
        y = top + (1 - level) * HIGH
        parts.append(f'<line x1="{left:g}" y1="{y:g}" x2="{left + WIDE:g}" y2="{y:g}" stroke="{PALE}"/>')
        if labelled:
            parts.append(_text(left - 5, y + 4, f"{level:g}", anchor="end"))
    parts += [line(run["curve"], 0.35, 1) for run in gain.runs]
    parts.append(line(mean_curve(gain), 1, 2))
    parts.append(_text(left + WIDE - 2, top + HIGH - 4, f"{gain.end:.2f}", anchor="end"))
    return "\n".join(parts)


def mean_curve(gain: Gain) -> list[list[float]]:
    """Mean over seeds at every step that all of them have."""
    by_seed = [{step: value for step, value in run["curve"]} for run in gain.runs]
    shared = sorted(set.intersection(*map(set, by_seed)))
    return [[step, statistics.fmean(curve[step] for curve in by_seed)] for step in shared]


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 11, weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'

"""The picture of a sweep: time per token against rows, length and model, all axes logarithmic, as an SVG by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from posttrain.tracking.atomic import replace_file
from posttrain.tracking.svg import COLOURS

HEIGHT = 380
LEFT, TOP, BOTTOM, GAP, RIGHT = 64, 66, 52, 62, 24
PANEL = 355.0
INK, PALE = "#374151", "#e5e7eb"


@dataclass(frozen=True)
class Panel:
    """Points along one axis: `us_per_token` and `floor_us` over `key`."""

    points: Sequence[dict[str, Any]]
    key: str
    label: str
    marks: Sequence[str]
    """Words beside the points; a point with words is hollow."""
    names: Sequence[str] | None = None
    """What stands under the points in place of their numbers."""


def write_plot(path: Path, engine: str, model: str, panels: Sequence[Panel]) -> None:
    """The panels side by side with the same vertical axis; each shows the engine and the floor."""
    times = [point[key] for panel in panels for point in panel.points for key in ("us_per_token", "floor_us")]
    powers = range(math.floor(math.log10(min(times))), math.ceil(math.log10(max(times))) + 1)
    width = LEFT + len(panels) * (PANEL + GAP) - GAP + RIGHT
    parts = [
        _text(width / 2, 22, f"{engine}, {model}: microseconds per token", size=15, weight="bold"),
        *(_panel(LEFT + place * (PANEL + GAP), panel, powers) for place, panel in enumerate(panels)),
        _legend([engine, "floor of this machine"]),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {HEIGHT}" width="{width:g}" height="{HEIGHT}"'
    )
    sheet = '<rect width="100%" height="100%" fill="white"/>'
    text = "\n".join([f'{head} font-family="sans-serif" font-size="12">', sheet, *parts, "</svg>\n"])
    replace_file(path, text.encode())


def _panel(left: float, panel: Panel, powers: range) -> str:
    points, key, bottom, right = panel.points, panel.key, HEIGHT - BOTTOM, left + PANEL
    values = [point[key] for point in points]
    low, high = math.log2(min(values)), math.log2(max(values))
    span = high - low or 1.0

    def x(value: float) -> float:
        return left + 10 + (math.log2(value) - low) / span * (PANEL - 20)

    def y(value: float) -> float:
        return bottom - (math.log10(value) - powers[0]) / max(1, powers[-1] - powers[0]) * (bottom - TOP)

    parts = []
    for power in powers:
        at = y(10.0**power)
        parts.append(f'<line x1="{left:g}" y1="{at:.1f}" x2="{right:g}" y2="{at:.1f}" stroke="{PALE}"/>')
        parts.append(_text(left - 6, at + 4, f"{10.0**power:,g}", anchor="end"))
    names = panel.names or [f"{value:,}" for value in values]
    for value, name in list(zip(values, names, strict=True))[:: max(1, math.ceil(len(values) / 10))]:
        parts.append(_text(x(value), bottom + 18, name, size=11))
    parts.append(f'<path d="M{left:g} {TOP}V{bottom}H{right:g}" fill="none" stroke="#6b7280"/>')
    parts.append(_text(left + PANEL / 2, bottom + 38, panel.label))
    for colour, what in zip(COLOURS, ("us_per_token", "floor_us"), strict=False):
        line = [(x(point[key]), y(point[what])) for point in points]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in line)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (a, b), words in zip(line, panel.marks, strict=True):
            fill = "white" if words else colour
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{fill}" stroke="{colour}"/>')
            if words and what == "us_per_token":
                parts.append(_text(a, b - 9, words, size=10))
    return "\n".join(parts)


def _legend(names: Sequence[str]) -> str:
    parts = []
    for place, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        left = LEFT + 4 + 150 * place
        parts.append(f'<line x1="{left}" y1="46" x2="{left + 22}" y2="46" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(left + 28, 50, name, anchor="start"))
    return "\n".join(parts)


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'

"""The picture of a sweep: time per token against rows, length and model, all axes logarithmic, as an SVG by hand.

Below the floor no machine can go: that area is shaded. Each point says how many times the floor it is.
"""

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
LEFT, TOP, BOTTOM, GAP, RIGHT = 64, 66, 52, 54, 24
PANEL, INSIDE = 355.0, 22.0
INK, LIGHT, PALE, SHADE = "#374151", "#6b7280", "#e5e7eb", "#f3f4f6"


@dataclass(frozen=True)
class Panel:
    """Points along one axis: `us_per_token` and `floor_us` over `key`; one that has a `prefix` is drawn hollow."""

    points: Sequence[dict[str, Any]]
    key: str
    label: str
    marks: Sequence[str]
    """Words over the points."""
    names: Sequence[str] | None = None
    """What stands under the points in place of their numbers."""


def write_plot(path: Path, engine: str, model: str, panels: Sequence[Panel]) -> None:
    """The panels side by side with the same vertical axis; each shows the engine and the floor."""
    times = [point[key] for panel in panels for point in panel.points for key in ("us_per_token", "floor_us")]
    lines = levels(min(times), max(times))
    width = LEFT + len(panels) * (PANEL + GAP) - GAP + RIGHT
    parts = [
        _text(LEFT, 24, f"{engine}, {model}: microseconds per token", anchor="start", size=15, weight="bold"),
        *(_panel(LEFT + place * (PANEL + GAP), panel, lines) for place, panel in enumerate(panels)),
        _legend([engine, "floor of this machine"], hollow=any("prefix" in p for panel in panels for p in panel.points)),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {HEIGHT}" width="{width:g}" height="{HEIGHT}"'
    )
    sheet = '<rect width="100%" height="100%" fill="white"/>'
    text = "\n".join([f'{head} font-family="sans-serif" font-size="12">', sheet, *parts, "</svg>\n"])
    replace_file(path, text.encode())


def levels(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that enclose low to high, or powers alone where those would be too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1,)):
        all_levels = [step * 10.0**power for power in powers for step in steps]
        first = max((i for i, level in enumerate(all_levels) if level <= low), default=0)
        last = min((i for i, level in enumerate(all_levels) if level >= high), default=len(all_levels) - 1)
        if last - first < 10:
            break
    return all_levels[first : max(last, first + 1) + 1]


def _panel(left: float, panel: Panel, lines: Sequence[float]) -> str:
    points, key, bottom, right = panel.points, panel.key, HEIGHT - BOTTOM, left + PANEL
    values = [point[key] for point in points]
    low, span = math.log2(min(values)), math.log2(max(values) / min(values)) or 1.0
    high = math.log10(lines[-1] / lines[0])

    def x(value: float) -> float:
        return left + INSIDE + (math.log2(value) - low) / span * (PANEL - 2 * INSIDE)

    def y(value: float) -> float:
        return bottom - math.log10(value / lines[0]) / high * (bottom - TOP)

    engine, floor = ([(x(p[key]), y(p[what])) for p in points] for what in ("us_per_token", "floor_us"))
    under = f"{_path(floor)}L{floor[-1][0]:.1f} {bottom}L{floor[0][0]:.1f} {bottom}Z"
    parts = [f'<path d="{under}" fill="{SHADE}"/>']
    for level in lines:
        at = y(level)
        parts.append(f'<line x1="{left:g}" y1="{at:.1f}" x2="{right:g}" y2="{at:.1f}" stroke="{PALE}"/>')
        parts.append(_text(left - 6, at + 4, f"{level:,g}", anchor="end", size=11))
    names = panel.names or [f"{value:,}" for value in values]
    for value, name in list(zip(values, names, strict=True))[:: max(1, math.ceil(len(values) / 10))]:
        parts.append(_text(x(value), bottom + 18, name, size=11))
    parts.append(f'<path d="M{left:g} {TOP}V{bottom}H{right:g}" fill="none" stroke="{LIGHT}"/>')
    parts.append(_text(left + PANEL / 2, bottom + 38, panel.label))
    parts.append(f'<path d="{_path(floor)}" fill="none" stroke="{LIGHT}" stroke-width="1.5" stroke-dasharray="5 4"/>')
    parts.append(f'<path d="{_path(engine)}" fill="none" stroke="{COLOURS[0]}" stroke-width="2"/>')
    for (a, b), point, words in zip(engine, points, panel.marks, strict=True):
        fill = "white" if "prefix" in point else COLOURS[0]
        parts.append(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{fill}" stroke="{COLOURS[0]}" stroke-width="1.5"/>'
        )
        parts.append(_text(a, b - 9, f"{point['us_per_token'] / point['floor_us']:.1f}x", size=10, halo=True))
        if words:
            parts.append(_text(a, b - 21, words, size=10, halo=True))
    return "\n".join(parts)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def _legend(names: Sequence[str], *, hollow: bool) -> str:
    """Under the title: the two lines, and what is written at the points."""
    looks = (f'stroke="{COLOURS[0]}" stroke-width="2"', f'stroke="{LIGHT}" stroke-width="1.5" stroke-dasharray="5 4"')
    parts, left = [], LEFT
    for name, look in zip(names, looks, strict=True):
        parts.append(f'<line x1="{left}" y1="46" x2="{left + 26}" y2="46" {look}/>')
        parts.append(_text(left + 32, 50, name, anchor="start"))
        left += 60 + 7 * len(name)
    words = "2.0x: times the floor" + ("; hollow: by tokens in the middle of a row" if hollow else "")
    return "\n".join([*parts, _text(left, 50, words, anchor="start")])


def _text(
    x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, weight: str = "normal", halo: bool = False
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{INK}"'
    style += ' paint-order="stroke" stroke="white" stroke-width="3"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'

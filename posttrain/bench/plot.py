"""The picture of a sweep: time per token against rows and against length, both axes logarithmic, as an SVG by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from posttrain.tracking.atomic import replace_file
from posttrain.tracking.svg import COLOURS

WIDTH, HEIGHT = 860, 380
LEFT, TOP, BOTTOM, GAP = 64, 66, 52, 62
PANEL = (WIDTH - LEFT - GAP - 24) / 2
INK, PALE = "#374151", "#e5e7eb"


def write_plot(
    path: Path, engine: str, model: str, by_rows: Sequence[dict[str, Any]], by_length: Sequence[dict[str, Any]]
) -> None:
    """Two panels with the same vertical axis; each shows the engine and the floor."""
    points = [*by_rows, *by_length]
    times = [point[key] for point in points for key in ("us_per_token", "floor_us")]
    powers = range(math.floor(math.log10(min(times))), math.ceil(math.log10(max(times))) + 1)
    rows_fixed = f"responses of {by_rows[0]['tokens']} tokens"
    length_fixed = f"{by_length[0]['rows']} rows side by side"
    parts = [
        _text(WIDTH / 2, 22, f"{engine}, {model}: microseconds per token", size=15, weight="bold"),
        _panel(LEFT, by_rows, "rows", f"rows decoded side by side ({rows_fixed})", powers),
        _panel(LEFT + PANEL + GAP, by_length, "tokens", f"tokens per response ({length_fixed})", powers),
        _legend([engine, "floor of this machine"]),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    sheet = '<rect width="100%" height="100%" fill="white"/>'
    text = "\n".join([f'{head} font-family="sans-serif" font-size="12">', sheet, *parts, "</svg>\n"])
    replace_file(path, text.encode())


def _panel(left: float, points: Sequence[dict[str, Any]], key: str, label: str, powers: range) -> str:
    bottom, right = HEIGHT - BOTTOM, left + PANEL
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
    for value in values[:: max(1, math.ceil(len(values) / 10))]:
        parts.append(_text(x(value), bottom + 18, f"{value:,}", size=11))
    parts.append(f'<path d="M{left:g} {TOP}V{bottom}H{right:g}" fill="none" stroke="#6b7280"/>')
    parts.append(_text(left + PANEL / 2, bottom + 38, label))
    for colour, what in zip(COLOURS, ("us_per_token", "floor_us"), strict=False):
        line = [(x(point[key]), y(point[what])) for point in points]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in line)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in line]
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

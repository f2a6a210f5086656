"""line_chart: a small SVG picture of a few curves, written by hand so that no plotting package is needed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from posttrain.tracking.safe_files import replace_file

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 48

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def line_chart(
    series: Series, *, title: str = "", x_label: str = "step", y_label: str = "", width: int = 720, height: int = 400
) -> str:
    """The SVG text of a chart with one line per entry of `series` (name -> (x values, y values)).

    Values that are not finite leave a gap. Equal input gives equal text.
    """
    points = {name: list(zip(map(float, xs), map(float, ys), strict=True)) for name, (xs, ys) in series.items()}
    finite = [(x, y) for line in points.values() for x, y in line if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        raise ValueError("a chart needs at least one finite value")
    x_ticks, y_ticks = ticks(*_span([x for x, _ in finite])), ticks(*_span([y for _, y in finite]))
    plane = _Plane(x_ticks, y_ticks, width, height)
    body = [
        _grid(plane),
        *(_curve(plane, line, i) for i, line in enumerate(points.values())),
        _legend(list(points), width),
    ]
    labels = [
        _text(width / 2, 20, title, size=15, weight="bold"),
        _text(width / 2, height - 10, x_label),
        f'<g transform="rotate(-90 14 {height / 2:g})">{_text(14, height / 2, y_label)}</g>' if y_label else "",
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(filter(None, [*body, *labels]))
        + "\n</svg>\n"
    )


def write_chart(path: str | os.PathLike[str], series: Series, **kwargs: str | int) -> Path:
    replace_file(Path(path), line_chart(series, **kwargs).encode())  # type: ignore[arg-type]
    return Path(path)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that enclose low to high."""
    raw = (high - low) / max(1, about - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    gap = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [round(i * gap, 12) for i in range(first, last + 1)]


class _Plane:
    def __init__(self, x_ticks: list[float], y_ticks: list[float], width: int, height: int) -> None:
        self.x_ticks, self.y_ticks = x_ticks, y_ticks
        self.right, self.bottom = width - _RIGHT, height - _BOTTOM

    def x(self, value: float) -> float:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return round(_LEFT + (value - low) / (high - low) * (self.right - _LEFT), 2)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return round(self.bottom - (value - low) / (high - low) * (self.bottom - _TOP), 2)


def _grid(plane: _Plane) -> str:
    lines = []
    for tick in plane.y_ticks:
        y = plane.y(tick)
        lines.append(f'<line x1="{_LEFT}" y1="{y:g}" x2="{plane.right}" y2="{y:g}" stroke="#e5e7eb"/>')
        lines.append(_text(_LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
    for tick in plane.x_ticks:
        x = plane.x(tick)
        lines.append(f'<line x1="{x:g}" y1="{plane.bottom}" x2="{x:g}" y2="{plane.bottom + 5}" stroke="#6b7280"/>')
        lines.append(_text(x, plane.bottom + 18, f"{tick:g}"))
    axes = f"M{_LEFT} {_TOP}V{plane.bottom}H{plane.right}"
    return "\n".join([*lines, f'<path d="{axes}" fill="none" stroke="#6b7280"/>'])


def _curve(plane: _Plane, line: list[tuple[float, float]], index: int) -> str:
    colour = COLOURS[index % len(COLOURS)]
    path, pen = [], "M"
    for x, y in line:
        if math.isfinite(x) and math.isfinite(y):
            path.append(f"{pen}{plane.x(x):g} {plane.y(y):g}")
            pen = "L"
        else:
            pen = "M"
    dots = [
        f'<circle cx="{plane.x(x):g}" cy="{plane.y(y):g}" r="3" fill="{colour}"/>'
        for x, y in line[:1]
        if len(path) == 1
    ]
    return f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>' + "".join(dots)


def _legend(names: list[str], width: int) -> str:
    if len(names) < 2:
        return ""
    entries = []
    for index, name in enumerate(names):
        y = _TOP + 10 + 18 * index
        colour = COLOURS[index % len(COLOURS)]
        entries.append(
            f'<line x1="{_LEFT + 12}" y1="{y}" x2="{_LEFT + 34}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        )
        entries.append(_text(_LEFT + 40, y + 4, name, anchor="start"))
    return "\n".join(entries)


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, weight: str = "normal") -> str:
    if not text:
        return ""
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="#374151"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    return low, high

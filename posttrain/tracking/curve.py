"""A run's metrics as pictures: over its steps in braille on a terminal, or as a small SVG chart; and samples of its
start next to those of now.

The chart is written by hand so that no plotting package is needed.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from posttrain.tracking.safe_files import replace_file

# Bit of the braille dot at (row, column) of a character's 4 x 2 dots.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


LABEL_ROWS = 3  # every third row has a label: those of shares are 1, 0.75, 0.5, 0.25 and 0


def text_plot(
    steps: Sequence[float],
    values: Sequence[float],
    *,
    title: str = "",
    width: int = 72,
    height: int = 1 + 4 * LABEL_ROWS,
    scale: Sequence[float] = (),
) -> str:
    """A line through (step, value) as text of at most `width` columns; values that are not finite are left out.

    Curves that are given the same `scale` (all values of all of them) can be compared.
    """
    points = [(float(x), float(y)) for x, y in zip(steps, values, strict=True) if math.isfinite(y)]
    if not points:
        return f"{title}: no values"
    low, high = _range([y for y in map(float, scale) if math.isfinite(y)] or [y for _, y in points])
    labels = [_label(high - (high - low) * row / max(1, height - 1)) for row in range(height)]
    gutter = max(map(len, labels))
    columns = max(8, width - gutter - 2)
    canvas = _draw(points, (low, high), columns, height)
    lines = [title] if title else []
    for row in range(height):
        shown = labels[row] if row % LABEL_ROWS == 0 or row == height - 1 else ""
        lines.append(f"{shown:>{gutter}} {'┤' if shown else '│'}" + "".join(canvas[row]).rstrip("⠀"))
    first, last = _label(points[0][0]), _label(points[-1][0])
    lines.append(" " * gutter + " └" + "─" * columns)
    lines.append(" " * (gutter + 2) + first + last.rjust(columns - len(first)))
    return "\n".join(lines)


def _draw(points: list[tuple[float, float]], span: tuple[float, float], columns: int, rows: int) -> list[list[str]]:
    low, high = span
    left, right = points[0][0], points[-1][0]
    dots_x, dots_y = columns * 2 - 1, rows * 4 - 1
    places = [
        (round((x - left) / ((right - left) or 1) * dots_x), round((high - y) / (high - low) * dots_y))
        for x, y in points
    ]
    cells = [[0x2800] * columns for _ in range(rows)]
    for (x0, y0), (x1, y1) in zip(places, places[1:] or places, strict=False):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(count + 1):
            x, y = round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return [[chr(cell) for cell in row] for row in cells]


def before_after(rows: Sequence[tuple[str, str, float, str, float]], *, width: int = 100, lines: int = 4) -> str:
    """Prompts with a response (and its score) from the start of a run next to one from now.

    `rows` are (prompt, response before, score before, response now, score now).
    """
    half = (width - 3) // 2
    out = []
    for prompt, before, before_score, after, after_score in rows:
        out.append(textwrap.shorten(" ".join(prompt.split()), width, placeholder=" …"))
        left = [f"before  score {before_score:.3g}", *_wrap(before, half, lines)]
        right = [f"after   score {after_score:.3g}", *_wrap(after, half, lines)]
        for i in range(max(len(left), len(right))):
            a, b = (side[i] if i < len(side) else "" for side in (left, right))
            out.append(f"{_pad(a, half)} │ {b}".rstrip())
        out.append("─" * width)
    return "\n".join(out)


def sample_groups(rows: Sequence[Mapping[str, Any]], *, count: int, width: int = 100, lines: int = 8) -> str:
    """The first `count` prompts (`uid`) with their reference answer and all their responses, best first."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["uid"], []).append(row)
    out = []
    for members in list(groups.values())[:count]:
        out += ["─" * width, *_wrap(members[0].get("prompt") or "", width, lines)]
        if members[0].get("ground_truth") is not None:
            out += _wrap(f"reference answer: {members[0]['ground_truth']}", width, 2)
        for row in sorted(members, key=lambda row: -(row["score"] if row["score"] is not None else -math.inf)):
            score = "     -" if row["score"] is None else f"{row['score']:6.3g}"
            first, *rest = _wrap(row.get("response") or "", width - 10, lines) or [""]
            out += [f"{score} │ {first}", *(f"{'':6} │ {line}" for line in rest)]
            if turns := json.loads(row.get("turn_rewards") or "[]"):
                told = ", ".join(f"{reward:.3g} (turn {number + 1})" for number, reward in turns)
                out += _wrap(f"       rewards: {told}", width, 2)
            if row.get("error"):
                out += _wrap(f"       ! {row['error']}", width, 2)
    return "\n".join(out)


def _wrap(text: str, width: int, most: int) -> list[str]:
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        line = ""
        for char in paragraph.expandtabs(2):
            if not char.isprintable():
                continue  # a response must not steer the reader's terminal
            if _columns(line + char) > width:
                lines.append(line)
                line = ""
            line += char
        lines.append(line)
    return lines if len(lines) <= most else [*lines[: most - 1], "…"]


def _columns(text: str) -> int:
    # Terminal columns: wide characters (Chinese, Japanese, ...) take two, combining ones none.
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int) -> str:
    return text + " " * max(0, width - _columns(text))


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low >= 0.0 and high <= 1.0 and high > 0.5:
        return 0.0, 1.0  # shares and accuracies are read against the whole scale
    if low == high == 0.0:
        return 0.0, 1.0  # rewards that never came
    if low == high:
        return low - abs(low) * 0.1, high + abs(high) * 0.1
    return low, high


def _label(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


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
        svg_text(width / 2, 20, title, size=15, weight="bold"),
        svg_text(width / 2, height - 10, x_label),
        f'<g transform="rotate(-90 14 {height / 2:g})">{svg_text(14, height / 2, y_label)}</g>' if y_label else "",
    ]
    return svg_page(width, height, [*body, *labels])


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
        lines.append(svg_text(_LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
    for tick in plane.x_ticks:
        x = plane.x(tick)
        lines.append(f'<line x1="{x:g}" y1="{plane.bottom}" x2="{x:g}" y2="{plane.bottom + 5}" stroke="#6b7280"/>')
        lines.append(svg_text(x, plane.bottom + 18, f"{tick:g}"))
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
        entries.append(svg_text(_LEFT + 40, y + 4, name, anchor="start"))
    return "\n".join(entries)


def svg_page(width: float, height: float, parts: Sequence[str], *, size: int = 12) -> str:
    """An SVG picture of these parts on white; empty ones are left out."""
    box = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="{size}">'
    sheet = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, sheet, *filter(None, parts), "</svg>\n"])


def svg_text(
    x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, weight: str = "normal", halo: bool = False
) -> str:
    """A text of a picture; with `halo` it can be read over lines."""
    if not text:
        return ""
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="#374151"'
    style += ' paint-order="stroke" stroke="white" stroke-width="3"' if halo else ""
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    return low, high

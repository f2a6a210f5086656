"""The output of a bench: a status line, aligned tables, and SVG pictures.

A sweep's picture has time per token by rows, length and model, all axes logarithmic; the area below the floor is
shaded, and each point is labelled with its multiple of the floor. What algorithms learn has a small panel each:
accuracy over steps, a thin line per seed and their mean.
"""

from __future__ import annotations

import math
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.texts import align_columns
from posttrain.tracking.curve import COLOURS, svg_page, svg_text
from posttrain.tracking.safe_files import replace_file


class StatusLine:
    """The line that says what is being done. It goes to stderr, so that stdout has the table alone."""

    def __init__(self) -> None:
        self.stream = sys.stderr
        # In a log, each status is a line of its own; rewriting a line would fill the log with control characters.
        self.live = self.stream.isatty()

    def begin(self, text: str) -> Callable[[float], None]:
        """Show `text`; gives what shows it again with the seconds since then."""
        if self.live:
            self._rewrite(text)
        else:
            print(text, file=self.stream, flush=True)
        return lambda seconds: self.wait(text, seconds)

    def wait(self, text: str, seconds: float) -> None:
        if self.live:
            self._rewrite(f"{text}  {seconds:.0f} s")

    def clear(self) -> None:
        if self.live:
            self._rewrite("")

    def _rewrite(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self.stream.write("\r\x1b[K" + text[:width])
        self.stream.flush()


def render(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """A table with a line under its head; columns in `left` are aligned to the left, the others to the right."""
    rule = ["-" * max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(align_columns([head, rule, *rows], left))


def factor(value: float, ours: float | None) -> str:
    return "-" if not ours else f"{value / ours:.2f}x"


LIGHT, PALE, SHADE = "#6b7280", "#e5e7eb", "#f3f4f6"


# -- a sweep --------------------------------------------------------------------------------------------------------
HEIGHT = 380
LEFT, TOP, BOTTOM, GAP, RIGHT = 64, 66, 52, 54, 24
PANEL, INSIDE = 355.0, 22.0


@dataclass(frozen=True)
class Panel:
    """Points along one axis: `us_per_token` and `floor_us` over `key`; one that has a `prefix` is drawn hollow."""

    points: Sequence[dict[str, Any]]
    key: str
    label: str
    marks: Sequence[str]  # words over the points
    names: Sequence[str] | None = None  # labels under the points, in place of their numbers


def write_plot(path: Path, engine: str, model: str, panels: Sequence[Panel]) -> None:
    """The panels side by side with the same vertical axis; each shows the engine and the floor."""
    times = [point[key] for panel in panels for point in panel.points for key in ("us_per_token", "floor_us")]
    lines = levels(min(times), max(times))
    width = LEFT + len(panels) * (PANEL + GAP) - GAP + RIGHT
    parts = [
        svg_text(LEFT, 24, f"{engine}, {model}: microseconds per token", anchor="start", size=15, weight="bold"),
        *(_axis(LEFT + place * (PANEL + GAP), panel, lines) for place, panel in enumerate(panels)),
        _legend([engine, "floor of this machine"], hollow=any("prefix" in p for panel in panels for p in panel.points)),
    ]
    replace_file(path, svg_page(width, HEIGHT, parts).encode())


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


def _axis(left: float, panel: Panel, lines: Sequence[float]) -> str:
    points, key, bottom, right = panel.points, panel.key, HEIGHT - BOTTOM, left + PANEL
    values = [point[key] for point in points]
    low, span = math.log2(min(values)), math.log2(max(values) / min(values)) or 1.0
    high = math.log10(lines[-1] / lines[0])

    def x(value: float) -> float:
        return left + INSIDE + (math.log2(value) - low) / span * (PANEL - 2 * INSIDE)

    def y(value: float) -> float:
        return bottom - math.log10(value / lines[0]) / high * (bottom - TOP)

    # Both axes are logarithmic: rows, lengths and parameters double, times span decades.
    engine, floor = ([(x(p[key]), y(p[what])) for p in points] for what in ("us_per_token", "floor_us"))
    under = f"{_path(floor)}L{floor[-1][0]:.1f} {bottom}L{floor[0][0]:.1f} {bottom}Z"
    parts = [f'<path d="{under}" fill="{SHADE}"/>']
    for level in lines:
        at = y(level)
        parts.append(f'<line x1="{left:g}" y1="{at:.1f}" x2="{right:g}" y2="{at:.1f}" stroke="{PALE}"/>')
        parts.append(svg_text(left - 6, at + 4, f"{level:,g}", anchor="end", size=11))
    names = panel.names or [f"{value:,}" for value in values]
    for value, name in list(zip(values, names, strict=True))[:: max(1, math.ceil(len(values) / 10))]:
        parts.append(svg_text(x(value), bottom + 18, name, size=11))
    parts.append(f'<path d="M{left:g} {TOP}V{bottom}H{right:g}" fill="none" stroke="{LIGHT}"/>')
    parts.append(svg_text(left + PANEL / 2, bottom + 38, panel.label))
    parts.append(f'<path d="{_path(floor)}" fill="none" stroke="{LIGHT}" stroke-width="1.5" stroke-dasharray="5 4"/>')
    parts.append(f'<path d="{_path(engine)}" fill="none" stroke="{COLOURS[0]}" stroke-width="2"/>')
    for (a, b), point, words in zip(engine, points, panel.marks, strict=True):
        fill = "white" if "prefix" in point else COLOURS[0]
        parts.append(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{fill}" stroke="{COLOURS[0]}" stroke-width="1.5"/>'
        )
        parts.append(svg_text(a, b - 9, f"{point['us_per_token'] / point['floor_us']:.1f}x", size=10, halo=True))
        if words:
            parts.append(svg_text(a, b - 21, words, size=10, halo=True))
    return "\n".join(parts)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def _legend(names: Sequence[str], *, hollow: bool) -> str:
    looks = (f'stroke="{COLOURS[0]}" stroke-width="2"', f'stroke="{LIGHT}" stroke-width="1.5" stroke-dasharray="5 4"')
    parts, left = [], LEFT
    for name, look in zip(names, looks, strict=True):
        parts.append(f'<line x1="{left}" y1="46" x2="{left + 26}" y2="46" {look}/>')
        parts.append(svg_text(left + 32, 50, name, anchor="start"))
        left += 60 + 7 * len(name)
    words = "2.0x: times the floor" + ("; hollow: by tokens in the middle of a row" if hollow else "")
    return "\n".join([*parts, svg_text(left, 50, words, anchor="start")])


# -- what algorithms learn ------------------------------------------------------------------------------------------
Curves = Sequence[Sequence[Sequence[float]]]  # of one algorithm by seed: [step, accuracy] and so on
ACROSS, WIDE, HIGH, BETWEEN, SIDE, HEAD_ROOM = 6, 126, 84, 30, 44, 62


def write_panels(path: Path, found: Mapping[str, Curves], title: str) -> None:
    """A panel for the runs of each algorithm; all share both axes, so that they compare at a glance."""
    last = max(point[0] for curves in found.values() for curve in curves for point in curve) or 1
    across = min(ACROSS, len(found))
    width = SIDE + across * (WIDE + 10) + 10
    height = HEAD_ROOM + math.ceil(len(found) / across) * (HIGH + BETWEEN) + 12
    parts = [svg_text(width / 2, 22, title, size=15, weight="bold")]
    for place, (name, curves) in enumerate(found.items()):
        row, column = divmod(place, across)
        left, top = SIDE + column * (WIDE + 10), HEAD_ROOM + row * (HIGH + BETWEEN)
        parts.append(_algorithm(left, top, name, curves, last, labelled=column == 0))
    replace_file(path, svg_page(width, height, parts, size=11).encode())


def _algorithm(left: float, top: float, name: str, curves: Curves, last: float, *, labelled: bool) -> str:
    def at(step: float, accuracy: float) -> str:
        return f"{left + step / last * WIDE:.1f} {top + (1 - accuracy) * HIGH:.1f}"

    def line(points: Sequence[Sequence[float]], opacity: float, width: float) -> str:
        path = "M" + "L".join(at(*point) for point in points)
        look = f'stroke="{COLOURS[0]}" stroke-opacity="{opacity:g}" stroke-width="{width:g}"'
        return f'<path d="{path}" fill="none" {look}/>'

    parts = [svg_text(left + WIDE / 2, top - 5, name, size=11 if len(name) <= 20 else 9)]
    for level in (0.0, 0.5, 1.0):
        y = top + (1 - level) * HIGH
        parts.append(f'<line x1="{left:g}" y1="{y:g}" x2="{left + WIDE:g}" y2="{y:g}" stroke="{PALE}"/>')
        if labelled:
            parts.append(svg_text(left - 5, y + 4, f"{level:g}", anchor="end", size=11))
    parts += [line(curve, 0.35, 1) for curve in curves]
    parts.append(line(mean_curve(curves), 1, 2))
    end = statistics.fmean(curve[-1][1] for curve in curves)
    parts.append(svg_text(left + WIDE - 2, top + HIGH - 4, f"{end:.2f}", anchor="end", size=11))
    return "\n".join(parts)


def mean_curve(curves: Curves) -> list[list[float]]:
    """Mean over seeds at every step that all of them have."""
    by_seed = [{step: value for step, value in curve} for curve in curves]
    shared = sorted(set.intersection(*map(set, by_seed)))
    return [[step, statistics.fmean(curve[step] for curve in by_seed)] for step in shared]

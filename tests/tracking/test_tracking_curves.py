"""Curves and tables for the terminal, and the SVG chart."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from posttrain.tracking.curve import before_after, line_chart, text_plot, ticks, write_chart

SVG = "{http://www.w3.org/2000/svg}"


def dots(plot: str) -> list[tuple[int, int]]:
    """(column, row) of every character of `plot` that has a dot, inside the axes."""
    lines = [line for line in plot.splitlines() if "┤" in line or "│" in line]
    inner = [line.replace("┤", "│").split("│", 1)[1] for line in lines]
    return [(x, y) for y, line in enumerate(inner) for x, char in enumerate(line) if 0x2800 < ord(char) <= 0x28FF]


def test_rising_curve_goes_from_bottom_left_to_top_right():
    plot = text_plot(range(50), [i / 49 for i in range(50)], title="reward_mean", width=40, height=8)
    lines = plot.splitlines()
    assert lines[0] == "reward_mean" and max(map(len, lines)) <= 40 and len(lines) == 8 + 3
    marks = dots(plot)
    assert min(marks)[1] == 7 and max(marks)[1] == 0
    assert {x for x, _ in marks} == set(range(max(x for x, _ in marks) + 1))  # no gaps
    assert lines[1].lstrip().startswith("1 ┤") and lines[8].lstrip().startswith("0 ┤")
    assert lines[-1].split() == ["0", "49"]


def test_constant_single_and_missing_values_can_be_drawn():
    assert len({y for _, y in dots(text_plot([1, 2, 3], [5.0, 5.0, 5.0]))}) == 1
    assert len(dots(text_plot([1], [0.0]))) == 1
    assert "-1" not in text_plot([1, 2], [0.0, 0.0])  # rewards that never came: no axis below zero
    assert text_plot([1, 2], [math.nan, math.inf], title="x") == "x: no values"
    assert dots(text_plot([1, 2, 3], [0.0, math.nan, 1.0]))


def test_before_and_after_stand_side_by_side():
    table = before_after([("What is\n1+1?", "eleven " * 30, 0.0, "二\x1b[31m", 1.0)], width=60)
    lines = table.splitlines()
    assert lines[0] == "What is 1+1?" and lines[1].startswith("before  score 0") and "after   score 1" in lines[1]
    assert all(line[28:30] == " │" for line in lines[1:-1]) and "…" in table
    assert lines[2].endswith("二[31m") and "\x1b" not in table  # no control of the reader's terminal


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.13, 0.37), (-3, 12345), (1e-6, 2e-6), (7, 8)])
def test_ticks_are_round_and_enclose_the_values(low, high):
    marks = ticks(low, high)
    assert marks[0] <= low and marks[-1] >= high and 3 <= len(marks) <= 9
    gap = marks[1] - marks[0]
    assert round(gap / 10 ** math.floor(math.log10(gap) + 1e-9), 6) in (1, 2, 5, 10)


def test_chart_has_a_line_per_series_a_legend_axes_and_gaps(tmp_path):
    series = {"grpo <n=5>": ([0, 1, 2, 3], [0.0, 0.5, math.nan, 1.0]), "ppo": ([0, 3], [0.2, 0.4])}
    path = write_chart(tmp_path / "reward.svg", series, title="Reward & length", y_label="reward_mean")
    root = ET.fromstring(path.read_text())
    curves = [p for p in root.iter(f"{SVG}path") if p.get("stroke-width") == "2"]
    assert [c.get("d", "").count("M") for c in curves] == [2, 1] and curves[0].get("stroke") != curves[1].get("stroke")
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"grpo <n=5>", "ppo", "Reward & length", "reward_mean", "step", "0.2", "1", "3"} <= set(texts)
    first = curves[1].get("d", "")[1:].split("L")[0].split()
    assert float(first[0]) == 64 and 40 < float(first[1]) < 352


def test_equal_charts_are_equal_text_and_empty_ones_are_refused():
    assert line_chart({"a": ([1, 2], [3, 4])}) == line_chart({"a": ([1, 2], [3, 4])})
    assert "<circle" in line_chart({"a": ([1], [3])})
    with pytest.raises(ValueError, match="finite"):
        line_chart({"a": ([1], [math.nan])})


def test_a_plot_of_shares_has_round_labels():
    plot = text_plot([1, 2, 3], [0.0, 0.4, 1.0])
    assert [line.split()[0] for line in plot.splitlines() if "┤" in line] == ["1", "0.75", "0.5", "0.25", "0"]

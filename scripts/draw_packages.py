"""Draw the dependencies between packages of a checkout as SVG: `python scripts/draw_packages.py OUT.svg [CHECKOUT]`.

A package stands above everything that it imports. Only direct neighbours are joined: an import that a longer chain of
imports implies is left out. Red lines are imports inside of a cycle.
"""

from __future__ import annotations

import sys
from pathlib import Path

from import_graph import between_rows, cycles, find_modules, reachable, read_graph, read_table, row_of

HERE = Path(__file__).resolve().parents[1]
WIDTH, BOX, HIGH, GAP = 1180, 132, 40, 46


def layers_of(graph: dict[str, set[str]]) -> dict[str, int]:
    """0 for what imports nothing; names in a cycle share a layer."""
    group_of = {name: name for name in graph}
    for group in cycles(graph):
        group_of.update(dict.fromkeys(group, group[0]))
    known: dict[str, int] = {}

    def layer(group: str) -> int:
        if group not in known:
            names = [name for name in graph if group_of[name] == group]
            below = {group_of[other] for name in names for other in graph[name]} - {group}
            known[group] = 1 + max((layer(other) for other in below), default=-1)
        return known[group]

    return {name: layer(group_of[name]) for name in graph}


def direct(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports that no longer chain implies."""
    below = {name: reachable(name, graph) for name in graph}
    return [(a, b) for a in graph for b in graph[a] if not any(b in below[c] and c != b for c in graph[a] - {a, b})]


def draw(checkout: Path) -> str:
    table = read_table(HERE / "docs" / "architecture.md")
    package = checkout / "posttrain"
    graph = between_rows(read_graph(package), table)
    lines: dict[str, int] = {}
    for name, file in find_modules(package).items():
        row = row_of(name, table) or "posttrain"
        lines[row] = lines.get(row, 0) + len(file.read_text().splitlines())
    layers = layers_of(graph)
    circles = [set(group) for group in cycles(graph)]
    red = [(a, b) for a in graph for b in graph[a] if any({a, b} <= group for group in circles)]
    top = max(layers.values())
    place: dict[str, tuple[float, float]] = {}
    for number in range(top + 1):
        # Beside what it imports: lines cross less if a box stands below the middle of its users.
        names = sorted((name for name in graph if layers[name] == number), key=lambda name: _middle(name, graph, place))
        for column, name in enumerate(names):
            x = WIDTH * (column + 0.5) / len(names)
            place[name] = x, 30 + (top - number) * (HIGH + GAP)
    out = [f'<path d="{_line(place[a], place[b])}" stroke="#9aa5b1"/>' for a, b in direct(graph) if (a, b) not in red]
    out += [f'<path d="{_line(place[a], place[b])}" stroke="#d64545" stroke-width="1.6"/>' for a, b in red]
    for name, (x, y) in place.items():
        out.append(
            f'<rect x="{x - BOX / 2}" y="{y}" width="{BOX}" height="{HIGH}" rx="6" fill="#f0f4f8" stroke="#486581"/>'
        )
        out.append(f'<text x="{x}" y="{y + 17}" font-weight="bold">{name or "posttrain"}</text>')
        out.append(f'<text x="{x}" y="{y + 32}" fill="#627d98">{lines.get(name, 0):,} lines</text>')
    height = 60 + (top + 1) * (HIGH + GAP)
    style = 'font-family="sans-serif" font-size="12" text-anchor="middle" fill="none"'
    body = "\n".join(
        line.replace("<text ", '<text fill="#102a43" ', 1) if "fill=" not in line else line for line in out
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>\n{body}\n</svg>\n'


def _middle(name: str, graph: dict[str, set[str]], place: dict[str, tuple[float, float]]) -> float:
    xs = [place[other][0] for other in graph[name] if other in place]
    return sum(xs) / len(xs) if xs else WIDTH / 2


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    y1, y2 = (y1 + HIGH, y2) if y1 <= y2 else (y1, y2 + HIGH)
    return f"M{x1:.0f} {y1:.0f}C{x1:.0f} {(y1 + y2) / 2:.0f} {x2:.0f} {(y1 + y2) / 2:.0f} {x2:.0f} {y2:.0f}"


if __name__ == "__main__":
    target, *given = sys.argv[1:]
    Path(target).write_text(draw(Path(given[0]).resolve() if given else HERE))

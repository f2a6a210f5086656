"""The shape of a checkout in figures: lines, files, comments, layers, cycles, settings, longest functions.

    python scripts/structure.py                     # this checkout
    python scripts/structure.py BEFORE AFTER        # two checkouts, each figure as `before -> after`

Source is read, never run. Layers and back imports are judged by the table in docs/architecture.md beside this script.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from import_graph import (
    Import,
    as_mapping,
    back_imports,
    between_rows,
    cycles,
    depth,
    find_modules,
    read_graph,
    read_table,
)

HERE = Path(__file__).resolve().parents[1]
SMALL = 90  # lines: a module of fewer with one importer may be half an idea
KEYS = ("lines", "without comments", "code", "comments %", "files", "layers")


@dataclass
class Lines:
    """Lines of some files. `code` is what remains without comments, docstrings and blank lines."""

    total: int = 0
    comments: int = 0  # lines that carry one, alone or after code
    only_comments: int = 0
    docstrings: int = 0
    blank: int = 0
    files: int = 0

    def __add__(self, other: Lines) -> Lines:
        return Lines(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def code(self) -> int:
        return self.total - self.only_comments - self.docstrings - self.blank


@dataclass
class Shape:
    """What is known about one checkout."""

    packages: dict[str, Lines] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    figures: dict[str, object] = field(default_factory=dict)
    back: list[Import] = field(default_factory=list)
    package_cycles: list[list[str]] = field(default_factory=list)
    module_cycles: list[list[str]] = field(default_factory=list)
    longest: list[tuple[int, str]] = field(default_factory=list)


def count_lines(text: str, tree: ast.Module) -> Lines:
    lines = text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    alone = {number for number in comments if lines[number - 1].lstrip().startswith("#")}
    docstrings = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    blank = sum(1 for number, line in enumerate(lines, 1) if not line.strip() and number not in docstrings)
    return Lines(len(lines), len(comments), len(alone), len(docstrings), blank, 1)


def package_of(module: str) -> str:
    """`posttrain.rewards.pool` -> `rewards`."""
    return module.split(".")[1] if "." in module else "posttrain"


def measure(root: Path) -> Shape:
    package, shape = root / "posttrain", Shape()
    modules, edges = find_modules(package), read_graph(package)
    functions: list[tuple[int, str]] = []
    ignores = 0
    for name, file in modules.items():
        text = file.read_text()
        tree = ast.parse(text)
        home = package_of(name) if file.parent != package else "(top level)"
        shape.packages[home] = shape.packages.get(home, Lines()) + count_lines(text, tree)
        ignores += len(re.findall(r"#\s*(?:pyright|type): ignore", text))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(((node.end_lineno or node.lineno) - node.lineno + 1, f"{name}.{node.name}"))
    graph = as_mapping(edges, modules)
    for home in shape.packages:
        inside = {name for name in modules if package_of(name) == home}
        shape.layers[home] = depth({name: graph[name] & inside for name in inside})
    table = read_table(HERE / "docs" / "architecture.md")
    packages = between_rows(edges, table)
    shape.back = back_imports(edges, table)
    shape.package_cycles, shape.module_cycles = cycles(packages), cycles(graph)
    shape.longest = sorted(functions, reverse=True)[:10]
    importers = Counter(target for _, target in {(edge.source, edge.target) for edge in edges})
    lengths = {name: len(file.read_text().splitlines()) for name, file in modules.items()}
    settings = root / "docs" / "settings.md"
    total = sum(shape.packages.values(), Lines())
    shape.figures = {
        "lines": total.total,
        "lines without comments": total.total - total.only_comments,
        "lines of code (no comments, docstrings, blank lines)": total.code,
        "comments, % of lines": round(100 * total.comments / total.total, 1),
        "files": total.files,
        "packages": len([name for name in shape.packages if not name.startswith("(")]),
        f"modules below {SMALL} lines with one importer": sum(
            1 for name, number in importers.items() if number == 1 and lengths[name] < SMALL
        ),
        "layers of packages": depth(packages),
        "layers of modules": depth(graph),
        "back imports": len(shape.back),
        "packages in cycles": sum(map(len, shape.package_cycles)),
        "modules in cycles": sum(map(len, shape.module_cycles)),
        "settings of main_ppo": len(re.findall(r"^\| `", settings.read_text(), re.M)) if settings.exists() else "?",
        "longest function, lines": shape.longest[0][0] if shape.longest else 0,
        "functions above 60 lines": sum(1 for lines, _ in functions if lines > 60),
        "pyright ignores": ignores,
    }
    return shape


def row_of(shape: Shape, name: str) -> list[object]:
    lines = shape.packages.get(name)
    if lines is None:
        return ["-"] * len(KEYS)
    share = round(100 * lines.comments / max(lines.total, 1), 1)
    without = lines.total - lines.only_comments
    return [lines.total, without, lines.code, share, lines.files, shape.layers.get(name, "-")]


def cell(values: list[object]) -> str:
    return str(values[0]) if len(set(map(str, values))) == 1 else " -> ".join(map(str, values))


def report(shapes: list[Shape]) -> str:
    out = ["| | " + ("before -> after" if len(shapes) > 1 else "") + " |", "|---|---|"]
    out += [f"| {name} | {cell([shape.figures[name] for shape in shapes])} |" for name in shapes[-1].figures]
    out += ["", "| package | " + " | ".join(KEYS) + " |", "|" + "---|" * (len(KEYS) + 1)]
    for name in sorted({name for shape in shapes for name in shape.packages}):
        rows = [row_of(shape, name) for shape in shapes]
        out.append(f"| {name} | " + " | ".join(cell([*values]) for values in zip(*rows, strict=True)) + " |")
    for title, shape in zip(["before", "after"] if len(shapes) > 1 else ["this checkout"], shapes, strict=True):
        out += ["", f"## {title}", "", "Longest functions:"]
        out += [f"- {lines} lines: {name}" for lines, name in shape.longest]
        pairs = Counter((package_of(edge.source), package_of(edge.target)) for edge in shape.back)
        out += ["", "Back imports: " + (", ".join(f"{a} -> {b} ({n})" for (a, b), n in pairs.most_common()) or "none")]
        out += ["Cycles of packages: " + ("; ".join(", ".join(group) for group in shape.package_cycles) or "none")]
        out += ["Cycles of modules: " + ("; ".join(", ".join(group) for group in shape.module_cycles) or "none")]
    return "\n".join(out)


if __name__ == "__main__":
    print(report([measure(Path(root).resolve()) for root in sys.argv[1:] or [HERE]]))

"""Rows of text as an aligned table."""

from __future__ import annotations

from collections.abc import Sequence


def render(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Columns in `left` are aligned to the left, the others to the right; the last one is never padded."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    shown = []
    for line in [lines[0], rule, *lines[1:]]:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)


def factor(value: float, ours: float | None) -> str:
    """`value` as a multiple of ours."""
    return "-" if not ours else f"{value / ours:.2f}x"

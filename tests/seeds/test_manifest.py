"""Each item that the documents ask for has a test that runs it, or stands in the list of what waits; no third kind."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNTS = {"S0": 152, "S1": 55, "S2": 49, "S3": 76, "S4": 116, "D": 37, "M": 39}
"""Items of the five documents, of their disagreements and of their mistakes."""
PARTS = ("index",)
"""What an item may wait for."""


def table(name: str) -> dict[str, str]:
    lines = (Path(__file__).with_name(name)).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    assert len({row[0] for row in rows}) == len(rows), f"{name} names an item twice"
    return {item: value for item, value in rows}


@cache
def names_in(path: str) -> set[str]:
    """The names of the tests in a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_item_has_a_test_or_what_it_waits_for_and_not_both():
    tested, waiting = table("manifest.tsv"), table("waiting.tsv")
    assert not tested.keys() & waiting.keys()
    wanted = {f"{kind}-{number:02d}" for kind, count in COUNTS.items() for number in range(1, count + 1)}
    assert tested.keys() | waiting.keys() == wanted


def test_every_test_that_an_item_names_is_there():
    absent = []
    for item, nodes in table("manifest.tsv").items():
        for node in nodes.split(" "):
            path, _, name = node.partition("::")
            if not (ROOT / path).is_file() or name.split("::")[-1] not in names_in(path):
                absent.append(f"{item}: {node}")
    assert absent == []


def test_what_an_item_waits_for_is_a_part_that_is_not_built():
    assert {part for part in table("waiting.tsv").values()} <= set(PARTS)

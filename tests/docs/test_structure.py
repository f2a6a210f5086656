"""scripts/structure.py and scripts/draw_packages.py: figures and picture of a checkout, from its source alone."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import draw_packages  # noqa: E402
import structure  # noqa: E402

TEXTS = {
    "posttrain/__init__.py": "",
    "posttrain/errors.py": '"""Errors."""\n\n# why\nclass UserError(Exception):\n    """What a user can cause."""\n',
    "posttrain/config/__init__.py": "",
    "posttrain/config/load.py": "from posttrain.errors import UserError\n\n\n"
    "def load():  # here\n    from posttrain import tracking\n",
    "posttrain/tracking/__init__.py": "from posttrain.config import load\n",
    "docs/settings.md": "| key | default |\n|---|---|\n| `a.b` | 1 |\n| `a.c` | 2 |\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_lines_comments_layers_and_cycles_of_a_checkout_are_counted(checkout: Path):
    shape = structure.measure(checkout)
    top = shape.packages["(top level)"]
    assert (top.total, top.only_comments, top.docstrings, top.blank, top.code) == (5, 1, 2, 1, 1)
    assert shape.packages["config"].comments == 1 and shape.packages["config"].only_comments == 0
    figures = shape.figures
    assert (figures["files"], figures["settings of main_ppo"], figures["longest function, lines"]) == (5, 2, 2)
    assert [(edge.source, edge.target, edge.line) for edge in shape.back] == [
        ("posttrain.config.load", "posttrain.tracking", 5)
    ]
    assert shape.package_cycles == [["config", "tracking"]] and figures["modules in cycles"] == 2


def test_two_checkouts_are_shown_as_before_and_after(checkout: Path):
    before = structure.measure(checkout)
    (checkout / "posttrain/config/load.py").write_text("from posttrain.errors import UserError\n")
    text = structure.report([before, structure.measure(checkout)])
    assert "| back imports | 1 -> 0 |" in text and "| files | 5 |" in text
    assert "| config | 5 -> 1 |" in text and "Back imports: none" in text


def test_the_picture_has_every_package_and_marks_cycles(checkout: Path):
    tree = ElementTree.fromstring(draw_packages.draw(checkout))
    kinds = [element.tag.rpartition("}")[2] for element in tree.iter()]
    texts = {element.text for element in tree.iter() if element.tag.endswith("text")}
    assert {"config", "tracking", "basics"} <= texts and kinds.count("rect") == 3
    assert draw_packages.draw(checkout).count("#d64545") == 2

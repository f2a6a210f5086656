"""`scripts/code_places.py`: code is found by its function and its tokens, wherever it is and however it is laid out."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "scripts" / "code_places.py"

SOURCE = """
LIMITS = (0.1, 2.0)

class Loss:
    def __call__(self, x):
        '''Doubles.'''
        scale = self.scale(
            x,  # why
            2,
        )
        return x

    def scale(self, x, by):
        if x:
            return x
        return x * by

def scale(x):
    return x
"""


@pytest.fixture(scope="module")
def places():
    spec = importlib.util.spec_from_file_location("code_places", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["code_places"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def replaced(places, tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "loss.py").write_text(SOURCE)
    (tmp_path / "other.py").write_text("def other():\n    return self.scale(x, 2)\n")
    files = places.index(tmp_path)
    return lambda inside, code, becomes="NEW": places.find(files, inside, code).replaced(becomes)


def test_layout_comments_and_trailing_commas_do_not_matter(replaced):
    assert "scale = NEW\n        return x" in replaced("__call__", "self.scale(x, 2)")
    assert "scale = NEW\n        return x" in replaced("Loss", "self . scale(\n  x, 2,\n)")
    assert "            x,  # why\n            NEW\n        )" in replaced("__call__", "2,")
    assert "LIMITS = (0.1, NEW)" in replaced("LIMITS", "2.0")


def test_a_line_break_says_that_a_statement_begins_or_ends(places, replaced):
    with pytest.raises(places.NoPlaceError, match="is there 2 times: 'return x'"):
        replaced("Loss.scale", "return x")
    assert "            NEW\n        return x * by" in replaced("Loss.scale", "return x\n")
    with pytest.raises(places.NoPlaceError, match="is there 2 times"):
        replaced("Loss.scale", "\nreturn x")


def test_several_lines_are_indented_as_the_place_is(replaced):
    changed = replaced("Loss.scale", "if x:\n    return x\n", "if y:\n    return y\nz = 1")
    assert "        if y:\n            return y\n        z = 1\n        return x * by" in changed


def test_what_is_gone_or_in_several_functions_is_said(places, replaced):
    with pytest.raises(places.NoPlaceError, match="nothing is named `gone` any more"):
        replaced("gone", "x")
    with pytest.raises(
        places.NoPlaceError, match=r"`Loss.scale` \(.*loss.py\): this code is no longer there: 'self.y'"
    ):
        replaced("Loss.scale", "self.y")
    with pytest.raises(places.NoPlaceError, match="is there 2 times"):
        replaced("scale", "return x\n")
    assert "def scale(x):\n    NEW" not in replaced("Loss.scale", "return x\n")

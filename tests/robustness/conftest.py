"""What the wrong inputs are tried on: the small runs of tests/trainer, and a place for files."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# The helper of another folder; pytest puts a folder on the path only when it collects tests from it.
sys.path.append(str(Path(__file__).parents[1] / "trainer"))


@dataclass
class Place:
    """A folder, a model, data, and pytest's tools."""

    folder: Path
    model: Path
    sums: dict[str, Path]
    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    def write(self, name: str, text: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    def run(self, **more: Any) -> Any:
        from runs import run

        return run(self.model, self.sums, self.folder / "out", **more)

    def refused(self, action: Any, *args: Any, **kwargs: Any) -> str:
        """The text of the error for users that an action ends in."""
        from posttrain.errors import UserError

        with pytest.raises(UserError) as caught:
            action(*args, **kwargs)
        return str(caught.value)


@pytest.fixture
def place(tmp_path, tiny_model, sums, monkeypatch, capsys) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path, tiny_model, sums, monkeypatch, capsys)
